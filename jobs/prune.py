"""Decode videos, encode them, prune their visual tokens and write them to a Parquet cache, on Ray."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from rich.console import Console

from jobs.command import EXIT_CODES, Parser, find_overridden_sampling, import_libraries, run_command
from jobs.frame.json_document import CommandResult
from pipeline.prune.config import PruneConfig

EPILOG = """\
examples:
  python -m jobs.prune                                          the sample clips, a tiny random model, ./cache
  python -m jobs.prune videos/ --out cache --model llava-hf/llava-onevision-qwen2-7b-ov-hf
  python -m jobs.prune manifest.jsonl --video-root /data --fps 1 --max-frames 64
  python -m jobs.prune manifest.jsonl --dry-run                 list the work of a run; --limit 100 does a part of it
  python -m jobs.prune manifest.jsonl --plan                    forecast time, bytes and cost from 20 videos
  python -m jobs.prune --plan --model MODEL --gpus 64 --gpu-type A100 --videos 2e6 --seconds 60

Rerun the same command to resume; it does nothing if every video has a row.
"""

#: The options that --help shows.
USUAL = (
    *("videos", "out", "model", "pruner", "retention_ratio", "num_frames", "fps", "max_frames", "token_codec"),
    *("retry_failed", "limit", "dry_run", "plan"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prune videos into a cache, or forecast the run (``--dry-run``, ``--plan``); return the exit code."""
    parser = Parser("python -m jobs.prune", description=__doc__, epilog=EPILOG + EXIT_CODES.format(item="video"))
    return run_command(parser, PruneConfig, _prune, argv, find_overridden_sampling, USUAL)


def _prune(config: PruneConfig, console: Console) -> CommandResult:
    """Run the pruning that ``config`` describes, or forecast it; return the exit code, the record and what to print.

    The exit code depends on how many videos failed, and on how many of them for infrastructure reasons.

    Raises:
        UsageError: an input is not a list of videos, or the run is refused.
        RunFailed: the run stopped before every video had a row.
    """
    from pipeline.prune.manifest_checks import refuse_other_file  # noqa: PLC0415

    for video in config.videos:
        refuse_other_file(video)
    # Ray, torch and the decoders load only now: --help, a mistyped flag and a file that is no video answer at once.
    with import_libraries(console):
        from pipeline.plan.render import render_plan  # noqa: PLC0415
        from pipeline.prune.dry_run import make_forecast, render_forecast  # noqa: PLC0415
        from pipeline.prune.plan import plan_run  # noqa: PLC0415
        from pipeline.prune.run import prune  # noqa: PLC0415
        from pipeline.prune.summary import render_summary  # noqa: PLC0415

    if config.plan:
        plan = plan_run(config, console)
        return CommandResult(0, plan.as_record(), [render_plan(plan)])
    if config.dry_run:
        todo = make_forecast(config, console)
        return CommandResult(0, todo.as_record(), [render_forecast(todo)])
    summary = prune(config, console)
    look = f"look inside: python -m jobs.inspect {shlex.quote(config.out)}"
    limit = config.compute_infrastructure_limit(summary.n_videos)
    failure = ""
    if summary.n_outside > limit:
        failure = (
            f"failed: {summary.n_outside} of {summary.n_videos} videos failed for infrastructure reasons (I/O, bugs, "
            f"GPU memory), more than {limit}. Check nodes, mounts, credentials and GPUs, then rerun with --retry-failed"
        )
    code = summary.exit_code(config.compute_failure_limit(summary.n_videos), limit)
    return CommandResult(code, {"out": config.out, **summary.as_record()}, [render_summary(summary), "", look], failure)


if __name__ == "__main__":
    sys.exit(main())
