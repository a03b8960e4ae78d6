"""Charts of scores against retention: where lines, bands and ticks are. templates/report_charts.html draws them.

Places are in percent of a chart's width and height, so that it can have any size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from pipeline.evaluate.report.text import bracket, column_title, ratio_text, signed, tick_text, title_of
from pipeline.evaluate.statistics.results import OVERALL, Cell, ResultsTable
from pipeline.evaluate.statistics.score_matrix import GSTEP, ORIGINAL

_COLOURS = 5  # colours of methods other than GSTEP: --c1 to --c5 of report.css
_DASHES = 3
_EDGE = 5.0  # percent of the width left free at both sides
_LABEL = 9.0  # percent of the width that the label of a tick takes on a phone
_TICKS = 6  # steps of the vertical axis, about
_WIDE = 6.0  # ratios further apart than this factor stand on a logarithmic axis


class Style(NamedTuple):
    """How a method is drawn everywhere: a colour, and a dash once the colours have been used up."""

    colour: str
    dash: int


class Value(NamedTuple):
    """A number and the ends of its 95 % interval; ``noise`` marks a difference within noise."""

    value: float
    low: float | None
    high: float | None
    noise: bool = False


class Point(NamedTuple):
    """The position of a value in a chart, in percent: x from the left, the others from the top."""

    x: float
    y: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Series:
    """The line of a method, from low to high ratios."""

    method: str
    style: Style
    points: Sequence[Point]

    @property
    def line(self) -> str:
        """The SVG path through the points; a single point is a dot."""
        return "M" + "L".join(f"{p.x:.2f} {p.y:.2f}" for p in self.points) + ("h0" if len(self.points) == 1 else "")

    @property
    def band(self) -> str:
        """The SVG path around the intervals, a line for a single point, "" without intervals."""
        ends = [(p.x, p.low, p.high) for p in self.points if p.low is not None and p.high is not None]
        if len(ends) == 1:
            return f"M{ends[0][0]:.2f} {ends[0][1]:.2f}V{ends[0][2]:.2f}"
        there = [f"{x:.2f} {high:.2f}" for x, _, high in ends]
        back = [f"{x:.2f} {low:.2f}" for x, low, _ in reversed(ends)]
        return f"M{'L'.join([*there, *back])}z" if ends else ""


class Reading(NamedTuple):
    """The numbers shown for a method at a ratio."""

    method: str
    style: Style
    value: str
    interval: str
    noise: bool


@dataclass(frozen=True)
class Stop:
    """A ratio that the reader can point at: its place, the strip around it, and the numbers shown."""

    label: str
    x: float
    left: float
    width: float
    readings: Sequence[Reading]


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """A column of the table, scores or differences, in a chart whose axes fit them.

    Attributes:
        key: unique on the page.
        difference: to full retention; else scores.
        values: by method and ratio.
        of_full: the value of full retention; None where it was not run.
    """

    key: str
    title: str
    difference: bool
    values: Mapping[tuple[str, float], Value]
    of_full: Value | None
    styles: Mapping[str, Style]

    @cached_property
    def up(self) -> list[tuple[float, str]]:
        """The ticks of the vertical axis: (percent from the bottom, label)."""
        return [(100 - self._down(tick), tick_text(tick, sign=self.difference)) for tick in self._ticks]

    @cached_property
    def across(self) -> list[tuple[float, str]]:
        """The labels of the horizontal axis: methods where there is one ratio, else the ratios that have room."""
        if len(self._ratios) == 1:
            return [(self._x(method, self._ratios[0]), title_of(method)) for method in self._methods]
        labels: list[tuple[float, str]] = []
        for ratio, x in zip(self._ratios, self._places, strict=True):
            if not labels or x - labels[-1][0] >= _LABEL:
                labels.append((x, ratio_text(ratio)))
        return labels

    @property
    def series(self) -> list[Series]:
        """The line of each method."""
        found = []
        for method in self._methods:
            at = [(ratio, self.values[method, ratio]) for ratio in self._ratios if (method, ratio) in self.values]
            points = [self._point(self._x(method, ratio), value) for ratio, value in at]
            found.append(Series(method, self.styles[method], points))
        return found

    @cached_property
    def full(self) -> Point | None:
        """The place of full retention."""
        return self.of_full and self._point(0.0, self.of_full)

    @cached_property
    def stops(self) -> list[Stop]:
        """The ratios, rising, whose strips reach half-way to their neighbours."""
        between = [(a + b) / 2 for a, b in pairwise(self._places)]
        strips = zip(self._ratios, self._places, [0.0, *between], [*between, 100.0], strict=True)
        return [
            Stop(ratio_text(ratio), x, left, right - left, self._readings(ratio)) for ratio, x, left, right in strips
        ]

    @property
    def logarithmic(self) -> bool:
        """Whether the axis of ratios is logarithmic."""
        return ratio_places(self._ratios)[1]

    @cached_property
    def _methods(self) -> list[str]:
        """The methods, in order of first appearance."""
        return list(dict.fromkeys(method for method, _ in self.values))

    @cached_property
    def _ratios(self) -> list[float]:
        """The ratios, ascending."""
        return sorted({ratio for _, ratio in self.values})

    @cached_property
    def _places(self) -> list[float]:
        """The horizontal places of the ratios, in percent."""
        return ratio_places(self._ratios)[0]

    @cached_property
    def _ticks(self) -> list[float]:
        """The numbers at the vertical axis."""
        shown = [*self.values.values(), *([self.of_full] if self.of_full else [])]
        numbers = [number for one in shown for number in (one.value, one.low, one.high) if number is not None]
        return ticks(min(numbers), max(numbers))

    def _x(self, method: str, ratio: float) -> float:
        """Return the horizontal place of a method at a ratio; at a single ratio the methods stand side by side."""
        if len(self._ratios) == 1:
            return 100 * (self._methods.index(method) + 0.5) / len(self._methods)
        return self._places[self._ratios.index(ratio)]

    def _down(self, value: float) -> float:
        """Return the place of a value in percent from the top."""
        return 100 * (self._ticks[-1] - value) / (self._ticks[-1] - self._ticks[0])

    def _point(self, x: float, value: Value) -> Point:
        """Return the places of a value and of the ends of its interval."""
        low, high = (None if end is None else self._down(end) for end in (value.low, value.high))
        return Point(x, self._down(value.value), low, high)

    def _readings(self, ratio: float) -> list[Reading]:
        """List each method's number at a ratio with its interval, best first, for the box that a pointer opens."""
        values = {method: value for (method, r), value in self.values.items() if r == ratio}
        if self.of_full:
            values[ORIGINAL.method] = self.of_full
        return [
            Reading(
                method,
                self.styles[method],
                signed(value.value) if self.difference else f"{value.value:.1f}",
                bracket(value.low, value.high, sign=self.difference),
                value.noise,
            )
            for method, value in sorted(values.items(), key=lambda item: -item[1].value)
        ]


