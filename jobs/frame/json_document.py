"""``--json``: the result of a command as one JSON document for programs. Text for people goes to stderr then."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple, TextIO

from rich.console import RenderableType

from pipeline.rows import JsonObject


class CommandResult(NamedTuple):
    """The result of a command.

    Attributes:
        record: the content of the JSON document besides the exit code; a list is the whole document.
        output: what is printed at the end: tables, and lines of text, which are never wrapped.
        failure: a line that is printed on stderr after the output, or "".
    """

    exit_code: int
    record: Mapping[str, object] | Sequence[object]
    output: Sequence[RenderableType] = ()
    failure: str = ""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the flag ``--json`` to a parser."""
    help_text = "print one JSON document on stdout, for an error too, and everything else on stderr"
    parser.add_argument("--json", action="store_true", help=help_text)


def make_error_record(error: BaseException, message: str = "") -> JsonObject:
    """Create the JSON document of an error: its class and ``message``, by default its own message."""
    return {"error": {"class": type(error).__name__, "message": message or str(error)}}


def print_document(record: Mapping[str, object] | Sequence[object], stdout: TextIO | None = None) -> None:
    """Print ``record`` as strict JSON in ASCII; a number that is not finite becomes null.

    Dataclasses become objects, and values of other types than JSON's become text. ``stdout`` is the file that
    ``redirect_stdout_to_stderr`` yields, or None.

    Raises:
        OSError: the output cannot be written, unless its reader has closed the pipe.
    """
    print_lines([json.dumps(_to_json_types(record), indent=2, allow_nan=False)], stdout)


def print_lines(lines: Iterable[str], stdout: TextIO | None = None) -> None:
    """Print lines to stdout, and stop silently when its reader has closed the pipe, as ``head`` does.

    After any OSError the process discards later output to the file. Other ones, such as of a full disk, are raised.
    """
    file = stdout or sys.stdout
    with suppress(BrokenPipeError), discard_after_fault(file):
        for line in lines:
            print(line, file=file)
        file.flush()


@contextmanager
def discard_after_fault(file: TextIO) -> Iterator[None]:
    """If the context raises OSError, redirect the file to the null device, and let the error pass.

    Python would otherwise fail again at exit. A file in memory is left as it is.
    """
    try:
        yield
    except OSError:
        with suppress(OSError):  # a file in memory has no number
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        raise


@contextmanager
def redirect_stdout_to_stderr() -> Iterator[TextIO]:
    """Redirect stdout to stderr inside this context, also for C libraries and child processes; yield the real stdout.

    If ``sys.stdout`` is the stdout of the process, the redirection stays, because a thread of Ray may print until the
    process ends. Otherwise stdout is restored.
    """
    sys.stdout.flush()
    stream, stdout_copy = sys.stdout, os.dup(1)
    is_process_stdout = stream is sys.__stdout__
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        if is_process_stdout:
            stdout = open(stdout_copy, "w", encoding=stream.encoding, errors=stream.errors, closefd=False)  # noqa: SIM115
            try:
                yield stdout
            finally:
                with suppress(OSError):  # what was not written has raised at its own flush
                    stdout.close()
        else:
            yield stream
    finally:
        sys.stderr.flush()
        if not is_process_stdout:
            os.dup2(stdout_copy, 1)
            sys.stdout = stream
        os.close(stdout_copy)


def _to_json_types(value: Any) -> Any:
    """Convert a value to JSON types.

    Dataclasses become objects, tuples and sets become lists, and numbers that are not finite become None. A value of
    any other type becomes text.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_json_types(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
