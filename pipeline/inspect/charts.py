"""Two charts over the sampled frames of a video, as inline SVG with labels in HTML.

The SVG is stretched to the width of the page (one unit a frame across, 100 up); text beside it keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def nice_ticks(low: float, high: float, most: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers in [low, high], evenly spaced, at most ``most`` + 1 of them; integers with ``whole``."""
    rough = max(high - low, 1e-9) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in _STEPS if s * power >= rough * (1 - 1e-9))
    if whole:
        step = float(max(1, math.ceil(step - 1e-9)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 10) for k in range(first, last + 1)]


def upward(highest: float, *, whole: bool = False) -> list[float]:
    """Ticks from 0 that end at or above ``highest``."""
    ticks = nice_ticks(0.0, highest, 4, whole=whole)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else (1.0 if whole else highest or 1.0)
    return ticks if ticks[-1] >= highest - 1e-9 and len(ticks) > 1 else [*ticks, round(ticks[-1] + step, 10)]


def time_ticks(seconds: Sequence[float]) -> list[tuple[float, str]]:
    """(percent of the width, label) of round seconds, where frames stand side by side at their own times.

    Frames are evenly spaced across, so between two of them the seconds run as these two say.
    """
    centres = (np.arange(len(seconds)) + 0.5) / len(seconds) * 100
    ticks = nice_ticks(seconds[0], seconds[-1], 6) if seconds[-1] > seconds[0] else []
    if not ticks:
        return [(50.0, f"{seconds[len(seconds) // 2]:.2f}")]
    return [(float(np.interp(tick, seconds, centres)), f"{tick:g}") for tick in ticks]


def density_chart(density: Sequence[float], seconds: Sequence[float]) -> str:
    """A curve through the temporal density of every frame."""
    ticks = upward(max(density))
    points = [(t + 0.5, 100 - 100 * value / ticks[-1]) for t, value in enumerate(density)]
    line = "L".join(f"{x:g} {y:.2f}" for x, y in points)
    dots = "".join(f"M{x:g} {y:.2f}h0" for x, y in points)  # round caps on nothing: dots that stretching leaves round
    drawing = (
        f'<path class="area" d="M0.5 100L{line}L{points[-1][0]:g} 100z"/>'
        f'<path class="line" d="M{line}"/><path class="dots" d="{dots}"/>'
    )
    hints = [
        f"t {t}, {at:.2f} s: density {value:.3f}" for t, (at, value) in enumerate(zip(seconds, density, strict=True))
    ]
    return _chart(
        "Temporal density", "change from the neighbouring frames; 1 is the mean", ticks, drawing, seconds, hints
    )


def kept_chart(stored: Sequence[int], seconds: Sequence[float], note: str) -> str:
    """A bar a frame for the tokens kept; the page's script sets the bars, the shadows behind them stay."""
    ticks = upward(max(stored), whole=True)
    scale = 100 / ticks[-1]
    shadows = "".join(_bar("shadow", t, count * scale) for t, count in enumerate(stored))
    bars = "".join(_bar("bar", t, count * scale) for t, count in enumerate(stored))
    hints = [f"t {t}, {at:.2f} s" for t, at in enumerate(seconds)]
    drawing = f'{shadows}<g id="bars" data-top="{ticks[-1]:g}">{bars}</g>'
    return _chart("Tokens kept per frame", note, ticks, drawing, seconds, hints)


def _bar(name: str, t: int, height: float) -> str:
    return f'<rect class="{name}" x="{t + 0.12:g}" width="0.76" y="{100 - height:.2f}" height="{height:.2f}"/>'


def _chart(
    title: str, note: str, ticks: Sequence[float], drawing: str, seconds: Sequence[float], hints: Iterable[str]
) -> str:
    up = [(100 * tick / ticks[-1], f"{tick:g}") for tick in ticks]
    across = time_ticks(seconds)
    lines = "".join(f'<path class="grid" d="M0 {100 - y:.2f}H{len(seconds)}"/>' for y, _ in up)
    links = "".join(
        f'<a href="#t{t}" tabindex="-1"><rect class="hit" x="{t}" width="1" height="100"><title>{escape(hint)}</title>'
        "</rect></a>"
        for t, hint in enumerate(hints)
    )
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b> <span>{escape(note)}</span></figcaption>'
        f'<div class="plot"><div class="y">{_labels("bottom", up)}</div>'
        f'<svg viewBox="0 0 {len(seconds)} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)} over time">{lines}{drawing}{links}</svg>'
        f'<div class="x">{_labels("left", across)}</div></div></figure>'
    )


def _labels(side: str, places: Iterable[tuple[float, str]]) -> str:
    return "".join(f'<span style="{side}:{percent:.2f}%">{escape(label)}</span>' for percent, label in places)
