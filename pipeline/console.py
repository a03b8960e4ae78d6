"""Consoles that remove control characters from all texts and never interpret them as markup."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

# C0 and C1 but for the newline, marks and overrides of the direction of writing, and halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


#: Prints a line for the user.
Say = Callable[[str], object]


def make_speaker(console: Console) -> Say:
    """Return a function that prints a line to the console without markup, highlighting or wrapping."""
    return partial(console.print, highlight=False, markup=False, soft_wrap=True)


def clean(text: str) -> str:
    """Replace control characters, marks of writing direction and unpaired surrogates by spaces. Newlines stay."""
    return _CONTROL.sub(" ", text)


def clean_line(text: str) -> str:
    """Replace each control character and each newline by a space."""
    return clean(text.replace("\n", " "))


class CleanConsole(Console):
    """A Rich console that is safe for texts of any origin, such as file names and replies of models.

    A string is cleaned of control characters and printed on one line. A ``Text`` keeps its newlines outside of the
    cells of tables. Markup, emoji codes and numbers are printed as they are.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects as a Rich console does; each string is cleaned and printed on one line."""
        super().print(*(clean_line(item) if isinstance(item, str) else item for item in objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object with its text cleaned."""
        return super().render(_clean(renderable, clean), options)

    def render_lines(
        self,
        renderable: RenderableType,
        options: ConsoleOptions | None = None,
        *,
        style: Style | None = None,
        pad: bool = True,
        new_lines: bool = False,
    ) -> list[list[Segment]]:
        """Render an object, such as the cell of a table, with spaces for newlines in its text."""
        return super().render_lines(_clean(renderable, clean_line), options, style=style, pad=pad, new_lines=new_lines)


def _clean(renderable: RenderableType, clean_plain: Callable[[str], str]) -> RenderableType:
    """Clean the text of a renderable object.

    Returns:
        A string as one clean line; a ``Text`` whose plain text ``clean_plain`` has cleaned (a copy if it changes); any
        other object unchanged.
    """
    if isinstance(renderable, str):
        return clean_line(renderable)
    if isinstance(renderable, Text) and (plain := clean_plain(renderable.plain)) != renderable.plain:
        renderable = renderable.copy()
        renderable.plain = plain  # of the same length, so that styles stay where they are
    return renderable
