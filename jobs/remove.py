"""Remove videos from a cache for good: their tokens, and all that its rows say of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.command import Parser
from jobs.frame.json_document import Done, add_json
from jobs.frame.stores import add_cache, add_keep_minutes, run_on_stores, saying
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from pipeline.storage.s3 import Objects

EPILOG = """\
For takedowns, licences, privacy. From the first moment readers refuse the videos by name (RemovedVideo) and no run
encodes them again. Files that held them are deleted after --keep-minutes, so that readers of other videos go on; the
command waits for that. The same command ends what was interrupted. Copies in CACHE/repaired/ are left to you.

Exit code: 0 removed; 1 a file is damaged, or the store failed; 2 usage, no cache, or a run writes to it;
130 interrupted: the same command goes on.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Remove videos from a cache for good; return the exit code."""
    parser = Parser("python -m jobs.remove", description=__doc__, epilog=EPILOG)
    add_cache(parser)
    parser.add_argument("--ids", required=True, metavar="FILE", help="a video_id a line, as jobs.inspect shows them")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why; it stays in the cache")
    add_keep_minutes(parser, "files stay so long for their readers")
    add_json(parser)
    return run_on_stores(parser, argv, _remove)


def _remove(arguments: argparse.Namespace, objects: Objects, console: Console) -> Done:
    """Remove the videos listed in a file, print what was done, and return the record."""
    from pipeline.storage.stores import store_at  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.verify.moves import remove_videos  # noqa: PLC0415

    store, say = store_at(arguments.cache, objects), saying(console)
    keep = timedelta(minutes=arguments.keep_minutes)
    done = remove_videos(store, read_ids(arguments.ids), arguments.reason, say, keep)
    for line in done.lines():
        say(line)
    return Done(0, {"cache": str(store), **asdict(done)})


def read_ids(name: str) -> list[str]:
    """Read the distinct video ids of a text file, one a line. Raises UsageError where there is none, and for JSON."""
    try:
        lines = Path(name).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--ids {name}: it cannot be read: {error}") from error
    ids = list(dict.fromkeys(line.removesuffix("\r") for line in lines if line.strip()))
    if not ids:
        raise UsageError(f"--ids {name}: it names no video")
    if ids[0].startswith('{"'):  # a removal would bar such ids for good, and leave the videos
        raise UsageError(f"--ids {name}: it takes an id a line, not JSON: jq -r .video_id makes them")
    return ids


if __name__ == "__main__":
    sys.exit(main())
