"""Make the testbed: synthetic videos, questions with answers, and the times and positions of the answers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from jobs.command import Parser, count, parse_output_file, run_to_exit_code, throttle
from jobs.frame.json_document import CommandResult
from pipeline.console import CleanConsole
from pipeline.evaluate.shapes.world import HARDNESS, SPLIT_NAMES

EPILOG = """\
examples:
  python -m jobs.testbed make shapes --videos 200
  python -m jobs.testbed make harder --videos 300 --hardness dim clutter pan --seed 1 --picture harder.png
  python -m jobs.evaluate --benchmark shapes --data shapes --model shapes --method gstep vidcom2 \\
      --retention-ratio .25 .10

The same command writes the same bytes. Exit code: 0 all is written; 1 a file could not be written; 2 the request was
refused; 130 interrupted (rerun the same command to resume).
"""
_HELP = "write videos, questions with answers, and the times and positions of the answers"
_DURATIONS = ("short", "medium", "long")
_EVERY_S = 10.0  # seconds between two lines of progress
_PICTURED = 6  # videos in the overview picture


def main(argv: Sequence[str] | None = None) -> int:
    """Make the testbed; return the exit code."""
    parser = Parser("python -m jobs.testbed", description=__doc__, epilog=EPILOG)
    commands = parser.add_subparsers(required=True, metavar="make")
    _add_flags(commands.add_parser("make", help=_HELP, description=__doc__))
    arguments = parser.parse_args(argv)
    console = CleanConsole(stderr=True)
    return run_to_exit_code(lambda: _make(arguments, console), console, failures=(OSError,))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``make`` to a parser."""
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the folder to make: new, empty, or of the same recipe"
    )
    parser.add_argument("--videos", type=count, default=200, metavar="N", help="number of videos [200]")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="draws the videos of the split; two seeds share no video [0]"
    )
    parser.add_argument(
        "--split",
        choices=SPLIT_NAMES,
        default="development",
        help="tune methods on development; use test for published results [development]",
    )
    parser.add_argument(
        "--durations",
        nargs="+",
        choices=_DURATIONS,
        default=_DURATIONS,
        help="videos of 8, 16 and 32 s, in turn [all three]",
    )
    parser.add_argument(
        "--hardness", nargs="+", choices=tuple(HARDNESS), default=("plain",), help="kinds of videos, in turn [plain]"
    )
    parser.add_argument(
        "--keyframe-seconds", type=count, metavar="S", help="seconds between keyframes [where x264 sets them]"
    )
    parser.add_argument(
        "--picture",
        type=parse_output_file,
        metavar="FILE",
        help=f"a PNG with all frames of the first {_PICTURED} videos",
    )


def _make(arguments: argparse.Namespace, console: Console) -> CommandResult:
    """Write the videos and questions, and the overview picture of ``--picture``; return a line that says so.

    Prints progress to ``console``, at most every ten seconds.

    Raises:
        UsageError: the folder has other files, or a testbed of another recipe.
    """
    from pipeline.evaluate.shapes.layout import CorpusRecipe, read_mp4, write_benchmark, write_picture  # noqa: PLC0415 - not needed for --help

    recipe = CorpusRecipe(
        split=arguments.split,
        seed=arguments.seed,
        n_videos=arguments.videos,
        durations=tuple(arguments.durations),
        hardness=tuple(arguments.hardness),
        keyframe_seconds=arguments.keyframe_seconds,
    )
    say = throttle(partial(console.print, highlight=False), _EVERY_S, last=time.monotonic())
    n_questions = write_benchmark(
        arguments.folder, recipe, lambda n_written: say(f"{n_written} of {arguments.videos} videos")
    )
    if arguments.picture is not None:
        paths = sorted((arguments.folder / "data").iterdir())[:_PICTURED]
        write_picture(arguments.picture, [read_mp4(path) for path in paths])
    line = f"{arguments.videos} videos and {n_questions} questions are in {arguments.folder}"
    return CommandResult(0, {}, [line])


if __name__ == "__main__":
    sys.exit(main())
