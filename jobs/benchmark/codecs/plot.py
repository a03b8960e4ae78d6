"""Draw right answers against the bytes of a video. Needs matplotlib (the extra ``benchmark``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from jobs.benchmark.codecs.answers import Cell


def write_plot(cells: Sequence[Cell], title: str, file: Path) -> None:
    """Write a PNG with a chart for each method: a line for each codec, a point for each ratio."""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    figure = Figure(figsize=(5.2 * len(methods), 4.2), layout="constrained")
    for panel, method in zip(figure.subplots(1, len(methods), sharey=True, squeeze=False)[0], methods, strict=True):
        for codec in dict.fromkeys(cell.codec for cell in cells):
            line = sorted((c for c in cells if (c.method, c.codec) == (method, codec)), key=lambda cell: cell.mb)
            panel.plot([c.mb for c in line], [100 * c.right for c in line], marker="o", label=codec)
            for cell in line:
                panel.annotate(
                    f"{100 * cell.ratio:g}%",
                    (cell.mb, 100 * cell.right),
                    fontsize=7,
                    xytext=(3, -9),
                    textcoords="offset points",
                )
        panel.set_xscale("log")
        panel.set_xlabel("MB a video (LLaVA-OneVision-7B, 32 frames)")
        panel.set_title(method)
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("right answers, %")
    figure.axes[-1].legend(frameon=False, loc="lower right", fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, format="png", dpi=130)
