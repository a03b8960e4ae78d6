"""The figures of jobs.benchmark.selection_times as a picture. Needs matplotlib (the extra ``benchmark``)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from jobs.benchmark.selection_times import FormTime
from jobs.benchmark.tokens import INPUTS

# Colours that the colour-blind tell apart (Okabe and Ito); whole methods are dashed.
_STYLES = {
    "plain": ("#000000", "o"),
    "lazy": ("#E69F00", "s"),
    "lazy+bound": ("#D55E00", "D"),
    "cuda": ("#009E73", "P"),
    "prune:gstep": ("#CC79A7", "^"),
    "prune:topk": ("#0072B2", "v"),
    "prune:vidcom2": ("#56B4E9", "<"),
    "prune:uniform": ("#777777", ">"),
    "prune:random": ("#AAAAAA", "x"),
}


def write_plot(times: Sequence[FormTime], title: str, file: Path) -> None:
    """A PNG of seconds over tokens, both logarithmic: a panel an input, a line a form, at the first ratio measured."""
    times = [item for item in times if item.ratio == times[0].ratio]
    inputs = list(dict.fromkeys(item.input for item in times))
    figure = Figure(figsize=(1.6 + 4.4 * len(inputs), 5.6), layout="constrained")
    panels = figure.subplots(1, len(inputs), sharex=True, sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, inputs, strict=True):
        _draw(panel, [item for item in times if item.input == name])
        _mark(panel, sorted({item.n_tokens for item in times}))
        panel.set_title(f"{name}\n{_wrapped(INPUTS[name].note)}", fontsize=10)
    panels[0].set_ylabel("seconds")
    figure.suptitle(title, fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False)
    figure.savefig(file, format="png", dpi=130)


def _draw(panel: Axes, times: Sequence[FormTime]) -> None:
    for form in dict.fromkeys(item.form for item in times):
        points = [item for item in times if item.form == form]
        colour, marker = _STYLES[form]
        style = "--" if form.startswith("prune:") else "-"
        across, up = [item.n_tokens for item in points], [item.seconds for item in points]
        panel.plot(across, up, style, color=colour, marker=marker, markersize=5, linewidth=1.4, label=form)
        guessed = [item for item in points if item.extrapolated]
        across, up = [item.n_tokens for item in guessed], [item.seconds for item in guessed]
        panel.plot(across, up, marker, color=colour, markersize=5, markerfacecolor="white", linestyle="none", zorder=3)
    panel.set_xlabel("tokens of a video" + (" (hollow: extrapolated)" if any(i.extrapolated for i in times) else ""))


def _mark(panel: Axes, sizes: Sequence[int]) -> None:
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(visible=True, which="major", linewidth=0.4, alpha=0.6)


def _wrapped(note: str) -> str:
    return textwrap.fill(note, 44)
