"""Two charts over the sampled frames of a video: where ticks, points and bars are. templates/charts.html draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def nice_ticks(low: float, high: float, most: int = 5, *, whole: bool = False) -> list[float]:
    """Return round numbers in [low, high], evenly spaced, at most ``most`` + 1 of them; integers with ``whole``."""
    rough = max(high - low, 1e-9) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in _STEPS if s * power >= rough * (1 - 1e-9))
    if whole:
        step = float(max(1, math.ceil(step - 1e-9)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 10) for k in range(first, last + 1)]


def upward(highest: float, *, whole: bool = False) -> list[float]:
    """Return ticks from 0 that end at or above ``highest``."""
    ticks = nice_ticks(0.0, highest, 4, whole=whole)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else (1.0 if whole else highest or 1.0)
    return ticks if ticks[-1] >= highest - 1e-9 and len(ticks) > 1 else [*ticks, round(ticks[-1] + step, 10)]


def time_ticks(seconds: Sequence[float]) -> list[tuple[float, str]]:
    """Return (percent of the width, label) of round seconds on an axis where frames are evenly spaced.

    Between two frames the seconds run evenly.
    """
    centres = (np.arange(len(seconds)) + 0.5) / len(seconds) * 100
    ticks = nice_ticks(seconds[0], seconds[-1], 6) if seconds[-1] > seconds[0] else []
    if not ticks:
        return [(50.0, f"{seconds[len(seconds) // 2]:.2f}")]
    return [(float(np.interp(tick, seconds, centres)), f"{tick:g}") for tick in ticks]


@dataclass(frozen=True)
class Chart:
    """The base of both charts: words, ticks, and the pointer's text for each frame.

    Attributes:
        up: (percent of the height, label) of the ticks.
        across: (percent of the width, label) of the seconds.
        hints: a text a frame.
    """

    title: str
    note: str
    up: Sequence[tuple[float, str]]
    across: Sequence[tuple[float, str]]
    hints: Sequence[str]


@dataclass(frozen=True)
class Curve(Chart):
    """A chart of points (frames from the left, percent from the top)."""

    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bars(Chart):
    """A chart of bars, one a frame, with heights in percent; ``top`` is the number that 100 percent stand for."""

    heights: Sequence[float]
    top: float


def density_chart(density: Sequence[float], seconds: Sequence[float]) -> Curve:
    """Make the curve of every frame's temporal density."""
    ticks = upward(max(density))
    return Curve(
        title="Temporal density",
        note="change from the neighbouring frames; 1 is the mean",
        up=_percent(ticks),
        across=time_ticks(seconds),
        hints=[
            f"t {t}, {at:.2f} s: density {value:.3f}"
            for t, (at, value) in enumerate(zip(seconds, density, strict=True))
        ],
        points=[(t + 0.5, 100 - 100 * value / ticks[-1]) for t, value in enumerate(density)],
    )


def kept_chart(stored: Sequence[int], seconds: Sequence[float], note: str) -> Bars:
    """Make the bars of every frame's stored tokens."""
    ticks = upward(max(stored), whole=True)
    return Bars(
        title="Tokens kept per frame",
        note=note,
        up=_percent(ticks),
        across=time_ticks(seconds),
        hints=[f"t {t}, {at:.2f} s" for t, at in enumerate(seconds)],
        heights=[count * 100 / ticks[-1] for count in stored],
        top=ticks[-1],
    )


def _percent(ticks: Sequence[float]) -> list[tuple[float, str]]:
    """Return (percent of the highest tick, label) of each tick."""
    return [(100 * tick / ticks[-1], f"{tick:g}") for tick in ticks]
