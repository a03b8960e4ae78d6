"""Write synthetic videos, questions with answers, and the times and positions of the answers in the videos."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

from rich.console import Console

from jobs.command import count, file_in_folder, throttle
from jobs.frame.json_document import CommandResult
from pipeline.evaluate.shapes.world import HARDNESS, SPLIT_NAMES

HELP = "write videos, questions with answers, and the times and positions of the answers"
_DURATIONS = ("short", "medium", "long")
_EVERY_S = 10.0  # seconds between two lines of progress
_PICTURED = 6  # videos in the overview picture


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``make``."""
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
        "--picture", type=file_in_folder, metavar="FILE", help=f"a PNG with all frames of the first {_PICTURED} videos"
    )


def run(arguments: argparse.Namespace, console: Console) -> CommandResult:
    """Make the videos, their questions and the overview picture of ``--picture``; return a line that says so.

    Prints progress to ``console``.
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
