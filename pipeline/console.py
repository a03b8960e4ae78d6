"""The console of every command: texts reach the terminal without control characters, and are never markup."""

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


def speaker(console: Console) -> Say:
    """Return the function that prints lines for the user on a console, as they are."""
    return partial(console.print, highlight=False, markup=False, soft_wrap=True)


def clean(text: str) -> str:
    """Return a text with a space for each control character; newlines stay."""
    return _CONTROL.sub(" ", text)


def clean_line(text: str) -> str:
    """Return a text as ``clean`` does, with spaces for newlines."""
    return clean(text.replace("\n", " "))


class CleanConsole(Console):
    """A Rich console for texts of any origin: a text that is printed or stands in a cell is cleaned, and is one line.

    A ``Text`` outside of cells keeps its newlines. Nothing is read as markup or as the name of an emoji, and numbers
    get no color.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as a Rich console does, each text on one line."""
        super().print(*(clean_line(item) if isinstance(item, str) else item for item in objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of an object, whose texts are cleaned; all that is printed passes here."""
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
        """Return the lines of an object, such as the cell of a table, whose text is one line before it is wrapped."""
        return super().render_lines(_clean(renderable, clean_line), options, style=style, pad=pad, new_lines=new_lines)


def _clean(renderable: RenderableType, clean_plain: Callable[[str], str]) -> RenderableType:
    """Return a text on one line, a Text cleaned by ``clean_plain``, and any other object as it is."""
    if isinstance(renderable, str):
        return clean_line(renderable)
    if isinstance(renderable, Text) and (plain := clean_plain(renderable.plain)) != renderable.plain:
        renderable = renderable.copy()
        renderable.plain = plain  # of the same length, so that styles stay where they are
    return renderable
