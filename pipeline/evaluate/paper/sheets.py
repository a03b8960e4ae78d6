"""Results in the paper's layouts, as rows of printed numbers: the same for Markdown, LaTeX and the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from pipeline.evaluate.grids import Layout, PaperTable
from pipeline.evaluate.paper.gathered import label
from pipeline.evaluate.statistics.render import number_of, results_sheet, titled
from pipeline.evaluate.statistics.results import OVERALL, Cell, Mark, ResultsTable, Row
from pipeline.evaluate.statistics.sheets import Group, Head, Number, Sheet, by_column
from pipeline.evaluate.statistics.tables import marks, printed, rel_of


def sheets(table: PaperTable, results: ResultsTable, notes: Sequence[str] = ()) -> list[Sheet]:
    """Lay out the results as the table's sheets; every sheet says what its numbers were made of, and the ``notes``."""
    shown = results if table.layout == "blocks" else _overall(results)
    return list(_LAYOUTS[table.layout](table, shown, results_sheet(shown, table.title, notes)))


def _blocks(table: PaperTable, results: ResultsTable, whole: Sheet) -> Iterator[Sheet]:
    """Yield the sheet of a table whose groups are retention ratios."""
    yield whole


def _groups(table: PaperTable, results: ResultsTable, overall: Sheet) -> Iterator[Sheet]:
    """Yield the sheet of a table with titled groups of methods and a column of means."""
    rows, groups, width = {row.method: row for row in results.rows}, [], len(results.columns)
    for heading, named in table.groups:
        of_title = [(title, rows.get(label(method))) for title, method in named]
        shown = [_with_mean(row.cells if row else [None] * width) for _, row in of_title]
        names = [titled(title, row) if row else title for title, row in of_title]
        groups.append(Group(heading, [*zip(names, _marked(shown, second=False), strict=True)]))
    yield replace(overall, columns=[*overall.columns[:-1], Head("Avg.")], groups=groups)


def _heatmaps(table: PaperTable, results: ResultsTable, overall: Sheet) -> Iterator[Sheet]:
    """Yield a sheet for each benchmark's grid over two parameters, and one for mean retention."""
    rows = {row.method: row for row in results.rows}
    (down, downs), (across, acrosses) = table.axes
    at = [[rows.get(label(f"gstep,{down}={d},{across}={a}")) for a in acrosses] for d in downs]
    maps = [
        (column.benchmark, [[row.cells[c] if row else None for row in line] for line in at])
        for c, column in enumerate(results.columns)
    ]
    maps.append(("Mean retention", [[row.rel if row else None for row in line] for line in at]))
    made_of = [f"{name}: {'; '.join(by_column(overall.columns, texts))}." for name, texts in overall.made_of]
    for name, cells in maps:
        values = [cell.score for line in cells for cell in line if cell is not None]
        low, high = min(values, default=0.0), max(values, default=0.0)
        lines = []
        for d, line in zip(downs, cells, strict=True):
            boxed = [(d, a) == table.default for a in acrosses]
            numbers = [_hot(cell, low, high, boxed=box) for cell, box in zip(line, boxed, strict=True)]
            lines.append((f"{down} {d}", numbers))
        columns, notes = [Head(f"{across} {a}") for a in acrosses], [*made_of, *overall.notes]
        yield Sheet(f"{table.title}: {name}", "", columns, [Group("", lines)], notes=notes)


def _relative(table: PaperTable, results: ResultsTable, overall: Sheet) -> Iterator[Sheet]:
    """Yield a sheet for each ratio, whose scores are relative to full retention."""
    for block, group in zip(results.blocks, overall.groups[1:], strict=True):
        shown = [
            [rel_of([cell], [full]) for cell, full in zip(row.cells, results.original.cells, strict=True)]
            for row in block.rows
        ]
        rows = [
            (title, [*numbers, number_of(row.rel)])
            for (title, _), row, numbers in zip(group.rows, block.rows, _marked(shown), strict=True)
        ]
        columns = [*overall.columns[:-1], Head("Mean")]
        yield replace(overall, columns=columns, groups=[Group(group.heading, rows)])


_LAYOUTS: Mapping[Layout, Callable[[PaperTable, ResultsTable, Sheet], Iterator[Sheet]]] = {
    "blocks": _blocks,
    "groups": _groups,
    "heatmaps": _heatmaps,
    "relative": _relative,
}


def _overall(results: ResultsTable) -> ResultsTable:
    """Return the results with only each benchmark's overall column."""
    at = [number for number, column in enumerate(results.columns) if column.key == OVERALL]

    def less(row: Row) -> Row:
        return replace(row, cells=tuple(row.cells[a] for a in at))

    return replace(
        results,
        columns=tuple(replace(results.columns[a], title=results.columns[a].benchmark) for a in at),
        original=less(results.original),
        blocks=tuple(replace(block, rows=tuple(map(less, block.rows))) for block in results.blocks),
    )


def _marked(rows: Sequence[Sequence[Cell | None]], *, second: bool = True) -> list[list[Number | None]]:
    """Return the printed numbers with marks for each column's best and, unless ``second`` is off, second best."""
    of_columns = [marks(column) for column in zip(*rows, strict=True)]
    kept: dict[Mark, Mark] = {"best": "best", "second": "second" if second else "", "": ""}
    return [
        [None if one is None else Number(one.printed, kept[mark[r]]) for one, mark in zip(row, of_columns, strict=True)]
        for r, row in enumerate(rows)
    ]


def _hot(cell: Cell | None, low: float, high: float, *, boxed: bool) -> Number | None:
    """Return a heat map's cell, marked where it is the map's lowest or highest."""
    if cell is None:
        return None
    return Number(cell.printed, "", (cell.score - low) / (high - low) if high > low else 0.5, boxed)


def _with_mean(cells: Sequence[Cell | None]) -> list[Cell | None]:
    """Append the plain mean of a row's printed numbers, as the paper computes it; None where one is missing."""
    values = [float(one.printed) for one in cells if one is not None]
    mean = math.fsum(values) / len(values) if values and len(values) == len(cells) else None
    return [*cells, None if mean is None else Cell(score=mean, printed=printed(mean))]
