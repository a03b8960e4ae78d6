"""Say in which videos two caches differ, or in which questions two folders of answers do, without reading tokens."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.command import Parser, wide_console
from jobs.frame.json_document import Done, add_json
from jobs.frame.stores import run_on_stores

if TYPE_CHECKING:
    from pipeline.storage.s3 import Objects

EPILOG = """\
Tokens are compared by the checksums in the rows: that the files hold them is for jobs.verify to say. Which run wrote a
row, when, how long it took and where its tokens lie are no differences.

Exit code: 0 equal; 1 different, or a file is damaged; 2 usage, or a place is neither a cache nor answers.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two caches or two folders of answers; return the exit code."""
    parser = Parser("python -m jobs.diff", description=__doc__, epilog=EPILOG)
    for name in ("first", "second"):
        parser.add_argument(name, metavar=name.upper(), help="a cache, or what jobs.generate wrote")
    add_json(parser)
    return run_on_stores(parser, argv, _diff, interrupted="interrupted")


def _diff(arguments: argparse.Namespace, objects: Objects, _: Console) -> Done:
    """Compare the two places, show how they differ, and return the record."""
    from pipeline.sharing.diff import compare, render  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    difference = compare(store_at(arguments.first, objects), store_at(arguments.second, objects))
    if not arguments.json:
        wide_console().print(render(difference))
    record = {"first": arguments.first, "second": arguments.second, "equal": difference.equal, **asdict(difference)}
    return Done(0 if difference.equal else 1, record)


if __name__ == "__main__":
    sys.exit(main())
