"""Remove videos from a cache for good: their tokens, and all that the cache says of them."""

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
from pipeline.options import read_ids

if TYPE_CHECKING:
    from pipeline.storage.s3 import Objects

EPILOG = """\
For takedowns, licences, privacy. From the first moment readers refuse the videos by name (RemovedVideo) and no run
encodes them again. Files that held them are deleted after --keep-minutes, so that readers of other videos go on; the
command waits for that. The same command ends what was interrupted. Kept indexes, the records and logs of runs, and
CACHE/repaired/ forget the videos too. What stays is a row with the id, the time and the reason, which bars the id.

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
    done = remove_videos(store, read_ids("ids", arguments.ids), arguments.reason, say, keep)
    for line in done.lines():
        say(line)
    return Done(0, {"cache": str(store), **asdict(done)})


if __name__ == "__main__":
    sys.exit(main())
