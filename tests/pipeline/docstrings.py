"""The code that docstrings and the notebook show, to be run as it stands."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any


def code_of(thing: object) -> str:
    """The first indented block behind ``::`` in the docstring of ``thing``."""
    _, _, after = inspect.cleandoc(thing.__doc__ or "").partition("::\n\n")
    lines = after.split("\n")
    end = next((n for n, line in enumerate(lines) if line and not line.startswith("    ")), len(lines))
    return textwrap.dedent("\n".join(lines[:end]))


def run_code(code: str, where: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run it in the current folder; returns the names that it has at the end, those before it among them."""
    names = {"__name__": "__main__"} if names is None else names
    exec(compile(code, where, "exec"), names)  # noqa: S102 - our own, from a file of this repository
    return names
