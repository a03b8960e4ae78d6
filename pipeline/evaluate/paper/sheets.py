"""Results in the paper's layouts, as rows of printed numbers: the same for Markdown, LaTeX and the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.evaluate.grids import PaperTable
from pipeline.evaluate.paper.gathered import label
from pipeline.evaluate.statistics.render import method_title
from pipeline.evaluate.statistics.results import OVERALL, Cell, Mark, ResultsTable, Row
from pipeline.evaluate.statistics.tables import Shown, marks, printed, rel_of


class Number(NamedTuple):
    """A number as printed; ``heat`` in [0, 1] is its place between the least and the most of a map."""

    printed: str
    mark: Mark = ""
    heat: float | None = None
    boxed: bool = False


@dataclass(frozen=True)
class Group:
    """Rows under a heading ("": none): a title and a number a column, None where there is none."""

    heading: str
    rows: Sequence[tuple[str, Sequence[Number | None]]]


@dataclass(frozen=True)
class Sheet:
    """One table: ``corner`` is the title of the column of titles."""

    title: str
    corner: str
    columns: Sequence[str]
    groups: Sequence[Group] = field(default_factory=tuple)


def sheets(table: PaperTable, results: ResultsTable) -> list[Sheet]:
    """The results in the table's layout."""
    layouts = {"blocks": _blocks, "groups": _groups, "heatmaps": _heatmaps, "relative": _relative}
    return list(layouts[table.layout](table, results))


def _blocks(table: PaperTable, results: ResultsTable) -> Iterator[Sheet]:
    groups = [Group("Original Model (100%)", [(results.title, _cells(results.original))])]
    for block in results.blocks:
        rows = [(method_title(row.method), _cells(row)) for row in block.rows]
        groups.append(Group(f"Pruning ratio {100 * (1 - block.ratio):g}%", rows))
    headings = [c.title if c.title == c.benchmark else f"{c.benchmark} {c.title}" for c in results.columns]
    yield Sheet(table.title, "Method", [*headings, "Rel."], groups)


def _groups(table: PaperTable, results: ResultsTable) -> Iterator[Sheet]:
    at = [number for number, column in enumerate(results.columns) if column.key == OVERALL]
    rows = _by_method(results)
    groups = []
    for heading, named in table.groups:
        found = [
            (title, _with_mean([rows[m].cells[a] for a in at] if (m := label(one)) in rows else [None] * len(at)))
            for title, one in named
        ]
        marked = [marks(column) for column in zip(*(shown for _, shown in found), strict=True)]
        groups.append(
            Group(
                heading,
                [
                    (
                        title,
                        [
                            None if one is None else Number(one.printed, _best(of_column[r]))
                            for one, of_column in zip(shown, marked, strict=True)
                        ],
                    )
                    for r, (title, shown) in enumerate(found)
                ],
            )
        )
    yield Sheet(table.title, "Method", [*(results.columns[a].benchmark for a in at), "Avg."], groups)


def _heatmaps(table: PaperTable, results: ResultsTable) -> Iterator[Sheet]:
    rows = _by_method(results)
    (down, downs), (across, acrosses) = table.axes
    methods = [[label(f"gstep,{down}={d},{across}={a}") for a in acrosses] for d in downs]
    at = [(number, column.benchmark) for number, column in enumerate(results.columns) if column.key == OVERALL]
    maps = [(name, [[_cell_of(rows, m, number) for m in line] for line in methods]) for number, name in at]
    maps.append(("Mean retention", [[rows[m].rel if m in rows else None for m in line] for line in methods]))
    for name, cells in maps:
        values = [cell.score for line in cells for cell in line if cell is not None]
        low, high = min(values, default=0.0), max(values, default=0.0)
        lines = []
        for d, line in zip(downs, cells, strict=True):
            numbers = [
                None
                if cell is None
                else Number(
                    cell.printed, "", (cell.score - low) / (high - low) if high > low else 0.5, (d, a) == table.default
                )
                for a, cell in zip(acrosses, line, strict=True)
            ]
            lines.append((f"{down} {d}", numbers))
        yield Sheet(f"{table.title}: {name}", "", [f"{across} {a}" for a in acrosses], [Group("", lines)])


def _relative(table: PaperTable, results: ResultsTable) -> Iterator[Sheet]:
    at = [number for number, column in enumerate(results.columns) if column.key == OVERALL]
    for block in results.blocks:
        shown = [[_over(row.cells[a], results.original.cells[a]) for a in at] for row in block.rows]
        marked = [marks(column) for column in zip(*shown, strict=True)]
        rows = []
        for r, (row, line) in enumerate(zip(block.rows, shown, strict=True)):
            numbers = [
                None if one is None else Number(one.printed, mark[r]) for one, mark in zip(line, marked, strict=True)
            ]
            rows.append((method_title(row.method), [*numbers, _number(row.rel)]))
        columns = [*(results.columns[a].benchmark for a in at), "Mean"]
        yield Sheet(table.title, "Method", columns, [Group(f"Pruning ratio {100 * (1 - block.ratio):g}%", rows)])


def _by_method(results: ResultsTable) -> dict[str, Row]:
    return {row.method: row for block in results.blocks for row in block.rows}


def _cell_of(rows: dict[str, Row], method: str, number: int) -> Cell | None:
    return rows[method].cells[number] if method in rows else None


def _cells(row: Row) -> list[Number | None]:
    return [_number(cell) for cell in (*row.cells, row.rel)]


def _number(cell: Cell | None) -> Number | None:
    return None if cell is None else Number(cell.printed, cell.mark)


def _with_mean(cells: Sequence[Cell | None]) -> list[Shown | None]:
    """The numbers and their plain mean, by the printed ones as in the paper; none where one is missing."""
    shown = [None if cell is None else Shown(cell.score, cell.printed) for cell in cells]
    values = [float(one.printed) for one in shown if one is not None]
    mean = math.fsum(values) / len(values) if values and len(values) == len(shown) else None
    return [*shown, None if mean is None else Shown(mean, printed(mean))]


def _over(cell: Cell | None, original: Cell | None) -> Shown | None:
    """A score relative to full retention, by the rule of Rel."""
    one, other = (None if c is None else Shown(c.score, c.printed) for c in (cell, original))
    return rel_of([one], [other])


def _best(mark: Mark) -> Mark:
    """The paper marks the best alone in this table."""
    return mark if mark == "best" else ""
