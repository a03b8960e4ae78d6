"""The results for the terminal: the table, and where methods break; the same for a run and for ``--results``."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.evaluate.breaks import BREAKS_TITLE, Breaks
from pipeline.evaluate.forms import MARKS, add_counts
from pipeline.evaluate.table import FEW, NONE, Cell, ResultsTable
from pipeline.evaluate.tabulate import OVERALL

_COLUMNS = 6  # columns that fit a terminal
_STYLES = {"best": "bold", "second": "underline", "": ""}


def render_table(results: ResultsTable) -> Iterator[RenderableType]:
    """Yield the results table for the terminal, and notes below it.

    If the table has more than ``_COLUMNS`` columns of scores, only those of whole benchmarks are shown. A note names
    the file with all columns.
    """
    keys = [column.key.rpartition(": ")[2] for column in results.columns]
    few = len(results.columns) <= _COLUMNS
    shown = [number for number in range(len(results.titles)) if few or number >= len(keys) or keys[number] == OVERALL]
    table = Table(title=Text(results.title), title_justify="left", show_edge=False)
    table.add_column("method")
    titles = ["kept", *(results.titles[number] for number in shown)]
    for title in titles:
        table.add_column(Text(title), justify="right")
    for rows in ([results.original], *(rows for _, rows in results.blocks)):
        for row in rows:
            numbers = results.numbers(row)
            cells = [_render_cell(numbers[number]) for number in shown]
            table.add_row(Text(add_counts(row)), f"{100 * row.ratio:g} %", *cells, end_section=row is rows[-1])
    yield table
    for remark in (*results.remarks, MARKS):
        if not remark.startswith(FEW) or any(FEW in title for title in titles):
            yield Text(remark)
    if n_left_out := len(results.titles) - len(shown):
        yield Text(f"the {n_left_out} splits are in tables.md")


def render_breaks(breaks: Breaks) -> Iterator[RenderableType]:
    """Yield the section *Where it breaks* for the terminal: a line for each kind and method, and its remarks."""
    table = Table(title=Text(BREAKS_TITLE), title_justify="left", show_edge=False)
    for name in ("kind", "method", "lowest safe ratio", "why", "losses by retention ratio"):
        table.add_column(name, overflow="fold")
    for kind in breaks.kinds:
        verdicts = breaks.of_kind(kind)
        for verdict in verdicts:
            losses = Group(*(Text(f"{loss.share}: {loss.text}") for loss in verdict.losses))
            texts = map(Text, (kind.name, verdict.title, verdict.answer, verdict.reason))
            table.add_row(*texts, losses, end_section=verdict is verdicts[-1])
    if breaks.verdicts:
        yield table
    else:
        yield Text(BREAKS_TITLE)
    kinds = [f"{kind.name}: {kind.text}" for kind in breaks.kinds]
    for line in (*kinds, *breaks.explanation, *breaks.remarks):
        yield Text(line)


def _render_cell(cell: Cell | None) -> RenderableType:
    """Return a number for the terminal; below it stand its difference to the reference, and what is unclear."""
    if cell is None:
        return Text(NONE)
    number = Text.assemble((cell.printed, _STYLES[cell.mark]), cell.spread_text)
    return Group(number, *(Text(line) for line in (cell.interval_text, cell.unclear_text) if line))
