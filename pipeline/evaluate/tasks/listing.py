"""The list of lmms-eval's tasks about videos for the terminal: ``--benchmark lmms:list``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.evaluate.tasks.survey import FITS, IN_PART, NEEDS_JUDGE, UNFIT, UNKNOWN, UNLOADABLE, TaskFit

_ORDER = (FITS, IN_PART, UNKNOWN, NEEDS_JUDGE, UNFIT, UNLOADABLE)


def render_tasks(tasks: Sequence[TaskFit]) -> RenderableType:
    """Return a table for each fit. Tasks of a folder that do not fit for the same reason share a row."""
    ordered = sorted(tasks, key=lambda task: (_ORDER.index(task.fit), task.folder, task.reason, task.name))
    counts = Counter(task.fit for task in tasks)
    parts: list[RenderableType] = [
        Text(f"{len(tasks)} tasks about videos: " + ", ".join(f"{counts[fit]} {fit}" for fit in _ORDER if counts[fit]))
    ]
    for fit, of_fit in groupby(ordered, key=lambda task: task.fit):
        table = Table(title=f"\n{fit.capitalize()}", title_justify="left", show_edge=False, box=None, pad_edge=False)
        for title in ("folder", "tasks", "first metric", *(["why"] if fit != FITS else [])):
            table.add_column(title, overflow="fold")
        for (folder, reason), same in groupby(of_fit, key=lambda task: (task.folder, task.reason)):
            family = list(same)
            metrics = " ".join(dict.fromkeys(task.metrics[0] for task in family if task.metrics))
            names = " ".join(task.name for task in family)
            table.add_row(folder, names, metrics, *([reason] if fit != FITS else []))
        parts.append(table)
    return Group(*parts)
