"""What every command does around its work: flags and a file of options in, exit code and error message out."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeVar

from rich.console import Console

from jobs.flags import add_flags, from_flags, read_config_file
from pipeline.errors import CorruptShard, RunFailed, UsageError

Errors = tuple[type[Exception], ...]
T = TypeVar("T")
EXIT_CODES = """\
Exit code: 0 every {item} has a row and failures are within --max-failed; 1 the run failed, or too many {item}s did;
2 the request was refused and nothing was started; 130 interrupted.
"""


def run_command(
    parser: argparse.ArgumentParser,
    config: type[T],
    work: Callable[[T, Console], int],
    argv: Sequence[str] | None,
    overruled: Callable[[argparse.Namespace], Iterable[str]] = lambda flags: (),
) -> int:
    """Parse ``argv`` into a ``config`` and do the ``work``; returns the exit code.

    ``overruled`` names the options of the file that do not go with the flags, which win.
    """
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file of options by their names; a flag wins over it, and repeatable ones add to it",
    )
    add_flags(parser, config)
    namespace = parser.parse_args(argv)
    console = Console(stderr=True)
    # A thread of Ray Data's that outlives Ray at exit would start another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

    def run() -> int:
        flags = namespace
        if flags.config is not None:
            options = read_config_file(flags.config, config)
            excluded = set(overruled(flags))
            parser.set_defaults(**{name: value for name, value in options.items() if name not in excluded})
            flags = parser.parse_args(argv)
        return work(from_flags(config, flags), console)

    interrupted = "interrupted: what was committed stays; the same command goes on from here"
    return exit_code_of(run, console, failed=(RunFailed, CorruptShard), interrupted=interrupted)


def exit_code_of(
    work: Callable[[], int],
    console: Console,
    *,
    failed: Errors = (),
    refused: Errors = (UsageError,),
    interrupted: str = "interrupted",
) -> int:
    """What ``work`` returns; else 1 if it failed, 2 if it was refused, 130 if interrupted, and a line that says so."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return work()
    except failed as error:
        console.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except refused as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print(interrupted, highlight=False)
        return 130


def count(text: str) -> int:
    """A flag's type: a whole number, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def share(text: str) -> float:
    """A flag's type: a number in (0, 1]."""
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {value}")
    return value


def file_in_folder(text: str) -> Path:
    """A flag's type: a file to write, in a folder that exists."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no folder {path.parent}")
    return path


def wide_console() -> Console:
    """For tables: cut to the width of a terminal, but not of a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def write_json(file: Path | None, record: Mapping[str, object]) -> None:
    """Write ``record`` where ``--json`` names a file."""
    if file is not None:
        file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
