"""Merge caches of the same identity (model, frames, pruning) into one cache, without rewriting tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from jobs.command import RERUN, STORE_FAILURES, Parser, run_command
from jobs.frame.json_document import CommandResult
from jobs.frame.stores import make_objects, report_result
from pipeline.console import make_speaker
from pipeline.errors import UsageError
from pipeline.options import REQUIRED, S3Options, check_choices, option

EPILOG = """\
If several caches have a video, the rule of the cache format selects its row: removed before ok before failed, then the
most attempts. On one file system token shards are hard links, which take no disk space; elsewhere they are copied.
--out may be one of the caches. Rerun the same command to resume after an interrupt.

Exit code: 0 merged; 1 a file is damaged, or a store failed; 2 usage, no cache, caches of different identities, or equal
ids with --on-equal refuse: nothing is written; 130 interrupted: rerun the same command to resume.
"""


@dataclass(frozen=True, kw_only=True)
class MergeConfig(S3Options):
    """All options of ``python -m jobs.merge``. An invalid value raises UsageError."""

    caches: list[str] = option(
        [], "two or more folders, or prefixes of a store", positional=True, metavar="CACHE", group="caches"
    )
    out: str = option(REQUIRED, "the merged cache, new or of the same identity", metavar="CACHE")
    on_equal: str = option(
        "rule",
        "for videos with different tokens in several caches: select by the rule, or refuse to merge",
        choices=("rule", "refuse"),
    )

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid value."""
        check_choices(self)


def main(argv: Sequence[str] | None = None) -> int:
    """Merge caches into one; return the exit code."""
    parser = Parser("python -m jobs.merge", description=__doc__, epilog=EPILOG)
    return run_command(parser, MergeConfig, _merge, argv, interrupt_message=RERUN, failures=STORE_FAILURES)


def _merge(config: MergeConfig, console: Console) -> CommandResult:
    """Merge the caches, print the result, and return its record.

    Raises:
        UsageError: fewer than two caches are named, counting ``out``, or they cannot be merged (such as NotACache,
            IdentityMismatch, CacheLocked).
        CorruptShard: a file is damaged.
    """
    from pipeline.rewrite.merge import merge_caches  # noqa: PLC0415 - Arrow loads after the flags are checked
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    objects = make_objects(config)
    say = make_speaker(console)
    out, *sources = (store_at(place, objects) for place in (config.out, *config.caches))
    if not sources or {source.root for source in sources} == {out.root}:
        raise UsageError("name two caches, or one cache and another --out")
    on_equal: Literal["rule", "refuse"] = "refuse" if config.on_equal == "refuse" else "rule"
    result = merge_caches(sources, out, say, on_equal)
    return report_result(result, say, out=config.out)


if __name__ == "__main__":
    sys.exit(main())
