"""Check every file of a cache against its committed rows, and list orphaned files; repair or clean it if asked."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.command import Parser, count
from jobs.frame.json_document import CommandResult, add_json
from jobs.frame.stores import add_cache, add_keep_minutes, add_video_root, run_on_stores
from pipeline.options import positive

if TYPE_CHECKING:
    from pipeline.storage.s3 import Objects

EPILOG = """\
Checked: the header; each videos shard against the hash in its name, and its rows; each token shard that the rows name:
its footer, the checksums of all pages, the layout, positions, ranks and the checksum of every video's tokens.

Exit code: 0 nothing is damaged (orphaned files are a note), after --repair or --clean if asked; 1 something is damaged;
2 usage, or no cache; 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Check every file of a cache, and repair or clean it if asked; return the exit code."""
    parser = Parser("python -m jobs.verify", description=__doc__, epilog=EPILOG)
    _add_flags(parser)
    return run_on_stores(parser, argv, _verify, _find_conflict, "interrupted: the cache was not read to its end")


def _find_conflict(arguments: argparse.Namespace) -> str | None:
    """Return the error message for flags that exclude each other, or None."""
    if arguments.model is not None and not arguments.live:
        return "--model goes with --live"
    if arguments.live and not arguments.video_root:
        return "--live reads sources, only below folders and prefixes that you name: add --video-root"
    if arguments.video_root and not arguments.live:
        return "--video-root goes with --live"
    if arguments.repair and arguments.live:
        return "--repair and --live do not go together: repair first"
    if arguments.sample and (arguments.repair or arguments.clean):
        return "--sample goes with neither --repair nor --clean, which need all damage"
    if arguments.seed < 0:
        return "--seed must not be below 0"
    return None if positive(arguments.log_interval) else "--log-interval must be a positive number"


def _add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of jobs.verify."""
    add_cache(parser)
    parser.add_argument(
        "--jobs",
        type=count,
        default=min(8, os.cpu_count() or 1),
        metavar="N",
        help="files read at a time [CPUs, 8 at most]",
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove token shards that no row names and files of broken writes, and abort uploads that have been "
        "pending for an hour; refused while a run writes to the cache",
    )
    add_keep_minutes(parser, "with --clean and --repair: keep files younger than M minutes")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="give videos with damaged tokens or rows a failed row, which jobs.prune --retry-failed encodes again, "
        "keep sound videos, then --clean; replaced files stay in CACHE/repaired/",
    )
    _add_sampling(parser)
    add_json(parser)
    parser.add_argument(
        "--log-interval", type=float, default=30.0, metavar="S", help="seconds between progress lines [30]"
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags that draw random videos."""
    parser.add_argument(
        "--live", type=count, default=0, metavar="K", help="encode K random videos again from their sources"
    )
    add_video_root(parser, "with --live: encode again")
    parser.add_argument(
        "--sample",
        type=count,
        default=0,
        metavar="K",
        help="read the tokens of only K random videos, and estimate how likely that misses damage [all videos]",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="with --live and --sample: seed that draws the videos [0]"
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="with --live: the model's id or folder, if it has moved since the run"
    )


def _verify(arguments: argparse.Namespace, objects: Objects, console: Console) -> CommandResult:
    """Run the verification; return the exit code, the record and the lines of its report."""
    from pipeline.storage.stores import store_at  # noqa: PLC0415 - torch and Arrow load only after the flags are checked
    from pipeline.verify.verify import VerifyRequest, verify  # noqa: PLC0415

    names = ("jobs", "clean", "repair", "live", "sample", "seed", "model", "log_interval", "video_root")
    keep = timedelta(minutes=arguments.keep_minutes)
    request = VerifyRequest(**{name: getattr(arguments, name) for name in names}, keep=keep, objects=objects)
    report = verify(store_at(arguments.cache, objects), request, console)
    return CommandResult(report.exit_code, report.as_record(), list(report.lines()))


if __name__ == "__main__":
    sys.exit(main())
