"""How numbers, methods and texts from files are written on the page of results."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.evaluate.benchmarks.annotations import without_letter
from pipeline.evaluate.statistics.render import method_title
from pipeline.evaluate.statistics.render import signed as plain_signed
from pipeline.evaluate.statistics.results import Column, ResultsTable
from pipeline.evaluate.statistics.score_matrix import ORIGINAL
from pipeline.generate.choices import letters

_MINUS = "\N{MINUS SIGN}"
_SPACE = "\N{NO-BREAK SPACE}"


def title_of(method: str) -> str:
    """Return a method's title; "none" is full retention."""
    return "Full retention" if method == ORIGINAL.method else method_title(method)


def ratio_text(ratio: float) -> str:
    """Format a retention ratio in percent: 0.125 is "12.5 %"."""
    return f"{round(100 * ratio, 6):g}{_SPACE}%"


def share_text(share: float | None) -> str:
    """Format a share in percent to one decimal, or a dash if unknown."""
    return "–" if share is None else f"{100 * share:.1f}{_SPACE}%"


def signed(points: float) -> str:
    """Format points to one decimal with their sign, except what rounds to 0."""
    return plain_signed(points).replace("-", _MINUS)


def tick_text(value: float, *, sign: bool) -> str:
    """Format a round number at an axis."""
    return f"{value:{'+' if sign and value else ''}g}".replace("-", _MINUS)


def bracket(low: float | None, high: float | None, *, sign: bool = False) -> str:
    """Format an interval in brackets, or nothing if there is none."""
    if low is None or high is None:
        return ""
    return f"[{signed(low)}, {signed(high)}]" if sign else f"[{low:.1f}, {high:.1f}]"


def column_title(table: ResultsTable, column: Column) -> str:
    """Return a column's title, preceded by its benchmark's where the table is about several."""
    alone = len({one.benchmark for one in table.columns}) == 1
    return column.title if alone or not column.over else f"{column.over} {column.title}"


def cut(text: str, most: int) -> str:
    """Cut a text to ``most`` characters, because a file may hold a reply of any length."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def lettered(options: Sequence[str]) -> list[str]:
    """Add the letters that replies name options by, unless the options carry them."""
    if all(without_letter(option) != option.strip() for option in options):
        return list(options)
    return [f"{letter}. {option}" for letter, option in zip(letters(len(options)), options, strict=False)]
