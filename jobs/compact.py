"""Merge the files of a cache's videos table into a few sorted files, so that opening it and finding videos is fast."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.command import Parser
from jobs.frame.json_document import CommandResult, add_json
from jobs.frame.stores import add_cache, add_keep_minutes, make_say, report, run_on_stores

if TYPE_CHECKING:
    from pipeline.storage.s3 import Objects

EPILOG = """\
jobs.prune merges a part of the files while it runs and when it ends. jobs.compact merges all of them; runs may write at
the same time. Merged files stay for --keep-minutes for their readers: the next jobs.compact or jobs.prune deletes them.
--tokens rewrites the videos of small token shards, many to a shard; the next jobs.compact --tokens deletes the old
shards after --keep-minutes.

Exit code: 0 merged; 1 a file is damaged, rows of committed videos are lost, or the store failed; 2 usage, no cache, or
--tokens while a run writes to it; 130 interrupted: nothing is lost.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Merge the files of a cache's videos table; return the exit code."""
    parser = Parser("python -m jobs.compact", description=__doc__, epilog=EPILOG)
    add_cache(parser)
    add_keep_minutes(parser, "keep merged files for M minutes for their readers")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="join the small token shards of a slow run too; refused while a run writes to the cache",
    )
    add_json(parser)
    return run_on_stores(parser, argv, _compact, interrupt_message="interrupted: nothing is lost")


def _compact(arguments: argparse.Namespace, objects: Objects, console: Console) -> CommandResult:
    """Merge the videos table, and the token shards with ``--tokens``; print the results and return their record.

    The exit code is 1 if rows of committed videos are lost.
    """
    from pipeline.cache.header import fingerprint, read_header  # noqa: PLC0415
    from pipeline.cache.live import Ledger  # noqa: PLC0415
    from pipeline.cache.merging import merge  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.prune.summary import format_lost  # noqa: PLC0415
    from pipeline.rewrite.compact import JoinResult, join_tokens  # noqa: PLC0415
    from pipeline.runner.claim import refuse_links  # noqa: PLC0415
    from pipeline.runner.run_record import list_committed_shards  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    store, say = store_at(arguments.cache, objects), make_say(console)
    refuse_links(store)
    identity = fingerprint(read_header(store)["identity"])
    committed = list_committed_shards(store)
    keep = timedelta(minutes=arguments.keep_minutes)
    merged, joined = merge(store, identity, everything=True, keep=keep), JoinResult()
    report(merged, say)
    if arguments.tokens:
        joined = join_tokens(store, say, keep)
        report(joined, say)
    lost_ids = Ledger(store, identity).refresh().lost(committed)
    if lost_ids:
        say(format_lost(len(lost_ids), lost_ids))
    record = {"cache": str(store), **asdict(merged), "n_lost": len(lost_ids), "joined": asdict(joined)}
    return CommandResult(1 if lost_ids else 0, record)


if __name__ == "__main__":
    sys.exit(main())
