"""Show what a cache holds: a summary, or for one video what was kept of each frame."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipeline.errors import CorruptShard, NotACache, UnknownVideo


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
    parser.add_argument("--s3-endpoint", metavar="URL", help="address of the S3 API, where it is not Amazon's")
    parser.add_argument("--s3-region", metavar="REGION", help="region of the bucket")
    arguments = parser.parse_args(argv)
    if arguments.html is not None and arguments.video_id is None:
        parser.error("--html goes with VIDEO_ID")
    if arguments.retention_ratio is not None and arguments.video_id is None:
        parser.error("--retention-ratio goes with VIDEO_ID")
    return _inspect(arguments)


def _inspect(arguments: argparse.Namespace) -> int:
    from pipeline.cache.reader import TokenCache  # noqa: PLC0415 - torch and Arrow load only after the flags are checked
    from pipeline.inspect.report import cache_report, video_report  # noqa: PLC0415
    from pipeline.storage.s3 import Objects  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    errors = Console(stderr=True)
    try:
        objects = Objects.from_environment(arguments.s3_endpoint, arguments.s3_region)
        cache = TokenCache(arguments.cache, store=store_at(arguments.cache, objects))
        if arguments.video_id is None:
            Console().print(cache_report(cache))
        elif arguments.html is not None:
            from pipeline.inspect.page import write_page  # noqa: PLC0415 - only the page needs the decoders

            line = write_page(cache, arguments.video_id, arguments.html, arguments.retention_ratio, objects)
            Console().print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            Console().print(video_report(cache, arguments.video_id, arguments.retention_ratio))
    except (NotACache, UnknownVideo, ValueError) as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except (CorruptShard, OSError) as error:
        errors.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
