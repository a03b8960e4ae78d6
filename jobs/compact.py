"""Make the index of a cache from its videos shards, so that opening it takes no longer for millions of videos."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rich.console import Console

from jobs.command import LogConsole, Parser, exit_code_of
from jobs.flags import add_flags, from_flags
from jobs.json_document import Done, add_json
from pipeline.errors import CorruptShard, RunFailed
from pipeline.options import S3Options

EPILOG = """\
jobs.prune does the same at the end of a run once --compact-after videos shards are in no index. The index is derived:
a cache without it reads the same, only slower, and one that is deleted (index.json, index/) can be made again.

Exit code: 0 made; 1 a videos shard is damaged, or the store failed; 2 usage, no cache, or a run writes to it;
130 interrupted: the earlier index stays.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = Parser(
        "python -m jobs.compact",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cache", metavar="CACHE", help="the folder or s3://bucket/prefix that jobs.prune wrote")
    parser.add_argument(
        "--rebuild", action="store_true", help="read every videos shard again, whatever the present index says"
    )
    add_json(parser)
    add_flags(parser, S3Options)
    arguments = parser.parse_args(argv)
    console = LogConsole()
    return exit_code_of(
        lambda: _compact(arguments, console),
        console,
        failed=(CorruptShard, RunFailed, OSError),
        interrupted="interrupted: the earlier index stays",
        document=arguments.json,
    )


def _compact(arguments: argparse.Namespace, console: Console) -> Done:
    from pipeline.cache.index.compaction import compact, described  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.cache.reader import read_header  # noqa: PLC0415
    from pipeline.execution.request import new_run_id  # noqa: PLC0415
    from pipeline.storage.lock import cache_lock  # noqa: PLC0415
    from pipeline.storage.s3 import Objects  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    s3 = from_flags(S3Options, arguments)
    store = store_at(arguments.cache, Objects.from_environment(s3.s3_endpoint, s3.s3_region))
    read_header(store)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with cache_lock(store, new_run_id(), say) as lock:
        say(f"reading the videos shards of {store}")
        done = compact(store, lock, rebuild=arguments.rebuild)
    for line in described(done):
        say(line)
    return Done(0, {"cache": str(store), **asdict(done)})


if __name__ == "__main__":
    sys.exit(main())
