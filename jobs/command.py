"""The frame of every command: flags and a file of options in, exit code and error message out."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn, TypeVar

from rich.console import Console

from gstep.lazy import did_you_mean, pause_garbage_collector, repeat_line
from jobs.frame.flags import add_flags, from_flags, read_config_file
from jobs.frame.json_document import Done, add_json, error_record, print_document, stdout_as_stderr
from pipeline.errors import CorruptShard, RunFailed, UsageError
from pipeline.options import likely_share
from pipeline.options import share as share_or_percent

Errors = tuple[type[Exception], ...]
T = TypeVar("T")
VERSIONS_OF = ("gstep-cache", "torch", "ray", "transformers")  # what --version tells
EXIT_CODES = """\
Exit code: 0 every {item} has a row and failures are within --max-failed; 1 the run failed, or too many {item}s did;
2 the request was refused and nothing was started; 130 interrupted.
"""
# After a signal: another one so soon is the same, sent to a group and by a wrapper. What a run writes last has 15 s,
# and the rest of its end 10 more; threads that Python waits for at exit have a few.
_SAME_SIGNAL_S, _MAX_STOP_S, _MAX_EXIT_S, _LOOK_S = 1.0, 25.0, 3.0, 0.2
_SHORT_WIDTH = 118  # columns of the help of the usual options, which fits one screen of text so


class LogConsole(Console):
    """A console for messages on stderr: plain on a terminal; in a log each message is one line with its time."""

    def __init__(self) -> None:
        super().__init__(stderr=True)
        self.soft_wrap = not self.is_terminal

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as any Rich console does; in a log, put the time before the line."""
        if not self.is_terminal:
            objects = (time.strftime("%Y-%m-%d %H:%M:%S"), *objects)
        super().print(*objects, **options)


class Parser(argparse.ArgumentParser):
    """An argument parser that knows ``--version``, and writes usage errors as JSON documents if ``--json`` is given.

    Attributes:
        usual: the options that ``--help`` shows, where ``--help-all`` shows all; None where there is no such flag.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **more})
        self._json = False
        self.usual: frozenset[str] | None = None
        self.add_argument(
            "--version", action=_Version, help="show the versions of this package, torch, Ray, transformers"
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Where flags and positional arguments are mixed, it is called again with those that are left.
        self._json |= "--json" in (sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
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
        words = message.removeprefix("unrecognized arguments: ").split() if message.startswith("unrecog") else []
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        message += "".join(did_you_mean(flag, self._option_string_actions) for flag in flags)
        if wrong := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            message += did_you_mean(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        if self._json:
            print_document(error_record(UsageError(message)))
        self.exit(2, f"usage: {self.prog} [options]; --help lists them\n{self.prog}: error: {message}\n")


class _HelpAll(argparse.Action):
    """The action of ``--help-all``: prints the help of every option."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **more)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        parser.usual = None
        parser.print_help()
        parser.exit()


class _Version(argparse.Action):
    """The action of ``--version``: prints a name and a version a line, without importing anything."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **more)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib import metadata  # noqa: PLC0415 - nothing else needs it

        for name in VERSIONS_OF:
            try:
                print(name, metadata.version(name))
            except metadata.PackageNotFoundError:
                print(name, "not installed")
        parser.exit()


def add_commands(parser: Parser, commands: Mapping[str, ModuleType]) -> None:
    """Add commands of a command: modules with a line of help (HELP), ``add_flags`` and ``run``, by their names."""
    parsers = parser.add_subparsers(required=True, metavar="|".join(commands))
    for name, command in commands.items():
        flags = parsers.add_parser(name, help=command.HELP, description=command.__doc__)
        command.add_flags(flags)
        flags.set_defaults(run=command.run)


def run_command(
    parser: Parser,
    config: type[T],
    work: Callable[[T, Console], int | Done],
    argv: Sequence[str] | None,
    overruled: Callable[[argparse.Namespace], Iterable[str]] = lambda flags: (),
    usual: Collection[str] = (),
) -> int:
    """Parse ``argv`` into a ``config`` and do the ``work``; returns the exit code.

    ``overruled`` returns the options of the file that the flags overrule; ``usual`` are those that ``--help`` shows,
    where it does not show all.
    """
    if usual:
        parser.usual = frozenset((*usual, "help", "help_all", argparse.SUPPRESS))  # --version has no name
        parser.add_argument("--help-all", action=_HelpAll, dest="help_all", help="show all options, in groups")
    add_json(parser)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file of options by their names; a flag wins over it, and repeatable ones add to it",
    )
    add_flags(parser, config)
    namespace = parser.parse_args(argv)
    console = LogConsole()
    # A thread of Ray Data that outlives Ray at exit would otherwise start another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    # Ray sends the driver the last log lines of each process that dies; Ray's own files have them too.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^(Raylet is terminated|A worker died or was killed)")

    def run() -> int | Done:
        flags = namespace
        if flags.config is not None:
            options = read_config_file(flags.config, config)
            excluded = set(overruled(flags))
            parser.set_defaults(**{name: value for name, value in options.items() if name not in excluded})
            flags = parser.parse_args(argv)
        return work(from_flags(config, flags), console)

    interrupted = "interrupted: what was committed stays; the same command goes on from here"
    failed = (RunFailed, CorruptShard)
    return exit_code_of(run, console, failed=failed, interrupted=interrupted, document=namespace.json)


def other_sampling(flags: argparse.Namespace) -> set[str]:
    """Return the config file's sampling options that a flag for the other way of sampling replaces."""
    return {"fps", "max_frames"} if flags.num_frames else {"num_frames"} if flags.fps else set()


