"""Remove videos from a cache for good: their tokens and all their records."""

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
from jobs.frame.stores import add_cache, add_keep_minutes, make_say, run_on_stores
from pipeline.options import read_ids

if TYPE_CHECKING:
    from pipeline.storage.s3 import Objects

EPILOG = """\
For takedowns, licences, privacy. Readers refuse the videos at once (RemovedVideo), and no run encodes them again. Their
files are deleted after --keep-minutes, for readers of other videos; the command waits for that. Stored indexes, the
records and logs of runs, and CACHE/repaired/ are cleaned of the videos too. A row with the id, the time and the reason
stays, which bars the id.

Exit code: 0 removed; 1 a file is damaged, or the store failed; 2 usage, no cache, or a run writes to it;
130 interrupted: rerun the same command to finish.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Remove videos from a cache for good; return the exit code."""
    parser = Parser("python -m jobs.remove", description=__doc__, epilog=EPILOG)
    add_cache(parser)
    parser.add_argument("--ids", required=True, metavar="FILE", help="a video_id a line, as jobs.inspect shows them")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why; it stays in the cache")
    add_keep_minutes(parser, "keep the videos' files for M minutes for readers of other videos")
    add_json(parser)

    def find_conflict(arguments: argparse.Namespace) -> str | None:
        # An empty text, as of a shell's variable that is not set, would stay in the cache for good.
        return None if arguments.reason.strip() else "--reason must be a text"

    return run_on_stores(parser, argv, _remove, find_conflict)


def _remove(arguments: argparse.Namespace, objects: Objects, console: Console) -> CommandResult:
    """Remove the videos listed in ``--ids`` for ``--reason``, print the result, and return its record.

    Waits ``--keep-minutes`` for readers before it deletes files. Raises as ``remove_videos``, and UsageError.
    """
    from pipeline.storage.stores import store_at  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.verify.moves import remove_videos  # noqa: PLC0415

    store, say = store_at(arguments.cache, objects), make_say(console)
    keep = timedelta(minutes=arguments.keep_minutes)
    result = remove_videos(store, read_ids("ids", arguments.ids), arguments.reason, say, keep)
    for line in result.lines():
        say(line)
    return CommandResult(0, {"cache": str(store), **asdict(result)})


if __name__ == "__main__":
    sys.exit(main())
