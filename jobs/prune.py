"""Decode videos, encode them, prune their visual tokens and write them to a Parquet cache, on Ray."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from rich.console import Console

from jobs.command import EXIT_CODES, run_command
from pipeline.prune.config import PruneConfig

EPILOG = """\
examples:
  python -m jobs.prune                                          the sample clips, a tiny random model, ./cache
  python -m jobs.prune videos/ --out cache --model llava-hf/llava-onevision-qwen2-7b-ov-hf
  python -m jobs.prune manifest.jsonl --video-root /data --fps 1 --max-frames 64
  python -m jobs.prune manifest.jsonl --dry-run                 what a run would do; --limit 100 to do a part of it

The same command again goes on where the last one stopped, and does nothing where nothing is left to do.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m jobs.prune",
        description=__doc__,
        epilog=EPILOG + EXIT_CODES.format(item="video"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return run_command(parser, PruneConfig, _prune, argv, _other_sampling)


def _other_sampling(flags: argparse.Namespace) -> set[str]:
    """A flag wins over the file: also over the other way of sampling."""
    return {"fps", "max_frames"} if flags.num_frames else {"num_frames"} if flags.fps else set()


def _prune(config: PruneConfig, console: Console) -> int:
    # Ray, torch and the decoders load only now: --help and a mistyped flag answer at once.
    from pipeline.prune.forecast import forecast, render_forecast  # noqa: PLC0415
    from pipeline.prune.run import prune_videos  # noqa: PLC0415
    from pipeline.prune.summary import render  # noqa: PLC0415

    out = Console()
    if config.dry_run:
        out.print(render_forecast(forecast(config, console)))
        return 0
    summary = prune_videos(config, console)
    out.print(render(summary))
    out.print(f"\nlook inside: python -m jobs.inspect {shlex.quote(config.out)}", markup=False, highlight=False)
    limit = config.outside_limit(summary.n_videos)
    if summary.n_outside > limit:
        failed = f"failed: {summary.n_outside} of {summary.n_videos} videos failed by what is no fault of theirs"
        remedy = "look at nodes, mounts, credentials and GPUs, then run again with --retry-failed"
        console.print(f"{failed} (io, internal, memory of a GPU), more than {limit}: {remedy}", highlight=False)
    return summary.exit_code(config.failure_limit(summary.n_videos), limit)


if __name__ == "__main__":
    sys.exit(main())
