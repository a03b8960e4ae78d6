"""Show what was measured of the whole job: as a table, and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from jobs.benchmark.pipeline.measure import DECODE, JOB, LOOP, SINGLE, Cell, Rates
from jobs.benchmark.pipeline.work import FRAME_BYTES

_LOOPS = {
    "plain loop": LOOP,
    "the job": JOB,
    "single process": SINGLE,
}


def as_table(cells: Sequence[Cell], title: str) -> Table:
    """Return a table with a column for each size of video, time of encoding and number of nodes."""
    table = Table(title=title, title_justify="left", show_edge=False, caption_justify="left")
    table.add_column("frames; encode; nodes")
    for cell in cells:
        table.add_column(f"{cell.frames * FRAME_BYTES / 1e6:.1f} MB; {1e3 * cell.work_s:g} ms; {cell.nodes or 1}")
    for name, kind in _LOOPS.items():
        _add(table, f"{name}, videos/s (busy)", [_speed(cell, cell.rates.get(kind)) for cell in cells])
    _add(table, "decode alone, videos/s", [_number(cell.rates, DECODE) for cell in cells])
    _add(table, "job / plain loop", [_share(cell.job_of_loop) for cell in cells])
    _add(table, "job / slowest stage", [_share(cell.job_of_stage) for cell in cells])
    _add(table, "job / nodes x the first", [_share(scaled(cells, cell)) for cell in cells])
    kinds = dict.fromkeys(kind for cell in cells for kind in cell.rates[JOB].cpu_ms)
    _add(table, "job, CPU ms a video", [f"{sum(cell.rates[JOB].cpu_ms.values()):.1f}" for cell in cells])
    for kind in kinds:
        _add(table, f"  {kind}", [f"{cell.rates[JOB].cpu_ms.get(kind, 0.0):.1f}" for cell in cells])
    loops = [cell.rates.get(LOOP) for cell in cells]
    _add(table, "loop, CPU ms a video", [f"{sum(one.cpu_ms.values()):.1f}" if one else "" for one in loops])
    _add(table, "object store, MB a video", [f"{cell.rates[JOB].store_bytes / 1e6:.2f}" for cell in cells])
    _add(table, "object store, objects a video", [f"{cell.rates[JOB].store_objects:.2f}" for cell in cells])
    _add(table, "job, peak memory (PSS), MB", [f"{cell.rates[JOB].peak_mb:,.0f}" for cell in cells])
    _add(table, "loop, peak memory (PSS), MB", [f"{one.peak_mb:,.0f}" if one else "" for one in loops])
    table.caption = "busy: videos/s x the time that encoding takes, an encoder"
    return table


def scaled(cells: Sequence[Cell], cell: Cell) -> float | None:
    """Return a cell's videos a second over those of the fewest nodes, times as many; None where no other is there."""
    alike = [one for one in cells if (one.frames, one.work_s) == (cell.frames, cell.work_s) and one.nodes]
    least = min(alike, key=lambda one: one.nodes, default=cell)
    if least is cell:
        return None
    return cell.rates[JOB].videos_per_s / (least.rates[JOB].videos_per_s * cell.nodes / least.nodes)


def as_record(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """Return a JSON-able record of each cell."""
    return [
        {
            **asdict(cell),
            "frame_bytes": cell.frames * FRAME_BYTES,
            "busy": {kind: cell.busy(rates) for kind, rates in cell.rates.items() if kind != DECODE},
            "slowest_stage": cell.slowest_stage,
            "job_of_loop": cell.job_of_loop,
            "job_of_slowest_stage": cell.job_of_stage,
            "job_of_nodes_times_first": scaled(cells, cell),
        }
        for cell in cells
    ]


def _add(table: Table, name: str, figures: Sequence[str]) -> None:
    """Add a row, unless it says nothing."""
    if any(figures):
        table.add_row(name, *figures)


def _speed(cell: Cell, rates: Rates | None) -> str:
    return f"{rates.videos_per_s:.1f} ({cell.busy(rates):.0%})" if rates else ""


def _number(rates: dict[str, Rates], kind: str) -> str:
    return f"{rates[kind].videos_per_s:.1f}" if kind in rates else ""


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"
