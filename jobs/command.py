"""The frame of every command: from flags and a file of options to the exit code and the error message."""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from rich.console import Console

from gstep.lazy import format_suggestion, pause_garbage_collector, repeat_line
from jobs.frame.flags import add_flags, from_flags, read_config_file
from jobs.frame.json_document import (
    CommandResult,
    add_json,
    discard_after_fault,
    make_error_record,
    print_document,
    redirect_stdout_to_stderr,
)
from pipeline.console import CleanConsole, clean, make_speaker
from pipeline.errors import CorruptShard, RunFailed, UsageError
from pipeline.options import parse_share as share_or_percent
from pipeline.options import suggest_percentage

Errors = tuple[type[Exception], ...]
T = TypeVar("T")
STORE_FAILURES: Errors = (RunFailed, CorruptShard, OSError)  # of commands on caches, which start no run
RERUN = "interrupted. Rerun the same command to resume"
VERSIONED_PACKAGES = ("gstep-cache", "torch", "ray", "transformers")  # packages of --version
EXIT_CODES = """\
Exit code: 0 every {item} has a row and failures are within --max-failed; 1 the run failed, too many {item}s failed, or
one failed as internal or own-code; 2 the request was refused and nothing was started; 130 interrupted.
"""
# After a signal: a second signal within _SAME_SIGNAL_S is the same signal, sent to a process group and by a wrapper. A
# run has 15 s for its last writes and 10 s more to end. Threads that Python waits for at exit have _MAX_EXIT_S.
_SAME_SIGNAL_S, _MAX_STOP_S, _MAX_EXIT_S, _LOOK_S = 1.0, 25.0, 3.0, 0.2
_SHORT_WIDTH = 118  # columns of the help of the usual options, which then fits on a screen


class LogConsole(CleanConsole):
    """A console for messages on stderr: plain lines on a terminal; in a log each message is one line with its time."""

    def __init__(self) -> None:
        super().__init__(stderr=True)
        self.soft_wrap = not self.is_terminal

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects, in a log with the time in front."""
        if not self.is_terminal:
            objects = (time.strftime("%Y-%m-%d %H:%M:%S"), *objects)
        super().print(*objects, **options)


class Parser(argparse.ArgumentParser):
    """An argument parser with ``--version``. If ``--json`` is given, it reports usage errors as JSON documents.

    Attributes:
        usual: the destinations of the options that ``--help`` shows, if the command has ``--help-all``; otherwise None.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Create an ArgumentParser whose description and epilog keep their line breaks."""
        super().__init__(*arguments, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})
        self._json = False
        self.usual: frozenset[str] | None = None
        self.add_argument(
            "--version", action=_Version, help="show the versions of this package, torch, Ray, transformers"
        )

    def add_help_all(self, usual: Collection[str]) -> None:
        """Add ``--help-all``, which shows all options. ``--help`` then shows only the options named in ``usual``."""
        self.usual = frozenset((*usual, "help", "help_all", argparse.SUPPRESS))  # --version has no name
        self.add_argument("--help-all", action=_HelpAll, dest="help_all", help="show all options, in groups")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # If flags and positional arguments are mixed, argparse calls it again with the remaining arguments.
        self._json |= "--json" in (sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Format the help of the ``usual`` options, 118 columns wide, or of all options if ``usual`` is None."""
        if self.usual is None:
            return super().format_help()
        formatter = argparse.RawDescriptionHelpFormatter(self.prog, width=_SHORT_WIDTH)
        words = "".join(f" [{action.metavar}]" for action in self._actions if not action.option_strings)
        formatter.add_usage(f"{self.prog}{words} [options]", self._actions, ())
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments(action for action in group._group_actions if action.dest in self.usual)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Print a usage error that suggests the nearest known flag or choice, and exit with code 2.

        If ``--json`` was given, a JSON document of the error goes to stdout too.
        """
        words = message.removeprefix("unrecognized arguments: ").split() if message.startswith("unrecog") else []
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        message += "".join(format_suggestion(flag, self._option_string_actions) for flag in flags)
        if choice_error := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            message += format_suggestion(choice_error[1], re.findall(r"[\w.-]+", choice_error[2]))
        if self._json:
            print_document(make_error_record(UsageError(message)))
        self.exit(2, f"usage: {self.prog} [options]; --help lists them\n{self.prog}: error: {clean(message)}\n")


class _HelpAll(argparse.Action):
    """The action of ``--help-all``, which prints the help of all options and exits with code 0."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        parser.usual = None
        parser.print_help()
        parser.exit()


