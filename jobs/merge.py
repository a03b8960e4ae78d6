"""Merge caches that were made alike into one, without rewriting a token."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rich.console import Console

from jobs.command import LogConsole, Parser, exit_code_of
from jobs.frame.flags import add_flags, from_flags
from jobs.frame.json_document import Done, add_json
from pipeline.errors import CorruptShard, RunFailed
from pipeline.options import S3Options

EPILOG = """\
A video that several caches have is that of the README's rule for live rows: removed before ok before failed, then the
most attempts. On one file system token shards are hard links, which take no room; elsewhere they are copied. --out may
be one of the caches. The same command goes on after an interrupt.

Exit code: 0 merged; 1 a file is damaged, or a store failed; 2 usage, no cache, caches that were not made alike, or
equal ids with --on-equal refuse: nothing is written; 130 interrupted: the same command goes on.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Merge caches into one; return the exit code."""
    parser = Parser(
        "python -m jobs.merge",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("caches", metavar="CACHE", nargs="+", help="two or more folders, or prefixes of a store")
    parser.add_argument("--out", required=True, metavar="CACHE", help="the merged cache: a new place, or such a cache")
    parser.add_argument(
        "--on-equal",
        choices=("rule", "refuse"),
        default="rule",
        help="for videos with other tokens in several caches: take the row that counts, or refuse to merge [rule]",
    )
    add_json(parser)
    add_flags(parser, S3Options)
    arguments = parser.parse_args(argv)
    if len({*arguments.caches, arguments.out}) < 2:
        parser.error("name two caches, or one and another --out")
    console = LogConsole()
    return exit_code_of(
        lambda: _merge(arguments, console),
        console,
        failed=(CorruptShard, RunFailed, OSError),
        interrupted="interrupted: the same command goes on",
        document=arguments.json,
    )


def _merge(arguments: argparse.Namespace, console: Console) -> Done:
    """Merge the caches, print what was done, and return the record."""
    from pipeline.sharing.merge import merge_caches  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.storage.s3 import Objects  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    s3 = from_flags(S3Options, arguments)
    objects = Objects.from_environment(s3.s3_endpoint, s3.s3_region)
    sources = [store_at(place, objects) for place in arguments.caches]
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    done = merge_caches(sources, store_at(arguments.out, objects), say, arguments.on_equal)
    for line in done.lines():
        say(line)
    return Done(0, {"out": arguments.out, **asdict(done)})


if __name__ == "__main__":
    sys.exit(main())
