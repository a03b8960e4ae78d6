"""The geometry of the page's charts: axes, the colors of methods, and the panels of losses by kind of ability."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.evaluate.breaks import UNKNOWN, Breaks, Kind, Loss, Verdict

_STEPS = 6  # of a vertical axis, about
_COLORS, _DASHES = 6, 3  # GSTEP has the first color for itself; dashes tell methods apart once colors are used up
PANEL_WIDTH, PANEL_HEIGHT = 380, 270  # pixels of a panel
PANEL_LEFT, PANEL_RIGHT, _TOP, _BOTTOM = 40, 8, 22, 42  # pixels of its margins
_APART = 40  # pixels between two labels of the horizontal axis
_DODGE, _SPREAD = 8.0, 0.7  # pixels between methods at one ratio, and at most this share of a ratio's place


class Style(NamedTuple):
    """The numbers of the color and dash by which a method is drawn in every chart of a page."""

    color: int
    dash: int


class Point(NamedTuple):
    """A loss in a panel; places are in pixels.

    Attributes:
        ends: of the interval, upper end first; None without an interval.
        safe: whether the ratio is safe.
        words: what is shown on hovering.
    """

    x: float
    y: float
    ends: tuple[float, float] | None
    safe: bool
    words: str


@dataclass(frozen=True)
class Trace:
    """The points of a method in a panel; there are none where the panel shows no numbers."""

    verdict: Verdict
    style: Style
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The losses on one kind of ability against the retention ratio; places are in pixels.

    Attributes:
        up: (place, label) of the vertical axis, which all panels share.
        across: (place, label) of the horizontal axis, on which the ratios have equal distances.
        zero: the place of no loss.
        limit: the place of the largest loss that is safe.
        traces: of the methods.
    """

    kind: Kind
    up: Sequence[tuple[float, str]]
    across: Sequence[tuple[float, str]]
    zero: float
    limit: float
    traces: Sequence[Trace]

    @property
    def empty_text(self) -> str:
        """The text that stands in a panel without points; "" where there are points."""
        if any(trace.points for trace in self.traces):
            return ""
        texts = {f"{trace.verdict.answer}: {trace.verdict.reason}" for trace in self.traces}
        return texts.pop() if len(texts) == 1 else UNKNOWN


def assign_styles(titles: Iterable[str]) -> dict[str, Style]:
    """Return a style for each method, by its title, in the order of first appearance."""
    titles = dict.fromkeys(titles)
    others = [title for title in titles if title != "GSTEP"]
    numbers = {title: Style(i % (_COLORS - 1) + 1, i // (_COLORS - 1) % _DASHES) for i, title in enumerate(others)}
    return {title: numbers.get(title, Style(0, 0)) for title in titles}


def ticks(values: Sequence[float]) -> list[float]:
    """Return at least two evenly spaced round numbers that enclose the values."""
    low, high = min(values), max(values)
    rough = max(high - low, 0.5) / _STEPS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1.0, 2.0, 5.0, 10.0) if s * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 10) for k in range(first, max(last, first + 1) + 1)]


def make_panels(breaks: Breaks, styles: dict[str, Style]) -> list[Panel]:
    """Return a panel for each kind, with a trace of every method; a kind of too few videos has no points.

    ``styles`` has each verdict's title.
    """
    losses = [loss for verdict in breaks.verdicts for loss in verdict.tested if _is_drawn(loss)]
    numbers = [number for loss in losses for number in (loss.difference, loss.low, loss.high) if number is not None]
    axis = ticks([0.0, -breaks.within, *numbers])

    def down(points: float) -> float:
        return _TOP + (PANEL_HEIGHT - _TOP - _BOTTOM) * (axis[-1] - points) / (axis[-1] - axis[0])

    place = (PANEL_WIDTH - PANEL_LEFT - PANEL_RIGHT) / max(len(breaks.ratios), 1)
    center = {ratio: PANEL_LEFT + place * (i + 0.5) for i, ratio in enumerate(breaks.ratios)}
    across = list[tuple[float, str]]()
    for ratio, x in center.items():
        if not across or x - across[-1][0] >= _APART:
            across.append((x, f"{100 * ratio:g}%"))
    panels = []
    for kind in breaks.kinds:
        verdicts, traces = breaks.of_kind(kind), list[Trace]()
        step = min(_DODGE, _SPREAD * place / len(verdicts)) if verdicts else 0.0
        for i, verdict in enumerate(verdicts):
            aside, safe = step * (i - (len(verdicts) - 1) / 2), verdict.passed
            points = [
                Point(
                    x=center[loss.ratio] + aside,
                    y=down(loss.difference or 0.0),
                    ends=None if loss.low is None or loss.high is None else (down(loss.high), down(loss.low)),
                    safe=loss in safe,
                    words=f"{verdict.title} at {loss.share}: {loss.text}",
                )
                for loss in verdict.tested
                if _is_drawn(loss)
            ]
            traces.append(Trace(verdict, styles[verdict.title], points))
        panels.append(
            Panel(
                kind=kind,
                up=[(down(tick), f"{tick:+g}" if tick else "0") for tick in axis],
                across=across,
                zero=down(0.0),
                limit=down(-breaks.within),
                traces=traces,
            )
        )
    return panels


def _is_drawn(loss: Loss) -> bool:
    """Return True for a loss whose place says something: one of enough videos, where something could be lost."""
    return loss.outcome not in ("few videos", "nothing to lose", "no interval")
