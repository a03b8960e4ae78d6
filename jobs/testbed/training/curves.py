"""The logs of a training as a picture. Needs matplotlib (the extra ``benchmark``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from pipeline.evaluate.shapes.questions import TYPES

_VISION = ("scene", "corner", "name", "color")
_WINDOW = 8  # lines of a log that are averaged, for questions of a type are few in one


def write_curves(file: Path, logs: Mapping[str, Path]) -> None:
    """A PNG: a panel a stage, the share that was right over steps, on training data.

    Args:
        logs: by stage.
    """
    figure = Figure(figsize=(5.2 * len(logs), 4.4), layout="constrained")
    panels = figure.subplots(1, len(logs), sharey=True, squeeze=False)[0]
    for panel, (stage, path) in zip(panels, logs.items(), strict=True):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for i, name in enumerate(_VISION if stage == "vision" else TYPES):
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                steps, shares = zip(*points, strict=True)
                panel.plot(steps, _smooth(shares), color=f"C{i}", label=name, linewidth=1.3)
        panel.set_title(
            {"vision": "vision: cells", "reading": "language, ideal tokens"}.get(stage, "language, real tokens")
        )
        panel.set_xlabel("step")
        panel.set_ylim(0, 1.02)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, ncols=2, loc="lower right")
    panels[0].set_ylabel("share right, nothing left out")
    figure.savefig(file, format="png", dpi=120)


def _smooth(values: tuple[float, ...]) -> list[float]:
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - _WINDOW) : i + 1])]
