"""Show what a cache holds: a summary, or for one video what was kept of each frame."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jobs.command import exit_code_of
from jobs.flags import add_flags, from_flags
from pipeline.errors import CorruptShard, UnknownVideo
from pipeline.options import S3Options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser("python -m jobs.inspect", description=__doc__)
    parser.add_argument("cache", metavar="CACHE", help="the folder or s3://bucket/prefix that jobs.prune wrote")
    parser.add_argument("video_id", metavar="VIDEO_ID", nargs="?", help="one video of it")
    parser.add_argument(
        "--retention-ratio", type=float, metavar="R", help="with VIDEO_ID: show a smaller ratio of the same cache"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="with VIDEO_ID: write a page that shows the kept tokens in its frames"
    )
    add_flags(parser, S3Options)
    arguments = parser.parse_args(argv)
    if arguments.html is not None and arguments.video_id is None:
        parser.error("--html goes with VIDEO_ID")
    if arguments.retention_ratio is not None and arguments.video_id is None:
        parser.error("--retention-ratio goes with VIDEO_ID")
    return exit_code_of(
        lambda: _inspect(arguments),
        Console(stderr=True),
        failed=(CorruptShard, OSError),
        refused=(ValueError, UnknownVideo),
    )


def _inspect(arguments: argparse.Namespace) -> int:
    from pipeline.cache.reader import TokenCache  # noqa: PLC0415 - torch and Arrow load only after the flags are checked
    from pipeline.inspect.report import cache_report, video_report  # noqa: PLC0415
    from pipeline.storage.s3 import Objects  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    s3 = from_flags(S3Options, arguments)
    objects = Objects.from_environment(s3.s3_endpoint, s3.s3_region)
    cache = TokenCache(arguments.cache, store=store_at(arguments.cache, objects))
    console = Console()
    if arguments.video_id is None:
        console.print(cache_report(cache))
    elif arguments.html is None:
        console.print(video_report(cache, arguments.video_id, arguments.retention_ratio))
    else:
        from pipeline.inspect.page import write_page  # noqa: PLC0415 - only the page needs the decoders

        line = write_page(cache, arguments.video_id, arguments.html, arguments.retention_ratio, objects)
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