def line_charts(table: ResultsTable, style: Mapping[str, Style]) -> list[LineChart]:
    """Make a chart of scores for each column, overall ones first, then charts of differences to full retention."""
    order = sorted(range(len(table.columns)), key=lambda c: table.columns[c].key != OVERALL)
    charts = [_chart(table, c, style, difference=difference) for difference in (False, True) for c in order]
    return [chart for chart in charts if chart.values]


def _chart(table: ResultsTable, column: int, style: Mapping[str, Style], *, difference: bool) -> LineChart:
    """Make the chart of a column."""
    kind = _difference if difference else _score
    cells = {(row.method, block.ratio): row.cells[column] for block in table.blocks for row in block.rows}
    full = _score(table.original.cells[column])
    return LineChart(
        key=f"{'difference' if difference else 'score'}-{column}",
        title=column_title(table, table.columns[column]),
        difference=difference,
        values={arm: value for arm, cell in cells.items() if (value := kind(cell))},
        of_full=Value(0.0, None, None) if full and difference else full,
        styles=style,
    )


def _score(cell: Cell | None) -> Value | None:
    """Return a cell's score with its interval, or None."""
    if cell is None:
        return None
    return Value(cell.score, cell.low, cell.high, bool(cell.full and cell.full.noise))


def _difference(cell: Cell | None) -> Value | None:
    """Return a cell's difference to full retention with its interval, or None."""
    if cell is None or cell.full is None:
        return None
    return Value(cell.full.difference, cell.full.low, cell.full.high, bool(cell.full.noise))


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """Give each method a colour and dash; GSTEP and full retention have their own."""
    others = [method for method in methods if method not in (GSTEP, ORIGINAL.method)]
    fixed = {ORIGINAL.method: Style("ink", 0), GSTEP: Style("c0", 0)}
    return fixed | {m: Style(f"c{i % _COLOURS + 1}", i // _COLOURS % _DASHES) for i, m in enumerate(others)}


def ticks(low: float, high: float) -> list[float]:
    """Return evenly spaced round numbers, the first at or below ``low`` and the last at or above ``high``."""
    rough = max(high - low, 1e-6) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1.0, 2.0, 5.0, 10.0) if s * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 10) for k in range(first, max(last, first + 1) + 1)]


def ratio_places(ratios: Sequence[float]) -> tuple[list[float], bool]:
    """Return the horizontal places of ascending ratios in percent, and whether they are logarithmic."""
    if len(ratios) == 1:
        return [50.0], False
    logarithmic = ratios[-1] > _WIDE * ratios[0]
    at = [math.log(ratio) if logarithmic else ratio for ratio in ratios]
    return [_EDGE + (100 - 2 * _EDGE) * (x - at[0]) / (at[-1] - at[0]) for x in at], logarithmic
