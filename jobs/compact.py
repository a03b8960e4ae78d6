"""Merge the files of a cache's videos table into a few sorted files, so that opening it and finding videos is fast."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from jobs.command import STORE_FAILURES, Parser, run_command
from jobs.frame.json_document import CommandResult
from jobs.frame.stores import CacheOptions, make_objects, report_result
from pipeline.console import make_speaker
from pipeline.options import option

EPILOG = """\
jobs.prune merges a part of the files while it runs and when it ends. jobs.compact merges all of them; runs may write at
the same time. Merged files stay for --keep-minutes for their readers: the next jobs.compact or jobs.prune deletes them.
--tokens rewrites the videos of small token shards, many to a shard; the next jobs.compact --tokens deletes the old
shards after --keep-minutes.

Exit code: 0 merged; 1 a file is damaged, rows of committed videos are lost, or the store failed; 2 usage, no cache, or
--tokens while a run writes to it; 130 interrupted: nothing is lost.
"""


@dataclass(frozen=True, kw_only=True)
class CompactConfig(CacheOptions):
    """All options of ``python -m jobs.compact``. An invalid value raises UsageError."""

    tokens: bool = option(
        False,
        "join the small token shards of a slow run too; refused while a run writes to the cache",
        group="cache",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Merge the files of a cache's videos table, and its small token shards with ``--tokens``; return the exit code."""
    parser = Parser("python -m jobs.compact", description=__doc__, epilog=EPILOG)
    interrupt_message = "interrupted: nothing is lost"
    return run_command(
        parser, CompactConfig, _compact, argv, interrupt_message=interrupt_message, failures=STORE_FAILURES
    )


def _compact(config: CompactConfig, console: Console) -> CommandResult:
    """Merge the videos table, and the token shards with ``--tokens``; print the results and return their record.

    The exit code is 1, with a line about them, if committed videos have lost their rows.

    Raises:
        UsageError: a folder of the cache is a symbolic link, there is no cache (NotACache), or with ``--tokens`` a run
            writes to it (CacheLocked).
        CorruptShard: a file of the cache is damaged.
    """
    from pipeline.cache.header import compute_fingerprint, read_header  # noqa: PLC0415
    from pipeline.cache.live import Ledger  # noqa: PLC0415
    from pipeline.cache.merging import merge_table_files  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.prune.summary import format_lost  # noqa: PLC0415
    from pipeline.rewrite.compact import JoinResult, join_tokens  # noqa: PLC0415
    from pipeline.runner.claim import refuse_links  # noqa: PLC0415
    from pipeline.runner.run_record import list_committed_shards  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    store = store_at(config.cache, make_objects(config))
    say = make_speaker(console)
    refuse_links(store)
    identity = compute_fingerprint(read_header(store)["identity"])
    committed = list_committed_shards(store)
    merged = merge_table_files(store, identity, everything=True, keep=config.keep)
    joined = JoinResult()
    report_result(merged, say)
    if config.tokens:
        joined = join_tokens(store, say, config.keep)
        report_result(joined, say)
    lost_ids = Ledger(store, identity).refresh().lost(committed)
    if lost_ids:
        say(format_lost(len(lost_ids), lost_ids))
    record = {"cache": str(store), **asdict(merged), "n_lost": len(lost_ids), "joined": asdict(joined)}
    return CommandResult(1 if lost_ids else 0, record)


if __name__ == "__main__":
    sys.exit(main())
