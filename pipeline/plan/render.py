"""A plan as a table for the terminal, and the words for its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.plan.estimate import HOUR, Plan
from pipeline.plan.intervals import Interval

Row = tuple[str, str]
_TIMES = ((2 * 86400.0, 86400.0, "days"), (2 * HOUR, HOUR, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (0.0, "bytes"))


def number(value: float) -> str:
    """Format a number with three digits that count."""
    if math.isinf(value):
        return "never"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 4}f}".rstrip("0").rstrip(".")


def time_text(seconds: float) -> str:
    """Format seconds in the unit that fits."""
    unit, name = next((unit, name) for least, unit, name in _TIMES if seconds >= least)
    return f"{number(seconds / unit)} {name}"


def bytes_text(size: float) -> str:
    """Format bytes in the decimal unit that fits."""
    unit, name = next((unit or 1.0, name) for unit, name in _BYTES if size >= unit)
    return f"{number(size / unit)} {name}"


def money(price: float) -> str:
    """Format a price in its own currency, whichever that is."""
    return number(price) if price >= 0.1 else f"{price:.2g}"


def percent(share: float) -> str:
    """Format a share."""
    return f"{100 * share:.3g} %"


def ranged(part: Interval, text: Callable[[float], str]) -> str:
    """Format an interval as its expected value and its range, or as one value where all are alike."""
    low, expected, high = map(text, part)
    return expected if low == high else f"{expected} ({low} to {high})"


def hours(seconds: float) -> str:
    """Format seconds as hours, in which machines are paid, unless they are few."""
    return f"{number(seconds / HOUR)} h" if seconds >= HOUR / 2 else time_text(seconds)


def cluster_text(plan: Plan) -> str:
    """Return the machines of a plan in words."""
    gpus, kind, cores, encoders = plan.cluster
    shared = f" with {encoders} encoders each" if encoders > 1 else ""
    return f"{gpus} x {kind}{shared}, {cores:g} vCPUs" if gpus else f"{cores:g} vCPUs, no GPU"


def rows_of(plan: Plan) -> Iterator[Row]:
    """Yield the lines of a plan, (name, value) each."""
    failed = f", {ranged(plan.failed_share, percent)} of them unreadable" if plan.failed_share.high else ""
    yield "videos", f"{plan.videos:,}{failed}" + (f", {ranged(plan.video_s, hours)} of video" if plan.video_s else "")
    yield "cluster", cluster_text(plan)
    yield "wall time", ranged(plan.wall_s, time_text)
    if plan.simulated_wall_s is not None:
        yield "  simulated", time_text(plan.simulated_wall_s)
    yield "bottleneck", f"{plan.bottleneck}; what removes it: {plan.remedy}"
    yield from _work_of(plan)
    yield "output", ranged(plan.output_bytes, bytes_text)
    for ratio, size in plan.tiers.items():
        yield f"  read at {ratio}", ranged(size, bytes_text)
    if plan.input_bytes is not None:
        yield "input", f"{ranged(plan.input_bytes, bytes_text)} leave where the videos are"
    for name, part in (plan.cost or {}).items():
        yield f"cost, {name.replace('_', ' ')}", ranged(part, money)
    if plan.break_even_questions is not None:
        yield "pays from", f"{ranged(plan.break_even_questions, number)} questions a video on"


def _work_of(plan: Plan) -> Iterator[Row]:
    """Yield the lines about cores and GPUs."""
    yield "decode", f"{ranged(plan.decode_core_s, hours)} of a core"
    if plan.cluster.gpus:
        yield "encode", f"{ranged(plan.gpu_s, hours)} of a GPU"
        yield "encoders busy", ranged(plan.encoder_busy, percent)
    else:
        yield "encode", f"{ranged(plan.encode_core_s, hours)} of a core"
    for name, part in plan.parts_s.items():
        yield f"  to {name}", f"{ranged(part, hours)} of a {'GPU' if plan.cluster.gpus else 'core'}"
    yield "other CPU time", f"{ranged(plan.host_core_s, hours)} of a core"
    if plan.cores_a_gpu is not None:
        yield "vCPUs a GPU", f"{ranged(plan.cores_a_gpu, number)} keep it busy"
    if plan.peak_gpu_bytes is not None:
        yield "GPU memory", f"{ranged(plan.peak_gpu_bytes, bytes_text)} at the peak"
    if plan.video_hours_per_day_per_gpu is not None:
        yield "pace", f"{ranged(plan.video_hours_per_day_per_gpu, number)} hours of video a day and GPU"


def render_plan(plan: Plan) -> RenderableType:
    """Render a plan as a table for the terminal, with what it rests on below."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows_of(plan):
        table.add_row(name, Text(value))
    return Group("plan: nothing was started or written", table, *(Text(f"- {note}") for note in plan.notes))
