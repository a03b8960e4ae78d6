"""Draw what was measured of the whole job. Needs matplotlib (the extra ``benchmark``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jobs.benchmark.pipeline.measure import JOB, LOOP, SINGLE, Cell
from jobs.benchmark.pipeline.work import FRAME_BYTES

# Colours that the colour-blind tell apart (Okabe and Ito).
_LOOPS = {SINGLE: ("one process", "#999999"), LOOP: ("plain loop", "#E69F00"), JOB: ("the job", "#0072B2")}
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#D55E00", "#CC79A7", "#999999", "#E69F00", "#000000")


def write_plot(cells: Sequence[Cell], title: str, file: Path) -> None:
    """Write a PNG: how busy encoders are, and beside it the processor's time a video of the job, by process."""
    figure = Figure(figsize=(3 + 2 * len(cells), 4.8), layout="constrained")
    busy, used = figure.subplots(1, 2)
    _draw_busy(busy, cells)
    _draw_used(used, cells)
    names = [f"{cell.frames * FRAME_BYTES / 1e6:.1f} MB\n{1e3 * cell.work_s:g} ms" for cell in cells]
    names = [name + (f"\n{cell.nodes} nodes" if cell.nodes else "") for name, cell in zip(names, cells, strict=True)]
    for panel in (busy, used):
        panel.set_xticks(range(len(cells)), names)
        panel.grid(visible=True, axis="y", linewidth=0.4, alpha=0.6)
        panel.set_axisbelow(True)
        panel.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=12)
    figure.savefig(file, format="png", dpi=130)


def _draw_busy(panel: Axes, cells: Sequence[Cell]) -> None:
    shown = [kind for kind in _LOOPS if kind in cells[0].rates]
    width = 0.8 / len(shown)
    for place, kind in enumerate(shown):
        across = [number + (place - (len(shown) - 1) / 2) * width for number in range(len(cells))]
        name, colour = _LOOPS[kind]
        panel.bar(across, [100 * cell.busy(cell.rates[kind]) for cell in cells], width, color=colour, label=name)
    for number, cell in enumerate(cells):
        if (limit := cell.slowest_stage) is not None:
            most = 100 * limit * cell.work_s / cell.encoders
            label = "" if number else "slowest stage alone"
            panel.hlines(most, number - 0.4, number + 0.4, colors="black", linestyles="dashed", label=label)
    panel.set_ylabel("encoder busy, %")


def _draw_used(panel: Axes, cells: Sequence[Cell]) -> None:
    kinds = dict.fromkeys(kind for cell in cells for kind in cell.rates[JOB].cpu_ms)
    below = [0.0] * len(cells)
    for place, kind in enumerate(kinds):
        used = [max(0.0, cell.rates[JOB].cpu_ms.get(kind, 0.0)) for cell in cells]
        panel.bar(range(len(cells)), used, 0.6, below, color=_COLOURS[place % len(_COLOURS)], label=kind)
        below = [low + more for low, more in zip(below, used, strict=True)]
    panel.set_ylabel("the job's CPU ms a video")
