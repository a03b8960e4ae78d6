"""Check every file of a cache against its committed rows, and list orphaned files; repair or clean it if asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from jobs.command import STORE_FAILURES, Parser, run_command
from jobs.frame.json_document import CommandResult
from jobs.frame.stores import VIDEO_ROOT_HELP, CacheOptions, make_objects
from pipeline.errors import UsageError
from pipeline.options import check, is_positive, option

EPILOG = """\
Checked: the header; each videos shard against the hash in its name, and its rows; each token shard that the rows name:
its footer, the checksums of all pages, the layout, positions, ranks and the checksum of every video's tokens.

Exit code: 0 nothing is damaged (orphaned files are a note), after --repair or --clean if asked; 1 something is damaged;
2 usage, or no cache; 130 interrupted.
"""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(CacheOptions):
    """All options of ``python -m jobs.verify``. An invalid value raises UsageError."""

    jobs: int = option(
        min(8, os.cpu_count() or 1), "files read at a time (default: CPUs, 8 at most)", metavar="N", group="cache"
    )
    clean: bool = option(
        False,
        "remove token shards that no row names and files of broken writes, and abort uploads that have been pending "
        "for an hour; refused while a run writes to the cache",
    )
    repair: bool = option(
        False,
        "give videos with damaged tokens or rows a failed row, which jobs.prune --retry-failed encodes again, keep "
        "sound videos, then --clean; replaced files stay in CACHE/repaired/",
    )
    keep_minutes: float = option(
        10.0, "with --clean and --repair: keep files younger than M minutes", metavar="M", group="cache"
    )
    log_interval: float = option(30.0, "seconds between progress lines", metavar="S")
    sample: int = option(
        0,
        "read the tokens of only K random videos, and estimate how likely that misses damage (default: all videos)",
        metavar="K",
        group="random videos",
    )
    live: int = option(0, "encode K random videos again from their sources", metavar="K")
    video_root: list[str] = option([], VIDEO_ROOT_HELP.format("with --live: encode again"), metavar="DIR")
    seed: int = option(0, "with --live and --sample: seed that draws the videos", metavar="S")
    model: str | None = option(
        None, "with --live: the model's id or folder, if it has moved since the run", metavar="MODEL"
    )

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid value, and for flags that exclude or require each other."""
        super().__post_init__()
        check(self.jobs >= 1, "jobs", "at least 1", self.jobs)
        for name in ("sample", "live", "seed"):
            check(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        check(is_positive(self.log_interval), "log_interval", "a positive number of seconds", self.log_interval)
        if self.model is not None and not self.live:
            raise UsageError("--model goes with --live")
        if self.live and not self.video_root:
            raise UsageError("--live reads sources, only below folders and prefixes that you name: add --video-root")
        if self.video_root and not self.live:
            raise UsageError("--video-root goes with --live")
        if self.repair and self.live:
            raise UsageError("--repair cannot be combined with --live: repair first")
        if self.sample and (self.repair or self.clean):
            raise UsageError("--sample cannot be combined with --repair or --clean, which must find all damage")


def main(argv: Sequence[str] | None = None) -> int:
    """Check every file of a cache, and repair or clean it on request; return the exit code."""
    parser = Parser("python -m jobs.verify", description=__doc__, epilog=EPILOG)
    interrupt_message = "interrupted: the cache was not read to its end"
    return run_command(
        parser, VerifyConfig, _verify, argv, interrupt_message=interrupt_message, failures=STORE_FAILURES
    )


def _verify(config: VerifyConfig, console: Console) -> CommandResult:
    """Run the verification; return the exit code (1 if problems remain), the record and the lines of its report.

    Raises:
        UsageError: there is no cache (NotACache), a run writes to it (CacheLocked), or ``--live`` cannot encode its
            videos.
        RunFailed: a repair would leave no video.
        CorruptShard: bytes changed during a repair.
    """
    from pipeline.storage.stores import store_at  # noqa: PLC0415 - torch and Arrow load only after the flags are checked
    from pipeline.verify.verify import VerifyRequest, verify  # noqa: PLC0415

    objects = make_objects(config)
    names = ("jobs", "clean", "repair", "keep", "live", "sample", "seed", "model", "log_interval", "video_root")
    request = VerifyRequest(**{name: getattr(config, name) for name in names}, objects=objects)
    report = verify(store_at(config.cache, objects), request, console)
    return CommandResult(report.exit_code, report.as_record(), list(report.lines()))


if __name__ == "__main__":
    sys.exit(main())
