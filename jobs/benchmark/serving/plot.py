"""Draw requests a second of every way of answering. Needs matplotlib (the extra ``benchmark``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure

from jobs.benchmark.serving.open_loop import Arrived
from jobs.benchmark.serving.times import Measured


def write_plot(found: Sequence[Measured], title: str, file: Path) -> None:
    """Write a PNG of requests a second by questions a video, cold and warm, in a colour a way and dashes a ratio."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    lines = dict.fromkeys((one.mode, one.retention_ratio) for one in found if one.requests_per_s is not None)
    colors = {mode: f"C{number}" for number, mode in enumerate(dict.fromkeys(mode for mode, _ in lines))}
    dashes = dict(zip(dict.fromkeys(ratio for _, ratio in lines), cycle(("-", "--", ":", "-.")), strict=False))
    places = {number: place for place, number in enumerate(sorted({one.questions for one in found}))}
    for panel, warm in zip(panels, (False, True), strict=True):
        for mode, ratio in lines:
            of_line = [one for one in found if (one.mode, one.retention_ratio) == (mode, ratio)]
            speeds = [one.warm_requests_per_s if warm else one.requests_per_s for one in of_line]
            across = [places[one.questions] for one in of_line]
            drawn = [speed or float("nan") for speed in speeds]
            style = {"color": colors[mode], "linestyle": dashes[ratio], "marker": "o"}
            panel.plot(across, drawn, label=f"{mode}, {100 * ratio:g}%", **style)
        panel.set_yscale("log")
        panel.set_xticks(list(places.values()), [str(number) for number in places])
        panel.set_xlabel("questions a video, " + ("asked again" if warm else "nothing held"))
    panels[0].set_ylabel("requests/s")
    panels[1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, format="png", dpi=110)


def write_rates(found: Sequence[Arrived], file: Path) -> None:
    """Write a PNG of the seconds that 99 of 100 answers took by the rate of requests, cold and warm."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels, rates = figure.subplots(1, 2, sharey=True), sorted({one.rate for one in found})
    for panel, warm in zip(panels, (False, True), strict=True):
        for way, questions in dict.fromkeys((one.way, one.questions) for one in found):
            line = [one for one in found if (one.way, one.questions, one.warm) == (way, questions, warm)]
            label = f"{way}, {questions} questions a video"
            panel.plot([one.rate for one in line], [one.p99_s for one in line], marker="o", label=label)
        panel.set(xscale="log", yscale="log", xlabel="requests/s, " + ("asked again" if warm else "nothing held"))
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.set_xticks([], minor=True)
    panels[0].set_ylabel("s until 99 of 100 answers")
    panels[1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    figure.savefig(file, format="png", dpi=110)
