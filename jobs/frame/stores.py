"""The frame of commands on caches in a store: from flags and S3 options to printed lines and a record."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rich.console import Console

from jobs.command import LogConsole, Parser, run_to_exit_code
from jobs.frame.flags import add_flags, from_flags
from jobs.frame.json_document import CommandResult
from pipeline.errors import CorruptShard, RunFailed
from pipeline.options import S3Options

if TYPE_CHECKING:
    from pipeline.storage.s3 import Objects

Say = Callable[[str], None]
_MAX_KEEP_MINUTES = 10**8
INTERRUPTED = "interrupted. Rerun the same command to resume"


class Result(Protocol):
    """The result of a command that writes to a cache or to answers: a dataclass with lines for the user."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def lines(self) -> Iterator[str]:
        """Yield lines for the user about the result."""


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument CACHE."""
    help_text = "the folder, or the s3://, gs:// or az:// prefix, that jobs.prune wrote"
    parser.add_argument("cache", metavar="CACHE", help=help_text)


def add_video_root(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add ``--video-root``; the help says what sources are read for, beginning with ``purpose``."""
    help_text = (
        f"{purpose} sources in this folder or s3://bucket/prefix ('sample': the sample clips); may be repeated. What a "
        "cache names elsewhere is not read"
    )
    parser.add_argument("--video-root", action="append", default=[], metavar="DIR", help=help_text)


def add_keep_minutes(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add ``--keep-minutes``, the time for which replaced files stay for their readers."""
    parser.add_argument("--keep-minutes", type=_parse_minutes, default=10.0, metavar="M", help=f"{help_text} [10]")


def _parse_minutes(text: str) -> float:
    """Parse a number of minutes, 0 to _MAX_KEEP_MINUTES, as a flag's type."""
    if not 0 <= (value := float(text)) <= _MAX_KEEP_MINUTES:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_MAX_KEEP_MINUTES:,}, got {text}")
    return value


def run_on_stores(
    parser: Parser,
    argv: Sequence[str] | None,
    work: Callable[[argparse.Namespace, Objects, Console], CommandResult],
    find_conflict: Callable[[argparse.Namespace], str | None] = lambda arguments: None,
    interrupt_message: str = INTERRUPTED,
) -> int:
    """Add the S3 options to ``parser``, parse ``argv`` and do the ``work``; return the exit code.

    The caller has added all other flags, ``--json`` too. A usage error ends the process with 2. The exit code is 1 if
    the work raises CorruptShard, RunFailed or OSError; see :func:`run_to_exit_code` for the other codes.

    ``find_conflict`` returns the error message for flags that exclude each other, or None.
    """
    add_flags(parser, S3Options)
    arguments = parser.parse_args(argv)
    if (message := find_conflict(arguments)) is not None:
        parser.error(message)
    console = LogConsole()

    def run() -> CommandResult:
        return work(arguments, make_objects(from_flags(S3Options, arguments)), console)

    failures = (CorruptShard, RunFailed, OSError)
    document = arguments.json
    return run_to_exit_code(run, console, failures=failures, interrupt_message=interrupt_message, document=document)


def make_objects(config: S3Options) -> Objects:
    """Make the client of object stores from a command's S3 options and the environment."""
    from pipeline.storage.s3 import Objects  # noqa: PLC0415 - --help and a mistyped flag answer at once

    return Objects.from_environment(config.s3_endpoint, config.s3_requester_pays)


def report(result: Result, say: Say, exit_code: int = 0, **places: str) -> CommandResult:
    """Print the lines of a result, and return it; its record has the ``places``, then the fields of ``result``."""
    for line in result.lines():
        say(line)
    return CommandResult(exit_code, {**places, **asdict(result)})


def make_say(console: Console) -> Say:
    """Make a function that prints a line to the console without markup, highlighting or wrapping."""
    return partial(console.print, highlight=False, markup=False, soft_wrap=True)