def exit_code_of(
    work: Callable[[], int | Done],
    console: Console,
    *,
    failed: Errors = (),
    refused: Errors = (UsageError,),
    interrupted: str = "interrupted",
    document: bool = False,
) -> int:
    """Run the work and return its exit code: 1 where it failed, 2 where it was refused, 130 where it was interrupted.

    Each of these prints a line that says why. ``document`` is whether ``--json`` is given: then stdout gets what the
    work returns with its exit code, or the error.
    """
    interruption = _Interruption(partial(console.print, highlight=False, markup=False, soft_wrap=True), interrupted)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interruption)
    with stdout_as_stderr() if document else nullcontext() as stdout:
        try:
            done = _finish(work, console, failed, refused)
            if interruption.came and done.exit_code:  # an error on the way out, or of what was cut off
                raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            interruption.say()
            interruption.say_notes(error)
            done = Done(130, error_record(error, interrupted))
        except Exception as error:
            if document:
                print_document(error_record(error), stdout)
            if not interruption.came:
                raise
            console.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            return 130
        finally:
            interruption.working = False
        try:
            if document:
                print_document(done.record, stdout)
        except OSError as error:
            console.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            return 1
    interruption.end(done.exit_code)
    return done.exit_code


def _finish(work: Callable[[], int | Done], console: Console, failed: Errors, refused: Errors) -> Done:
    """Run the work and return its exit code and record, after printing its result, or the error that ended it."""
    try:
        done = work()
    except failed as error:
        console.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return Done(1, error_record(error))
    except refused as error:
        # Printed without the time of a log line, since nothing was started.
        Console.print(console, f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return Done(2, error_record(error))
    if not isinstance(done, Done):
        done = Done(done, {})
    for item in done.printed:
        wide_console().print(item, highlight=False)
    whole = done.record if isinstance(done.record, Sequence) else {"exit_code": done.exit_code, **done.record}
    return Done(done.exit_code, whole)


@contextmanager
def loading(console: Console) -> Iterator[None]:
    """Import what is large in this context; a log is told every few seconds that it goes on."""
    say = partial(console.print, highlight=False, style="dim")
    with (
        pause_garbage_collector(),
        nullcontext() if console.is_terminal else repeat_line(say, "loading Ray, torch and transformers"),
    ):
        yield


def seldom(say: Callable[[str], object], every_s: float, last: float = -math.inf) -> Callable[[str], None]:
    """Return a printer of progress that drops lines which come less than ``every_s`` seconds after the one before.

    ``last`` is when that one was printed, by ``time.monotonic``.
    """

    def said(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= every_s:
            last = time.monotonic()
            say(line)

    return said


def count(text: str) -> int:
    """Parse a whole number that is at least 1, as a flag's type."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def share(text: str) -> float:
    """Parse a number in (0, 1], or a percentage, as a flag's type."""
    value = share_or_percent(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {value}{likely_share(value)}")
    return value


def file_in_folder(text: str) -> Path:
    """Check the path of a file to write, whose folder must exist, as a flag's type."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no folder {path.parent}")
    return path


def wide_console() -> Console:
    """Return a console for tables, which cuts them to the width of a terminal, but not of a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


class _Interruption:
    """A signal handler that raises KeyboardInterrupt, after printing that at once: SIGKILL may follow in seconds.

    A second signal ends the process, and so does the time when what is left to do does not end: a request that hangs in
    a thread, or a library that swallows the exception, holds no process up.
    """

    def __init__(self, say: Callable[[str], object], text: str) -> None:
        self._say, self._text, self._said = say, text, False
        self._first = math.inf  # when the first signal came
        self._exit_code: int | None = None  # of a command that has ended
        self.working = True

    @property
    def came(self) -> bool:
        """Whether a signal has come."""
        return self._first < math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            if time.monotonic() - self._first >= _SAME_SIGNAL_S:
                self._leave("interrupted again: ended at once")
            return
        if self._exit_code is not None:  # Ray and Python would print a traceback of what they do at exit
            os._exit(self._exit_code)
        self._first = time.monotonic()
        threading.Thread(target=self._end_in_time, name="interrupted", daemon=True).start()
        with suppress(RuntimeError):  # the signal came in the middle of another print; the line is printed at the end
            self.say()
        raise KeyboardInterrupt

    def end(self, exit_code: int) -> None:
        """Note that the work has ended, with this exit code, where this process is the command's own."""
        spec = sys.modules["__main__"].__spec__
        if (spec and spec.name.startswith("jobs.")) or Path(sys.argv[0]).name == "gstep-cache":
            with suppress(OSError, ValueError):  # stdout is closed, or its reader gone
                sys.stdout.flush()
            self._exit_code = exit_code

    def say(self) -> None:
        """Print that the command is interrupted, unless that was printed already."""
        if not self._said:
            self._say(self._text)
            self._said = True

    def say_notes(self, error: BaseException) -> None:
        """Print what an exception has noted of the last writes."""
        for note in getattr(error, "__notes__", ()):
            self._say(note)

    def _end_in_time(self) -> None:
        """End the process once its time is over, while the work goes on or Python waits for threads; runs in a thread.

        The time after the work is short.
        """
        while self.working and time.monotonic() - self._first < _MAX_STOP_S:
            time.sleep(_LOOK_S)
        time.sleep(0 if self.working else _MAX_EXIT_S)
        if self.working or not threading.main_thread().is_alive():  # else a program goes on that called the command
            self._leave(f"ended {time.monotonic() - self._first:.0f} s after the signal: a request does not end")

    def _leave(self, why: str) -> NoReturn:
        """End the process with a last line, whatever its threads do."""
        with suppress(Exception):
            self._say(why)
        os._exit(130)
