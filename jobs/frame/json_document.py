"""``--json``: the result of a command as one JSON document for programs. Text for people goes to stderr then."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple, TextIO

from rich.console import RenderableType

from pipeline.rows import JsonObject


class Done(NamedTuple):
    """The result of a command: its exit code, what else its JSON document holds, and what is printed last.

    A record that is a list is the whole document.
    """

    exit_code: int
    record: Mapping[str, object] | Sequence[object]
    printed: Sequence[RenderableType] = ()


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    what = "print one JSON document on stdout, for an error too, and everything else on stderr"
    parser.add_argument("--json", action="store_true", help=what)


def error_record(error: BaseException, message: str = "") -> JsonObject:
    """Make the JSON document of an error."""
    return {"error": {"class": type(error).__name__, "message": message or str(error)}}


def print_document(record: Mapping[str, object] | Sequence[object], stdout: TextIO | None = None) -> None:
    """Print ``record`` as strict JSON in ASCII: a number that is not finite becomes null. Raises OSError.

    ``stdout`` is what ``stdout_as_stderr`` gives in its context.
    """
    print_lines([json.dumps(_strict(record), indent=2, allow_nan=False)], stdout)


def print_lines(lines: Iterable[str], stdout: TextIO | None = None) -> None:
    """Print lines to stdout, and stop quietly when its reader has closed the pipe (``| head``)."""
    file = stdout or sys.stdout
    try:
        for line in lines:
            print(line, file=file)
        file.flush()
    except BrokenPipeError:
        # Flushing the rest of the buffer at exit would raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


@contextmanager
def stdout_as_stderr() -> Iterator[TextIO]:
    """Send what is written to stdout to stderr, by C libraries and child processes too; yield stdout itself.

    At the end of the context stdout is as before, but not where Python's is the process's own: a thread of Ray's may
    print there until the process ends, such as that a worker has died.
    """
    sys.stdout.flush()
    before, kept = sys.stdout, os.dup(1)
    own = before is sys.__stdout__
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        if own:
            with open(kept, "w", encoding=before.encoding, errors=before.errors, closefd=False) as stdout:
                yield stdout
        else:
            yield before
    finally:
        sys.stderr.flush()
        if not own:
            os.dup2(kept, 1)
            sys.stdout = before
        os.close(kept)


def _strict(value: Any) -> Any:
    """Convert a value to what JSON knows: texts, finite numbers, lists and objects, which dataclasses become."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
