"""A plan as a table for the terminal, and the formats of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.plan.estimate import HOUR, Interval, RunEstimate

_TIMES = ((2 * 86400.0, 86400.0, "days"), (2 * HOUR, HOUR, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (0.0, "bytes"))

_UNKNOWN = "not known for this model; time and cost are without it"


def format_number(value: float) -> str:
    """Format a number with up to four decimals, about three significant digits: "1,234", "12.3", "0.05"."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 4}f}".rstrip("0").rstrip(".")


def format_time(seconds: float) -> str:
    """Format seconds in the largest unit (days to seconds) of which there are at least two."""
    unit, name = next((unit, name) for least, unit, name in _TIMES if seconds >= least)
    return f"{format_number(seconds / unit)} {name}"


def format_bytes(size: float) -> str:
    """Format bytes in the largest decimal unit that fits, up to TB."""
    unit, name = next((unit or 1.0, name) for unit, name in _BYTES if size >= unit)
    return f"{format_number(size / unit)} {name}"


def format_hours(seconds: float) -> str:
    """Format seconds as hours; below half an hour, in minutes or seconds."""
    return f"{format_number(seconds / HOUR)} h" if seconds >= HOUR / 2 else format_time(seconds)


def format_range(part: Interval, text: Callable[[float], str]) -> str:
    """Format an interval as "EXPECTED (LOW to HIGH)", or as one value if LOW equals HIGH."""
    low, middle, high = map(text, part)
    return middle if low == high else f"{middle} ({low} to {high})"


def list_rows(plan: RunEstimate) -> Iterator[tuple[str, str]]:
    """Yield the rows of a plan's table as (label, text).

    They are videos, cluster, wall time, bottleneck, a row per stage, decode, encode, output, input and a row per cost.
    The time of a stage or of encode that is None is "not known"; input and costs are left out if they are None. The row
    "videos" omits a failed share of 0 and an unknown length.
    """
    failed_note = f", of which {100 * plan.failed_share:.3g} % fail as in the sample" if plan.failed_share else ""
    yield (
        "videos",
        f"{plan.videos:,}{failed_note}"
        + (f", {format_range(plan.video_s, format_hours)} of video" if plan.video_s else ""),
    )
    gpus, kind, cores = plan.cluster
    yield "cluster", f"{gpus} x {kind}, {cores:g} vCPUs" if gpus else f"{cores:g} vCPUs, no GPU"
    yield "wall time", format_range(plan.wall_s, format_time)
    yield "bottleneck", f"{plan.bottleneck}; what removes it: {plan.remedy}"
    for name, interval in plan.stage_s.items():
        yield f"  {name} alone", "not known" if interval is None else format_range(interval, format_time)
    yield "decode", f"{format_range(plan.decode_core_s, format_hours)} of a core"
    encode, unit = (plan.gpu_s, "GPU") if gpus else (plan.encode_core_s, "core")
    yield "encode", _UNKNOWN if encode is None else f"{format_range(encode, format_hours)} of a {unit}"
    yield "output", format_range(plan.output_bytes, format_bytes)
    if plan.input_bytes is not None:
        yield "input", f"{format_range(plan.input_bytes, format_bytes)} of video files are read"
    for name, interval in (plan.cost or {}).items():
        yield f"cost, {name.replace('_', ' ')}", format_range(interval, format_number)


def render_plan(plan: RunEstimate) -> RenderableType:
    """Render a plan for the terminal: a heading, the table, and the notes."""
    table = Table.grid(padding=(0, 2))
    for name, value in list_rows(plan):
        table.add_row(name, Text(value))
    return Group(
        "plan: Ray was not started, and the cache was not touched", table, *(Text(f"- {note}") for note in plan.notes)
    )
