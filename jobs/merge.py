"""Merge caches of the same identity (model, frames, pruning) into one cache, without rewriting tokens."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.command import Parser
from jobs.frame.json_document import CommandResult, add_json
from jobs.frame.stores import make_say, report, run_on_stores

if TYPE_CHECKING:
    from pipeline.storage.s3 import Objects

EPILOG = """\
If several caches have a video, the rule of the cache format selects its row: removed before ok before failed, then the
most attempts. On one file system token shards are hard links, which take no disk space; elsewhere they are copied.
--out may be one of the caches. Rerun the same command to resume after an interrupt.

Exit code: 0 merged; 1 a file is damaged, or a store failed; 2 usage, no cache, caches of different identities, or equal
ids with --on-equal refuse: nothing is written; 130 interrupted: rerun the same command to resume.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Merge caches into one; return the exit code."""
    parser = Parser("python -m jobs.merge", description=__doc__, epilog=EPILOG)
    parser.add_argument("caches", metavar="CACHE", nargs="+", help="two or more folders, or prefixes of a store")
    parser.add_argument("--out", required=True, metavar="CACHE", help="the merged cache, new or of the same identity")
    parser.add_argument(
        "--on-equal",
        choices=("rule", "refuse"),
        default="rule",
        help="for videos with different tokens in several caches: select by the rule, or refuse to merge [rule]",
    )
    add_json(parser)

    def find_conflict(arguments: argparse.Namespace) -> str | None:
        is_single = len({*arguments.caches, arguments.out}) < 2
        return "name two caches, or one cache and another --out" if is_single else None

    return run_on_stores(parser, argv, _merge, find_conflict)


def _merge(arguments: argparse.Namespace, objects: Objects, console: Console) -> CommandResult:
    """Merge the caches, print the result, and return its record."""
    from pipeline.rewrite.merge import merge_caches  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    say = make_say(console)
    sources = [store_at(place, objects) for place in arguments.caches]
    result = merge_caches(sources, store_at(arguments.out, objects), say, arguments.on_equal)
    return report(result, say, out=arguments.out)


if __name__ == "__main__":
    sys.exit(main())