class _Version(argparse.Action):
    """The action of ``--version``."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print the versions of VERSIONED_PACKAGES, or "not installed", and exit with code 0."""
        from importlib import metadata  # noqa: PLC0415 - nothing else needs it

        for name in VERSIONED_PACKAGES:
            try:
                print(name, metadata.version(name))
            except metadata.PackageNotFoundError:
                print(name, "not installed")
        parser.exit()


def run_command(
    parser: Parser,
    config: type[T],
    work: Callable[[T, Console], int | CommandResult],
    argv: Sequence[str] | None,
    find_overridden: Callable[[argparse.Namespace], Iterable[str]] = lambda flags: (),
    usual: Collection[str] = (),
    interrupt_message: str = "interrupted. The run is ending. Rerun the same command to resume",
    failures: Errors = (RunFailed, CorruptShard),
) -> int:
    """Parse ``argv`` and the file of ``--config`` into a ``config``, do the ``work``, and return the exit code.

    Adds the flags of ``config``, ``--json`` and ``--config`` to the parser. A flag overrides the file; a repeatable
    flag adds to the file's list. Sets environment variables of Ray, unless they are set already. A usage error found by
    the parser ends the process with code 2.

    Args:
        work: gets the configuration and a console for messages on stderr.
        find_overridden: returns the options of the file that the parsed flags replace, besides the options of the flags
            themselves.
        usual: the options that ``--help`` shows; ``--help-all`` then shows all. If empty, ``--help`` shows all.
        failures: the exceptions of the work that are printed in one line and lead to exit code 1.

    Returns:
        The exit code of the work; 1 after ``failures`` or if the output cannot be written, 2 after a UsageError, and
        130 after an interrupt, unless the work still ended with 0.
    """
    if usual:
        parser.add_help_all(usual)
    add_json(parser)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file of options by their names; a flag wins over it, and a repeatable flag adds to it",
    )
    add_flags(parser, config)
    namespace = parser.parse_args(argv)
    console = LogConsole()
    # A thread of Ray Data that outlives Ray at exit would otherwise start another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    # Ray sends the driver the last log lines of each crashed process; Ray's own files have them too.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^(Raylet is terminated|A worker died or was killed)")

    def run() -> int | CommandResult:
        """Put the options of the ``--config`` file below the flags, and do the work."""
        flags = namespace
        if flags.config is not None:
            options = read_config_file(flags.config, config)
            overridden = set(find_overridden(flags))
            parser.set_defaults(**{name: value for name, value in options.items() if name not in overridden})
            flags = parser.parse_args(argv)
        return work(from_flags(config, flags), console)

    return run_to_exit_code(
        run, console, failures=failures, interrupt_message=interrupt_message, document=namespace.json
    )


def find_overridden_sampling(flags: argparse.Namespace) -> set[str]:
    """Return the sampling options of the config file that ``--num-frames`` or ``--fps`` excludes."""
    return {"fps", "max_frames"} if flags.num_frames else {"num_frames", "frame_rule"} if flags.fps else set()


