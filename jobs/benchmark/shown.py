"""What benchmarks show: lines of progress, and tables of figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

_WORDS = {"", "clip", "codec", "method", "name", "tokens of", "way"}  # columns that hold no numbers


def say(line: str) -> None:
    """Print a line of progress on stderr."""
    Console(stderr=True).print(line, style="dim", markup=False, highlight=False)


def figure_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None
) -> Table:
    """Lay out figures: numbers stand right, words left."""
    table = Table(title=title, title_justify="left", show_edge=False, caption=caption, caption_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    for row in rows:
        table.add_row(*row)
    return table
