"""Merge the files of a cache's videos table into few sorted ones, so that opening it and finding a video stay quick."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.command import Parser
from jobs.frame.json_document import Done, add_json
from jobs.frame.stores import add_cache, add_keep_minutes, run_on_stores, saying

if TYPE_CHECKING:
    from pipeline.storage.s3 import Objects

EPILOG = """\
jobs.prune merges by itself while it runs and when it ends; this merges everything, and may run beside others. Files
that were merged stay for --keep-minutes, so that readers go on: the next jobs.compact or jobs.prune deletes them.
--tokens writes the videos of small token shards anew, many to a shard; the next jobs.compact --tokens deletes the old
shards after --keep-minutes.

Exit code: 0 merged; 1 a file is damaged, rows of committed videos are lost, or the store failed; 2 usage, no cache, or
--tokens while a run writes to it; 130 interrupted: nothing is lost.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Merge the files of a cache's videos table; return the exit code."""
    parser = Parser("python -m jobs.compact", description=__doc__, epilog=EPILOG)
    add_cache(parser)
    add_keep_minutes(parser, "keep merged files for M minutes, so that readers go on")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="join small token shards too, as a slow run leaves them; refused while a run writes to the cache",
    )
    add_json(parser)
    return run_on_stores(parser, argv, _compact, interrupted="interrupted: nothing is lost")


def _compact(arguments: argparse.Namespace, objects: Objects, console: Console) -> Done:
    """Merge the videos table, print what was done, and return the record."""
    from pipeline.cache.header import fingerprint, read_header  # noqa: PLC0415
    from pipeline.cache.live import Ledger  # noqa: PLC0415
    from pipeline.cache.merging import merge  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.prune.summary import lost_line  # noqa: PLC0415
    from pipeline.runner.run_record import committed_shards  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415
    from pipeline.verify.moves import Joined, join_tokens  # noqa: PLC0415

    store, say = store_at(arguments.cache, objects), saying(console)
    identity = fingerprint(read_header(store)["identity"])
    committed = committed_shards(store)
    keep = timedelta(minutes=arguments.keep_minutes)
    done = merge(store, identity, everything=True, keep=keep)
    for line in done.lines():
        say(line)
    joined = join_tokens(store, say, keep) if arguments.tokens else Joined()
    for line in joined.lines() if arguments.tokens else ():
        say(line)
    lost = Ledger(store, identity).refresh().lost(committed)
    if lost:
        say(lost_line(len(lost), lost))
    return Done(1 if lost else 0, {"cache": str(store), **asdict(done), "n_lost": len(lost), "joined": asdict(joined)})


if __name__ == "__main__":
    sys.exit(main())