def run_to_exit_code(
    work: Callable[[], int | CommandResult],
    console: Console,
    *,
    failures: Errors = (),
    refusals: Errors = (UsageError,),
    interrupt_message: str = "interrupted",
    document: bool = False,
) -> int:
    """Do the work with handlers of SIGINT and SIGTERM, print its result or error, and return the exit code.

    Call it in the main thread. The signal handlers stay installed, and stdout escapes characters that its encoding
    lacks.

    Args:
        console: for errors and the interrupt message.
        failures: exceptions of the work that are printed in one line and lead to exit code 1.
        refusals: exceptions of the work that are printed in one line and lead to exit code 2.
        document: True for ``--json``: stdout gets only the JSON document of the result or the error.

    Returns:
        The exit code of the work; 1 after ``failures`` and if the output cannot be written, 2 after ``refusals``, and
        130 if an interrupt came, unless the work still ended with 0.

    Raises:
        Exception: any other exception of the work, unless an interrupt came before it.
    """
    interruption = _Interruption(make_speaker(console), interrupt_message)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interruption)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a locale may lack letters of a video's id
    with redirect_stdout_to_stderr() if document else nullcontext() as stdout:
        try:
            result = _finish(work, console, failures, refusals)
            if interruption.has_come and result.exit_code:  # an error of the interrupted work
                raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            interruption.say()
            interruption.say_notes(error)
            result = CommandResult(130, make_error_record(error, interrupt_message))
        except Exception as error:
            if document:
                print_document(make_error_record(error), stdout)
            if not interruption.has_come:
                raise
            _print_error(console, f"failed: {error}")
            return 130
        finally:
            interruption.working = False
        try:
            if document:
                print_document(result.record, stdout)
        except OSError as error:
            _print_error(console, f"failed: {error}")
            return 1
    interruption.end(result.exit_code)
    return result.exit_code


