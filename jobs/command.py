"""What every command that runs a job does around it: flags and a file of options in, exit code and last words out."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TypeVar

from rich.console import Console

from jobs.flags import add_flags, from_flags, read_config_file
from pipeline.errors import CorruptShard, RunFailed, UsageError

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
    """Parse ``argv`` into a ``config`` and do the ``work``, which returns the exit code; errors become theirs.

    ``overruled`` names the options of a file that the flags exclude.
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
    return exit_code_of(run, console, (RunFailed, CorruptShard), interrupted)


def exit_code_of(
    work: Callable[[], int], console: Console, failures: tuple[type[Exception], ...], interrupted: str
) -> int:
    """What ``work`` returns, or the exit code of the error or signal that ended it, said in a line."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return work()
    except UsageError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except failures as error:
        console.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print(interrupted, highlight=False)
        return 130


def count(text: str) -> int:
    """The type of a flag: a number, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
