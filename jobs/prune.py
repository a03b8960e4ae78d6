"""Decode videos, encode them, prune their visual tokens and write them to a Parquet cache, on Ray."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from rich.console import Console

from pipeline.config import PruneConfig
from pipeline.errors import CorruptShard, RunFailed, UsageError
from pipeline.flags import add_flags, from_flags, read_config_file

EPILOG = """\
examples:
  python -m jobs.prune                                          the sample clips, a tiny random model, ./cache
  python -m jobs.prune videos/ --out cache --model llava-hf/llava-onevision-qwen2-7b-ov-hf
  python -m jobs.prune manifest.jsonl --video-root /data --fps 1 --max-frames 64

The same command again goes on where the last one stopped, and does nothing where nothing is left to do.
Exit code: 0 every video has a row and failures are within --max-failed; 1 the run failed, or too many videos did;
2 the request was refused and nothing was started; 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m jobs.prune", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file of options by their names; a flag wins over it, and repeatable ones add to it",
    )
    add_flags(parser, PruneConfig)
    namespace = parser.parse_args(argv)
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if namespace.config is not None:
            options = read_config_file(namespace.config, PruneConfig)
            # A flag wins over the file: also over the other way of sampling.
            overruled = {"fps", "max_frames"} if namespace.num_frames else {"num_frames"} if namespace.fps else set()
            parser.set_defaults(**{name: value for name, value in options.items() if name not in overruled})
            namespace = parser.parse_args(argv)
        return _prune(from_flags(PruneConfig, namespace), console)
    except UsageError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except (RunFailed, CorruptShard) as error:
        console.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: what was committed stays; the same command goes on from here", highlight=False)
        return 130


def _prune(config: PruneConfig, console: Console) -> int:
    # A thread of Ray Data's that outlives Ray at exit would start another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    # Ray, torch and the decoders load only now: --help and a mistyped flag answer at once.
    from pipeline.run import prune_videos  # noqa: PLC0415
    from pipeline.summary import render  # noqa: PLC0415

    summary = prune_videos(config, console)
    out = Console()
    out.print(render(summary))
    out.print(f"\nlook inside: python -m jobs.inspect {shlex.quote(config.out)}", markup=False, highlight=False)
    return summary.exit_code(config.failure_limit(summary.n_videos))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
