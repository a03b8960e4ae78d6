"""Decode videos, encode them, prune their visual tokens and write them to a Parquet cache, on Ray."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from rich.console import Console

from jobs.command import EXIT_CODES, Parser, loading, other_sampling, run_command, wide_console
from jobs.frame.json_document import Done
from jobs.frame.stores import saying
from pipeline.prune.config import PruneConfig

EPILOG = """\
examples:
  python -m jobs.prune                                          the sample clips, a tiny random model, ./cache
  python -m jobs.prune videos/ --out cache --model llava-hf/llava-onevision-qwen2-7b-ov-hf
  python -m jobs.prune manifest.jsonl --video-root /data --fps 1 --max-frames 64
  python -m jobs.prune manifest.jsonl --dry-run                 what a run would do; --limit 100 to do a part of it
  python -m jobs.prune manifest.jsonl --plan                    what that would take; looks at 20 videos
  python -m jobs.prune --plan --model MODEL --gpus 64 --gpu-type A100 --videos 2e6 --seconds 60

The same command again goes on where the last one stopped, and does nothing where nothing is left to do.
"""

#: The options that --help shows.
USUAL = (
    *("videos", "out", "model", "pruner", "retention_ratio", "num_frames", "fps", "max_frames", "token_codec"),
    *("retry_failed", "limit", "dry_run", "plan"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prune the videos that the flags name into a cache, or say what a run would do; return the exit code."""
    parser = Parser("python -m jobs.prune", description=__doc__, epilog=EPILOG + EXIT_CODES.format(item="video"))
    return run_command(parser, PruneConfig, _prune, argv, other_sampling, USUAL)


def _prune(config: PruneConfig, console: Console) -> Done:
    """Prune the videos, or forecast it with ``--plan``; print the summary and return the exit code and record."""
    from pipeline.prune.manifest_checks import refuse_other_file  # noqa: PLC0415

    for named in config.videos:
        refuse_other_file(named)
    # Ray, torch and the decoders load only now: --help, a mistyped flag and a file that is no video answer at once.
    with loading(console):
        from pipeline.prune.forecast import forecast, plan_run, render_forecast  # noqa: PLC0415
        from pipeline.prune.run import PruneRun  # noqa: PLC0415
        from pipeline.prune.summary import render  # noqa: PLC0415

    if config.plan:
        from pipeline.plan.render import render_plan  # noqa: PLC0415 - as above

        planned = plan_run(config, console)
        return Done(0, planned.as_record(), [render_plan(planned)])
    if config.dry_run:
        plan = forecast(config, console)
        return Done(0, plan.as_record(), [render_forecast(plan)])
    summary = PruneRun(config, console).run()
    out = wide_console()
    out.print(render(summary))
    inside = f"python -m jobs.inspect {shlex.quote(config.out)}"
    saying(out)(f"\nlook inside: {inside}")
    limit = config.outside_limit(summary.n_videos)
    if summary.n_outside > limit:
        failed = f"failed: {summary.n_outside} of {summary.n_videos} videos failed by what is no fault of theirs"
        remedy = "look at nodes, mounts, credentials and GPUs, then run again with --retry-failed"
        console.print(f"{failed} (io, bugs, memory of a GPU), more than {limit}: {remedy}", highlight=False)
    code = summary.exit_code(config.failure_limit(summary.n_videos), limit)
    return Done(code, {"out": config.out, **summary.as_record()})


if __name__ == "__main__":
    sys.exit(main())
