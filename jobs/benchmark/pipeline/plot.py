"""Draw what was measured of the whole job. Needs matplotlib (the extra ``benchmark``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from jobs.benchmark.pipeline.measure import Figures
from jobs.benchmark.pipeline.report import OF_JOB
from jobs.benchmark.pipeline.work import JOB, LOOP, SINGLE


def write_plot(cells: Sequence[Figures], title: str, file: Path) -> None:
    """Write a PNG of two charts: how busy the encoders are, and the job's CPU seconds a video by kind of process."""
    figure = Figure(figsize=(6 + 2 * len(cells), 4.8), layout="constrained")
    busy, used = figure.subplots(1, 2)
    kinds = [kind for kind in (SINGLE, LOOP, JOB) if f"{kind}, busy" in cells[0]]
    for place, kind in enumerate(kinds):
        across = [number + place / (len(kinds) + 1) for number in range(len(cells))]
        busy.bar(across, [one[f"{kind}, busy"] for one in cells], 1 / (len(kinds) + 1), align="edge", label=kind)
    below = [0.0] * len(cells)
    for name in dict.fromkeys(name for one in cells for name in one if name.startswith(OF_JOB)):
        heights = [max(0.0, one.get(name, 0.0)) for one in cells]
        used.bar(range(len(cells)), heights, 0.6, below, align="edge", label=name.removeprefix(OF_JOB))
        below = [low + more for low, more in zip(below, heights, strict=True)]
    for panel, what in ((busy, "encoder busy"), (used, "the job's CPU ms a video")):
        names = [f"{one['MB']:.1f} MB\n{one['encode ms']:g} ms\nnodes: {one['nodes']:g}" for one in cells]
        panel.set_xticks([number + 0.3 for number in range(len(cells))], names)
        panel.set_ylabel(what)
        panel.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=12)
    figure.savefig(file, format="png", dpi=130)
