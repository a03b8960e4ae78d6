"""How numbers, methods and texts from files are written on the page of results."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.evaluate.benchmarks.annotations import without_letter
from pipeline.evaluate.statistics.render import method_title
from pipeline.evaluate.statistics.results import SIGNIFICANT, Column
from pipeline.evaluate.statistics.score_matrix import ORIGINAL
from pipeline.generate.choices import letters

FULL_RETENTION = "Full retention"
_MINUS = "\N{MINUS SIGN}"
_SPACE = "\N{NO-BREAK SPACE}"


def title_of(method: str) -> str:
    """A method as it is shown; "none" is full retention."""
    return FULL_RETENTION if method == ORIGINAL.method else method_title(method)


def ratio_text(ratio: float) -> str:
    """A retention ratio in percent: 0.125 is "12.5 %"."""
    return f"{round(100 * ratio, 6):g}{_SPACE}%"


def share_text(share: float | None) -> str:
    """A share in percent to one decimal; a dash where it is not known."""
    return "–" if share is None else f"{100 * share:.1f}{_SPACE}%"


def signed(points: float) -> str:
    """Points to one decimal with their sign; what rounds to 0 has none."""
    return f"{points:+.1f}".replace("-", _MINUS) if abs(points) >= 0.05 else "0.0"


def tick_text(value: float, *, sign: bool) -> str:
    """A round number at an axis."""
    return f"{value:{'+' if sign and value else ''}g}".replace("-", _MINUS)


def bracket(low: float | None, high: float | None, *, sign: bool = False) -> str:
    """An interval in brackets; empty where there is none."""
    if low is None or high is None:
        return ""
    return f"[{signed(low)}, {signed(high)}]" if sign else f"[{low:.1f}, {high:.1f}]"


def p_text(p: float) -> str:
    """An adjusted p; one that is no noise never reads like 0.050, which is."""
    if p < 0.001:
        return "p < 0.001"
    rounded = f"{p:.3f}"
    return f"p < {SIGNIFICANT}" if p < SIGNIFICANT <= float(rounded) else f"p = {rounded}"


def column_title(column: Column, *, alone: bool) -> str:
    """A column's title, with that of its benchmark unless the table is about one benchmark ``alone``."""
    return column.title if alone or column.title == column.benchmark else f"{column.benchmark} {column.title}"


def cut(text: str, most: int) -> str:
    """The first ``most`` characters: a file may hold a reply or a question of any length."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def lettered(options: Sequence[str]) -> list[str]:
    """Options with the letters that replies name them by, unless they carry them already."""
    if all(without_letter(option) != option.strip() for option in options):
        return list(options)
    return [f"{letter}. {option}" for letter, option in zip(letters(len(options)), options, strict=False)]
