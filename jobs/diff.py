"""Say in which videos two caches differ, or in which questions two folders of answers do, without reading tokens."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from jobs.command import Parser, exit_code_of, wide_console
from jobs.frame.flags import add_flags, from_flags
from jobs.frame.json_document import Done, add_json
from pipeline.errors import CorruptShard
from pipeline.options import S3Options

EPILOG = """\
Tokens are compared by the checksums in the rows: that the files hold them is for jobs.verify to say. Which run wrote a
row, when, how long it took and where its tokens lie are no differences.

Exit code: 0 equal; 1 different, or a file is damaged; 2 usage, or a place is neither a cache nor answers.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two caches or two folders of answers; return the exit code."""
    parser = Parser(
        "python -m jobs.diff",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("first", "second"):
        parser.add_argument(name, metavar=name.upper(), help="a cache, or what jobs.generate wrote")
    add_json(parser)
    add_flags(parser, S3Options)
    arguments = parser.parse_args(argv)
    return exit_code_of(
        lambda: _diff(arguments), Console(stderr=True), failed=(CorruptShard, OSError), document=arguments.json
    )


def _diff(arguments: argparse.Namespace) -> Done:
    """Compare the two places, show how they differ, and return the record."""
    from pipeline.sharing.diff import compare, render  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.storage.s3 import Objects  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    s3 = from_flags(S3Options, arguments)
    objects = Objects.from_environment(s3.s3_endpoint, s3.s3_region)
    difference = compare(store_at(arguments.first, objects), store_at(arguments.second, objects))
    if arguments.json is None:
        wide_console().print(render(difference))
    record = {"first": arguments.first, "second": arguments.second, "equal": difference.equal, **asdict(difference)}
    return Done(0 if difference.equal else 1, record)


if __name__ == "__main__":
    sys.exit(main())