def _finish(
    work: Callable[[], int | CommandResult], console: Console, failures: Errors, refusals: Errors
) -> CommandResult:
    """Do the work and print its output, then its ``failure`` line in red, if any.

    Exceptions of ``failures``, with their notes, and of ``refusals``, without, are printed; all others pass.

    Returns:
        The result, with "exit_code" in its record unless that is a list; the record of an error after ``failures``
        (exit code 1), ``refusals`` (2), or if the output cannot be written (1).
    """
    try:
        result = work()
    except failures as error:
        _print_error(console, f"failed: {error}")
        for note in getattr(error, "__notes__", ()):  # such as finished videos that were not written
            _print_error(console, note)
        return CommandResult(1, make_error_record(error))
    except refusals as error:
        # Printed without the time of a log line, because nothing was started, and with the message's own newlines.
        Console.print(console, f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return CommandResult(2, make_error_record(error))
    if not isinstance(result, CommandResult):
        result = CommandResult(result, {})
    try:
        with discard_after_fault(sys.stdout):
            out = _make_wide_console()
            for item in result.output:
                is_line = isinstance(item, str)
                out.print(item, highlight=False, soft_wrap=is_line)
    except OSError as error:  # a full disk, say
        _print_error(console, f"failed: {error}")
        return CommandResult(1, make_error_record(error))
    finally:
        if result.failure:
            _print_error(console, result.failure)
    record = result.record if isinstance(result.record, Sequence) else {"exit_code": result.exit_code, **result.record}
    return CommandResult(result.exit_code, record)


def _print_error(console: Console, text: str) -> None:
    """Print a line in red without wrapping or markup."""
    console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def import_libraries(console: Console) -> Iterator[None]:
    """Import slow libraries inside this context: garbage collection pauses, and a log gets a line every few seconds."""
    say = partial(console.print, highlight=False, style="dim")
    with (
        pause_garbage_collector(),
        nullcontext() if console.is_terminal else repeat_line(say, "loading Ray, torch and transformers"),
    ):
        yield


def throttle(say: Callable[[str], object], every_s: float, last: float = -math.inf) -> Callable[[str], None]:
    """Wrap a function that prints progress so that it drops lines less than ``every_s`` after the last printed line.

    Args:
        last: the time of the last line by ``time.monotonic``; by default the first line is printed.
    """

    def print_line(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= every_s:
            last = time.monotonic()
            say(line)

    return print_line


def count(text: str) -> int:
    """Parse an integer of at least 1, as the type of a flag; else raise ValueError or ArgumentTypeError."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def share(text: str) -> float:
    """Parse a number in (0, 1] or a percentage, as the type of a flag; else raise ValueError or ArgumentTypeError."""
    value = share_or_percent(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {value}{suggest_percentage(value)}")
    return value


def parse_output_file(text: str) -> Path:
    """Parse the path of a file to write, as the type of a flag.

    Raises:
        argparse.ArgumentTypeError: it is a folder, or its folder does not exist.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no folder {path.parent}")
    return path


def _make_wide_console() -> Console:
    """Create a console for tables, as wide as the terminal, or 200 columns without one."""
    console = CleanConsole()
    return console if console.is_terminal else CleanConsole(width=200)


class _Interruption:
    """A signal handler that prints a message at once, since SIGKILL may follow, and raises KeyboardInterrupt.

    A second signal or a time limit ends the process, since the work may hang or swallow the exception.
    """

    def __init__(self, say: Callable[[str], object], text: str) -> None:
        self._say, self._text, self._is_printed = say, text, False
        self._first = math.inf  # when the first signal came
        self._exit_code: int | None = None  # of a command that has ended
        self.working = True

    @property
    def has_come(self) -> bool:
        """True if a signal has arrived."""
        return self._first < math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: print the message, start the time limit and raise KeyboardInterrupt.

        If the signal interrupts a print, the message is left to a later :meth:`say`. A second signal ends the process
        with code 130, unless it comes within a second of the first. After :meth:`end` a signal ends the process with
        the command's exit code.
        """
        if self.has_come:
            if time.monotonic() - self._first >= _SAME_SIGNAL_S:
                self._leave("interrupted again: exiting at once")
            return
        if self._exit_code is not None:  # Ray and Python would print a traceback at exit
            os._exit(self._exit_code)
        self._first = time.monotonic()
        threading.Thread(target=self._end_in_time, name="interrupted", daemon=True).start()
        with suppress(RuntimeError):  # the signal came during another print; the line is printed at the end
            self.say()
        raise KeyboardInterrupt

    def end(self, exit_code: int) -> None:
        """Flush stdout, ignoring errors, and record the exit code with which a later signal ends the process.

        Does nothing in a process that is not a command's own, such as a test or a program that calls ``main``.
        """
        spec = sys.modules["__main__"].__spec__
        if (spec and spec.name.startswith("jobs.")) or Path(sys.argv[0]).name == "gstep-cache":
            with suppress(OSError, ValueError):  # stdout or its reader is closed
                sys.stdout.flush()
            self._exit_code = exit_code

    def say(self) -> None:
        """Print the interrupt message, unless it has been printed already."""
        if not self._is_printed:
            self._say(self._text)
            self._is_printed = True

    def say_notes(self, error: BaseException) -> None:
        """Print the notes of an exception."""
        for note in getattr(error, "__notes__", ()):
            self._say(note)

    def _end_in_time(self) -> None:
        """End the process if the work takes over 25 s after the signal, or threads then over 3 s. Runs in a thread."""
        while self.working and time.monotonic() - self._first < _MAX_STOP_S:
            time.sleep(_LOOK_S)
        time.sleep(0 if self.working else _MAX_EXIT_S)
        if self.working or not threading.main_thread().is_alive():  # else a program that called the command continues
            self._leave(f"exiting {time.monotonic() - self._first:.0f} s after the signal: a request does not finish")

    def _leave(self, message: str) -> NoReturn:
        """Print a last line, if possible, and end the process with code 130, without waiting for threads."""
        with suppress(Exception):
            self._say(message)
        os._exit(130)
