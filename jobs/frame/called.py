"""The name by which a command was called, ``gstep-cache NAME`` or ``python -m jobs.NAME``, and its shell completion."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

PROGRAM = "gstep-cache"
_HINT = re.compile(r"python -m jobs\.(?=\w)")
_COMPLETING = "_ARGCOMPLETE"  # set by the shell function of argcomplete: the number of words before the arguments


def by_name() -> bool:
    """Return whether this process runs the console script ``gstep-cache``."""
    return Path(sys.argv[0]).stem == PROGRAM


def as_called(text: str) -> str:
    """Return a text in which commands are named as this one was called."""
    return _HINT.sub(f"{PROGRAM} ", text) if by_name() else text


class NamingConsole(Console):
    """A console that prints commands by the name by which this one was called."""

    def render_str(self, text: str, **options: object) -> Text:
        return super().render_str(as_called(text), **options)  # type: ignore[arg-type]


def import_from_here() -> None:
    """Let ``module:Class`` name a file in the current folder, behind all that is installed, in a console script.

    Python puts the script's folder first on the path, not the current one.
    """
    here = str(Path.cwd())
    if by_name() and here not in sys.path:
        sys.path.append(here)


def completing() -> bool:
    """Return whether the shell asks this process for completions."""
    return _COMPLETING in os.environ


def words_to_complete(commands: Collection[str]) -> Sequence[str]:
    """Return the command whose arguments the shell asks to complete, as a list of one word, or of none."""
    if not completing():
        return []
    typed = os.environ["COMP_LINE"].encode()[: int(os.environ["COMP_POINT"])].decode(errors="ignore")
    _, *words = typed.split()
    if not words or words[0] not in commands or typed.endswith(words[0]):
        return []
    os.environ[_COMPLETING] = "2"  # the command's own parser completes what follows its name
    return words[:1]


def complete(parser: argparse.ArgumentParser) -> None:
    """Print the completions of what was typed and end the process, where the shell asks for them."""
    if completing():
        from argcomplete import autocomplete  # noqa: PLC0415 - an extra, which the shell function comes with

        autocomplete(parser)
