"""Merge caches that were made alike into one, without rewriting a token."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.command import Parser
from jobs.frame.json_document import Done, add_json
from jobs.frame.stores import run_on_stores, saying

if TYPE_CHECKING:
    from pipeline.storage.s3 import Objects

EPILOG = """\
Of a video that several caches have, one row counts, by the rule of the cache format: removed before ok before failed,
then the most attempts. On one file system token shards are hard links, which take no room; elsewhere they are copied.
--out may be one of the caches. The same command goes on after an interrupt.

Exit code: 0 merged; 1 a file is damaged, or a store failed; 2 usage, no cache, caches that were not made alike, or
equal ids with --on-equal refuse: nothing is written; 130 interrupted: the same command goes on.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Merge caches into one; return the exit code."""
    parser = Parser("python -m jobs.merge", description=__doc__, epilog=EPILOG)
    parser.add_argument("caches", metavar="CACHE", nargs="+", help="two or more folders, or prefixes of a store")
    parser.add_argument("--out", required=True, metavar="CACHE", help="the merged cache: a new place, or such a cache")
    parser.add_argument(
        "--on-equal",
        choices=("rule", "refuse"),
        default="rule",
        help="for videos with other tokens in several caches: take the row that counts, or refuse to merge [rule]",
    )
    add_json(parser)

    def wrong(arguments: argparse.Namespace) -> str | None:
        alone = len({*arguments.caches, arguments.out}) < 2
        return "name two caches, or one and another --out" if alone else None

    return run_on_stores(parser, argv, _merge, wrong)


def _merge(arguments: argparse.Namespace, objects: Objects, console: Console) -> Done:
    """Merge the caches, print what was done, and return the record."""
    from pipeline.rewrite.merge import merge_caches  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    say = saying(console)
    sources = [store_at(place, objects) for place in arguments.caches]
    done = merge_caches(sources, store_at(arguments.out, objects), say, arguments.on_equal)
    for line in done.lines():
        say(line)
    return Done(0, {"out": arguments.out, **asdict(done)})


if __name__ == "__main__":
    sys.exit(main())
