"""The frame of the commands on places of a store: flags and S3 options in, printed lines and a record out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.command import LogConsole, Parser, exit_code_of
from jobs.frame.flags import add_flags, from_flags
from jobs.frame.json_document import Done
from pipeline.errors import CorruptShard, RunFailed
from pipeline.options import S3Options

if TYPE_CHECKING:
    from pipeline.storage.s3 import Objects

Say = Callable[[str], None]
_LONGEST = 10**8  # minutes for which files may stay
AGAIN = "interrupted: the same command goes on"


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the positional word that names a cache."""
    what = "the folder, or the s3://, gs:// or az:// prefix, that jobs.prune wrote"
    parser.add_argument("cache", metavar="CACHE", help=what)


def add_keep_minutes(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add the flag that says how long files stay for their readers."""
    parser.add_argument("--keep-minutes", type=_minutes, default=10.0, metavar="M", help=f"{help_text} [10]")


def _minutes(text: str) -> float:
    """Parse a number of minutes that a time can hold, as a flag's type."""
    if not 0 <= (value := float(text)) <= _LONGEST:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_LONGEST:,}, got {text}")
    return value


def run_on_stores(
    parser: Parser,
    argv: Sequence[str] | None,
    work: Callable[[argparse.Namespace, Objects, Console], Done],
    wrong: Callable[[argparse.Namespace], str | None] = lambda arguments: None,
    interrupted: str = AGAIN,
) -> int:
    """Parse ``argv``, to which S3 options are added, and do the ``work``; return the exit code.

    ``wrong`` says which flags do not go together, and None where all do.
    """
    add_flags(parser, S3Options)
    arguments = parser.parse_args(argv)
    if (message := wrong(arguments)) is not None:
        parser.error(message)
    console = LogConsole()

    def run() -> Done:
        return work(arguments, objects_of(from_flags(S3Options, arguments)), console)

    failed = (CorruptShard, RunFailed, OSError)
    document = arguments.json
    return exit_code_of(run, console, failed=failed, interrupted=interrupted, document=document)


def objects_of(config: S3Options) -> Objects:
    """Return the objects that a command's S3 options lead to."""
    from pipeline.storage.s3 import Objects  # noqa: PLC0415 - --help and a mistyped flag answer at once

    return Objects.from_environment(config.s3_endpoint)


def saying(console: Console) -> Say:
    """Return a function that prints a line as it is."""
    return partial(console.print, highlight=False, markup=False, soft_wrap=True)
