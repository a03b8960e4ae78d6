"""Remove videos from a cache, answers or results for good: their tokens, texts and all their records."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.command import RERUN, STORE_FAILURES, Parser, import_libraries, run_command
from jobs.frame.json_document import CommandResult
from jobs.frame.stores import CacheOptions, make_objects, report_result
from pipeline.console import make_speaker
from pipeline.options import REQUIRED, check, option, read_ids

if TYPE_CHECKING:
    from pipeline.storage.stores import Store

EPILOG = """\
For takedowns, licences, privacy. The ids and the reason stay, which bars the ids. The records and logs of runs are
cleaned of the videos too.

CACHE    readers refuse the videos at once (RemovedVideo), and no run encodes them again. Their files are deleted after
         --keep-minutes, for readers of other videos; the command waits for that. Stored indexes and CACHE/repaired/ are
         cleaned too.
ANSWERS  of jobs.generate: questions about the videos become rows of status "removed" without any text. Neither they nor
         new questions about the videos are asked again. A question about several videos is removed with any of them.
RESULTS  of jobs.evaluate: the same for their answers, and for RESULTS/cache. Scores, tables, page and submissions are
         written again without these questions.

A cache, the answers made from it, and the results of jobs.evaluate --score are separate places: run the command for
each. The results of --score may also be made again, from answers that the videos were removed from.

Exit code: 0 removed; 1 a file is damaged, or the store failed; 2 usage, none of these places, damaged scores, or a run
writes to it; 130 interrupted: rerun the same command to finish.
"""


@dataclass(frozen=True, kw_only=True)
class RemoveConfig(CacheOptions):
    """All options of ``python -m jobs.remove``. An invalid value raises UsageError."""

    cache: str = option(
        REQUIRED,
        "the folder, or the s3://, gs:// or az:// prefix, that jobs.prune, jobs.generate or jobs.evaluate wrote",
        positional=True,
        metavar="CACHE|ANSWERS|RESULTS",
        group="videos",
    )
    ids: str = option(REQUIRED, "a video_id a line, as jobs.inspect shows them", metavar="FILE", group="videos")
    reason: str = option(REQUIRED, "why; it stays with the ids", metavar="TEXT")

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid value, and for a blank reason."""
        super().__post_init__()
        # An empty text, from a shell variable that is not set, would stay in the cache for good.
        check(bool(self.reason.strip()), "reason", "a text", self.reason)


def main(argv: Sequence[str] | None = None) -> int:
    """Remove videos from a cache, answers or results for good; return the exit code."""
    parser = Parser("python -m jobs.remove", description=__doc__, epilog=EPILOG)
    return run_command(parser, RemoveConfig, _remove, argv, interrupt_message=RERUN, failures=STORE_FAILURES)


def _remove(config: RemoveConfig, console: Console) -> CommandResult:
    """Remove the videos listed in ``--ids`` for ``--reason``, print what was done, and return its record.

    Removal from results includes the cache below them, even if the removal from the results themselves fails. For a
    cache, the command waits ``--keep-minutes`` for readers before it deletes files.

    Raises:
        UsageError: the ids cannot be read, there is no cache (NotACache), scores are damaged, or a run writes there
            (CacheLocked).
        CorruptShard: a file is damaged.
    """
    # Arrow loads after the flags are checked.
    from pipeline.cache.header import HEADER  # noqa: PLC0415
    from pipeline.evaluate.config import CACHE_FOLDER, RESULTS_HEADER  # noqa: PLC0415
    from pipeline.generate.answers import HEADER as ANSWERS_HEADER  # noqa: PLC0415
    from pipeline.generate.removal import remove_answers  # noqa: PLC0415
    from pipeline.rewrite.remove import remove_videos  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    objects = make_objects(config)
    say = make_speaker(console)
    store = store_at(config.cache, objects)
    ids = read_ids("ids", config.ids)
    reason = config.reason

    def remove_from_cache(cache: Store) -> CommandResult:
        return report_result(remove_videos(cache, ids, reason, say, config.keep), say, cache=str(cache))

    if store.exists(ANSWERS_HEADER):
        return report_result(remove_answers(store, ids, reason, say), say, answers=str(store))
    if not store.exists(RESULTS_HEADER):
        return remove_from_cache(store)
    with import_libraries(console):
        from pipeline.evaluate.removal import remove_results  # noqa: PLC0415

    cache = store_at(f"{store}/{CACHE_FOLDER}", objects)
    has_cache = cache.exists(HEADER)
    try:
        results = report_result(remove_results(store, ids, reason, say, objects), say, results=str(store))
    except Exception:  # damaged answers or scores must not keep the tokens from being removed
        if has_cache:
            remove_from_cache(cache)
        raise
    if not has_cache:
        return results
    return CommandResult(0, {"results": results.record, "cache": remove_from_cache(cache).record})


if __name__ == "__main__":
    sys.exit(main())
