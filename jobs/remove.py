"""Remove videos from a cache for good: their tokens, and all that its rows say of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

from rich.console import Console

from jobs.command import LogConsole, Parser, exit_code_of
from jobs.frame.flags import add_flags, from_flags
from jobs.frame.json_document import Done, add_json
from pipeline.errors import CorruptShard, RunFailed, UsageError
from pipeline.options import S3Options

EPILOG = """\
For takedowns, licences, privacy. From the first moment readers refuse the videos by name (RemovedVideo) and no run
encodes them again. Files that held them are deleted after --keep-minutes, so that readers of other videos go on; the
command waits for that. The same command ends what was interrupted. Copies in CACHE/repaired/ are left to you.

Exit code: 0 removed; 1 a file is damaged, or the store failed; 2 usage, no cache, or a run writes to it;
130 interrupted: the same command goes on.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Remove videos from a cache for good; return the exit code."""
    parser = Parser(
        "python -m jobs.remove",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "cache", metavar="CACHE", help="the folder, or the s3://, gs:// or az:// prefix, that jobs.prune wrote"
    )
    parser.add_argument("--ids", required=True, metavar="FILE", help="a video_id a line, as jobs.inspect shows them")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why; it stays in the cache")
    parser.add_argument(
        "--keep-minutes", type=float, default=10.0, metavar="M", help="files stay so long for their readers [10]"
    )
    add_json(parser)
    add_flags(parser, S3Options)
    arguments = parser.parse_args(argv)
    if arguments.keep_minutes < 0:
        parser.error("--keep-minutes must not be below 0")
    console = LogConsole()
    return exit_code_of(
        lambda: _remove(arguments, console),
        console,
        failed=(CorruptShard, RunFailed, OSError),
        interrupted="interrupted: the same command goes on",
        document=arguments.json,
    )


def _remove(arguments: argparse.Namespace, console: Console) -> Done:
    """Remove the videos listed in a file, print what was done, and return the record."""
    from pipeline.storage.s3 import Objects  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.storage.stores import store_at  # noqa: PLC0415
    from pipeline.verify.removal import remove_videos  # noqa: PLC0415

    ids = read_ids(arguments.ids)
    s3 = from_flags(S3Options, arguments)
    store = store_at(arguments.cache, Objects.from_environment(s3.s3_endpoint, s3.s3_region))
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    done = remove_videos(store, ids, arguments.reason, say, timedelta(minutes=arguments.keep_minutes))
    for line in done.lines():
        say(line)
    return Done(0, {"cache": str(store), **asdict(done)})


def read_ids(name: str) -> list[str]:
    """Read the distinct video ids of a text file, one a line. Raises UsageError where there is none."""
    try:
        lines = Path(name).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--ids {name}: it cannot be read: {error}") from error
    ids = list(dict.fromkeys(line.removesuffix("\r") for line in lines if line.strip()))
    if not ids:
        raise UsageError(f"--ids {name}: it names no video")
    return ids


if __name__ == "__main__":
    sys.exit(main())
