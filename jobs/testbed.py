"""Make short videos with questions about them whose answers are known: the benchmark `shapes`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from jobs.command import count, exit_code_of, file_in_folder
from pipeline.evaluate.shapes.hardness import HARDNESS
from pipeline.evaluate.shapes.seeds import SPLIT_NAMES

EPILOG = """\
examples:
  python -m jobs.testbed make shapes --videos 200
  python -m jobs.testbed make harder --videos 300 --hardness dim clutter pan --seed 1 --picture harder.png
  python -m jobs.evaluate --benchmark shapes --data shapes --method gstep vidcom2 --retention-ratio .25 .10

The same command again writes the same bytes. Exit code: 0 all is written; 1 a file could not be written; 2 the request
was refused; 130 interrupted (the same command goes on).
"""
_DURATIONS = ("short", "medium", "long")
_PICTURED = 6  # videos
_INTERVAL_S = 10.0


class Command(NamedTuple):
    """What stands behind ``python -m jobs.testbed``: its line of help, its flags, and what it does with them."""

    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Console], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m jobs.testbed",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="|".join(COMMANDS))
    for name, command in COMMANDS.items():
        flags = commands.add_parser(name, help=command.help, description=command.help)
        command.add_flags(flags)
        flags.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    console = Console(stderr=True)
    return exit_code_of(lambda: int(arguments.run(arguments, console)), console, failed=(OSError,))


def _add_make_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the folder to make: new, empty, or of the same recipe"
    )
    parser.add_argument("--videos", type=count, default=200, metavar="N", help="how many [200]")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="which videos of the split; other seeds share none of them [0]"
    )
    parser.add_argument(
        "--split",
        choices=SPLIT_NAMES,
        default="development",
        help="tune methods on development; those of the test are for results that are published [development]",
    )
    parser.add_argument(
        "--durations", nargs="+", choices=_DURATIONS, default=_DURATIONS, help="8, 16 and 32 s, in turn [all three]"
    )
    parser.add_argument(
        "--hardness", nargs="+", choices=tuple(HARDNESS), default=("plain",), help="several are taken in turn [plain]"
    )
    parser.add_argument(
        "--picture", type=file_in_folder, metavar="FILE", help=f"a PNG with all frames of the first {_PICTURED} videos"
    )


def _make(arguments: argparse.Namespace, console: Console) -> int:
    from pipeline.evaluate.shapes.files import read_mp4, write_picture  # noqa: PLC0415 - not needed for --help
    from pipeline.evaluate.shapes.layout import Recipe, write_benchmark  # noqa: PLC0415

    recipe = Recipe(
        split=arguments.split,
        seed=arguments.seed,
        n_videos=arguments.videos,
        durations=tuple(arguments.durations),
        hardness=tuple(arguments.hardness),
    )
    said = time.monotonic()

    def progress(done: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _INTERVAL_S:
            said = time.monotonic()
            console.print(f"{done} of {arguments.videos} videos", highlight=False)

    asked = write_benchmark(arguments.folder, recipe, progress)
    if arguments.picture is not None:
        paths = sorted((arguments.folder / "data").iterdir())[:_PICTURED]
        write_picture(arguments.picture, [read_mp4(path) for path in paths])
    line = f"{arguments.videos} videos and {asked} questions are in {arguments.folder}"
    Console().print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


#: A new one is a line here.
COMMANDS: Mapping[str, Command] = {
    "make": Command("write videos, questions with answers, and where the videos show them", _add_make_flags, _make),
}

if __name__ == "__main__":
    sys.exit(main())
