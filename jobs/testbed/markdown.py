"""Rows of Markdown tables: a name, then numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def head(titles: Sequence[str]) -> Iterator[str]:
    """Yield the two lines that begin a table."""
    yield row(titles)
    yield "|---|" + "---:|" * (len(titles) - 1)


def row(cells: Sequence[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"
