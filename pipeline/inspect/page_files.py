"""The files that pages are made of, and the file that a page becomes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from pipeline import html_pages
from pipeline.errors import UsageError

PACKAGE = "pipeline.inspect"


@cache
def templates() -> Environment:
    """Return the Jinja environment of this room's templates."""
    return html_pages.environment(PACKAGE)


def render(template: str, **values: object) -> str:
    """Render a template of this room to a page."""
    return templates().get_template(template).render(**values)


def asset(name: str) -> Markup:
    """Return the unescaped content of a file beside the templates."""
    return html_pages.asset(PACKAGE, name)


def check_file(file: Path) -> None:
    """Raise UsageError where ``file`` cannot be written, before any work."""
    if not file.parent.is_dir():
        raise UsageError(f"{file}: the folder {file.parent} does not exist")
    if file.is_dir():
        raise UsageError(f"{file}: is a folder; name a file for the page")


def write_file(file: Path, html: str) -> int:
    """Write a page and return its number of bytes. Raises UsageError if ``file`` cannot be written."""
    check_file(file)
    try:
        return file.write_bytes(html.encode())
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from error
