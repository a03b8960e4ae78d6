"""Charts of scores against retention: where lines, bands and ticks are. templates/report_charts.html draws them.

Places are in percent of a chart's width and height, so that it can have any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from pipeline.evaluate.report.text import bracket, column_title, ratio_text, signed, tick_text, title_of
from pipeline.evaluate.statistics.results import OVERALL, Cell, ResultsTable
from pipeline.evaluate.statistics.score_matrix import ORIGINAL

_GSTEP = "gstep"
_COLOURS = 5  # colours of methods other than GSTEP: --c1 to --c5 of report.css
_DASHES = 3
_EDGE = 5.0  # percent of the width left free at both sides
_LABEL = 9.0  # percent of the width that the label of a tick takes on a phone
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
    title: str
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
    title: str
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
    """A column of the table, scores or differences.

    Attributes:
        key: unique on the page.
        difference: to full retention; else scores.
        up: (percent from the bottom, label) of ticks.
        across: (percent from the left, label) of ratios, or of methods where there is one ratio.
        full: full retention; None where it was not run.
        stops: by rising ratio.
        logarithmic: the axis of ratios.
    """

    key: str
    title: str
    difference: bool
    up: Sequence[tuple[float, str]]
    across: Sequence[tuple[float, str]]
    series: Sequence[Series]
    full: Point | None
    stops: Sequence[Stop]
    logarithmic: bool


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """Give each method a colour and dash; GSTEP and full retention have their own."""
    others = [method for method in methods if method not in (_GSTEP, ORIGINAL.method)]
    fixed = {ORIGINAL.method: Style("ink", 0), _GSTEP: Style("c0", 0)}
    return fixed | {m: Style(f"c{i % _COLOURS + 1}", i // _COLOURS % _DASHES) for i, m in enumerate(others)}


def line_charts(table: ResultsTable, style: Mapping[str, Style]) -> list[LineChart]:
    """Make a chart of scores for each column, overall ones first, then charts of differences to full retention."""
    order = sorted(range(len(table.columns)), key=lambda c: table.columns[c].key != OVERALL)
    plots = [(c, _plot(table, c, difference=difference)) for difference in (False, True) for c in order]
    return [_chart(table, column, plot, style) for column, plot in plots if plot.values]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return evenly spaced round numbers, the first at or below ``low`` and the last at or above ``high``."""
    rough = max(high - low, 1e-6) / most
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


@dataclass(frozen=True)
class _Plot:
    """A chart's numbers by (method, ratio), and the axes that fit them."""

    values: Mapping[tuple[str, float], Value]
    full: Value | None
    difference: bool

    @cached_property
    def methods(self) -> list[str]:
        """The methods, in order of first appearance."""
        return list(dict.fromkeys(method for method, _ in self.values))

    @cached_property
    def ratios(self) -> list[float]:
        """The ratios, ascending."""
        return sorted({ratio for _, ratio in self.values})

    @cached_property
    def places(self) -> list[float]:
        """The horizontal places of the ratios, in percent."""
        return ratio_places(self.ratios)[0]

    @cached_property
    def up(self) -> list[float]:
        """The ticks of the vertical axis."""
        shown = [*self.values.values(), *([self.full] if self.full else [])]
        numbers = [number for one in shown for number in (one.value, one.low, one.high) if number is not None]
        return ticks(min(numbers), max(numbers))

    def x(self, method: str, ratio: float) -> float:
        """Return the horizontal place of a method at a ratio; at a single ratio the methods stand side by side."""
        if len(self.ratios) == 1:
            return 100 * (self.methods.index(method) + 0.5) / len(self.methods)
        return self.places[self.ratios.index(ratio)]

    def down(self, value: float) -> float:
        """Return the place of a value in percent from the top."""
        return 100 * (self.up[-1] - value) / (self.up[-1] - self.up[0])

    def point(self, x: float, value: Value) -> Point:
        """Return the places of a value and of the ends of its interval."""
        low, high = (None if end is None else self.down(end) for end in (value.low, value.high))
        return Point(x, self.down(value.value), low, high)


def _score(cell: Cell | None) -> Value | None:
    """Return a cell's score with its interval, or None."""
    if cell is None:
        return None
    return Value(cell.score, cell.low, cell.high, bool(cell.full and cell.full.noise))


def _difference(cell: Cell | None) -> Value | None:
    """Return a cell's difference to full retention with its interval, or None."""
    if cell is None or cell.full is None:
        return None
    versus = cell.full
    return Value(versus.difference, versus.low, versus.high, bool(versus.noise))


def _plot(table: ResultsTable, column: int, *, difference: bool) -> _Plot:
    """Collect a column's values, scores or differences, by method and ratio."""
    kind = _difference if difference else _score
    values = {
        (row.method, block.ratio): value
        for block in table.blocks
        for row in block.rows
        if (value := kind(row.cells[column]))
    }
    full = _score(table.original.cells[column])
    return _Plot(values, Value(0.0, None, None) if full and difference else full, difference)


def _chart(table: ResultsTable, column: int, plot: _Plot, style: Mapping[str, Style]) -> LineChart:
    """Make the chart of a column."""
    return LineChart(
        key=f"{'difference' if plot.difference else 'score'}-{column}",
        title=column_title(table, table.columns[column]),
        difference=plot.difference,
        up=[(100 - plot.down(tick), tick_text(tick, sign=plot.difference)) for tick in plot.up],
        across=list(_across(plot)),
        series=[_series(plot, method, style[method]) for method in plot.methods],
        full=plot.full and plot.point(0.0, plot.full),
        stops=list(_stops(plot, style)),
        logarithmic=ratio_places(plot.ratios)[1],
    )


def _series(plot: _Plot, method: str, style: Style) -> Series:
    """Make the line of a method."""
    at = [(ratio, plot.values[method, ratio]) for ratio in plot.ratios if (method, ratio) in plot.values]
    points = [plot.point(plot.x(method, ratio), value) for ratio, value in at]
    return Series(method, title_of(method), style, points)


def _across(plot: _Plot) -> Iterator[tuple[float, str]]:
    """Yield the labels of the horizontal axis: methods at a single ratio, else the ratios that have room."""
    if len(plot.ratios) == 1:
        yield from ((plot.x(method, plot.ratios[0]), title_of(method)) for method in plot.methods)
        return
    last = -math.inf
    for ratio, x in zip(plot.ratios, plot.places, strict=True):
        if x - last >= _LABEL:
            last = x
            yield x, ratio_text(ratio)


def _stops(plot: _Plot, style: Mapping[str, Style]) -> Iterator[Stop]:
    """Yield each ratio's stop, whose strip reaches half-way to its neighbours."""
    between = [(a + b) / 2 for a, b in pairwise(plot.places)]
    for ratio, x, left, right in zip(plot.ratios, plot.places, [0.0, *between], [*between, 100.0], strict=True):
        yield Stop(ratio_text(ratio), x, left, right - left, _readings(plot, ratio, style))


def _readings(plot: _Plot, ratio: float, style: Mapping[str, Style]) -> list[Reading]:
    """List each method's number at a ratio with its interval, best first, for the box that a pointer opens."""
    values = {method: value for (method, r), value in plot.values.items() if r == ratio}
    if plot.full:
        values[ORIGINAL.method] = plot.full
    return [
        Reading(
            method,
            title_of(method),
            style[method],
            signed(value.value) if plot.difference else f"{value.value:.1f}",
            bracket(value.low, value.high, sign=plot.difference),
            value.noise,
        )
        for method, value in sorted(values.items(), key=lambda item: -item[1].value)
    ]
