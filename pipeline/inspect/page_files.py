"""The files that pages are made of, and the file that a page becomes."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline.errors import UsageError


@cache
def templates() -> Environment:
    """The templates of this room. Every value is escaped, and a name without a value is an error."""
    environment = Environment(
        loader=PackageLoader("pipeline.inspect"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def asset(name: str) -> Markup:
    """A file that stands beside the template, as it is."""
    return Markup((files("pipeline.inspect") / "templates" / name).read_text(encoding="utf-8"))


def check_file(file: Path) -> None:
    """Raises UsageError where ``file`` cannot be one, before any work."""
    if not file.parent.is_dir():
        raise UsageError(f"{file}: the folder {file.parent} does not exist")
    if file.is_dir():
        raise UsageError(f"{file}: is a folder; name a file for the page")


def write_file(file: Path, html: str) -> int:
    """Write a page; returns its bytes. Raises UsageError where ``file`` cannot be written."""
    check_file(file)
    try:
        return file.write_bytes(html.encode())
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from error
