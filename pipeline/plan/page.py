"""A plan as a self-contained page: its numbers, and one picture of the time that each stage would take alone."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.html_pages import asset, environment
from pipeline.plan.estimate import Plan
from pipeline.plan.intervals import Interval
from pipeline.plan.render import bytes_text, cluster_text, money, ranged, rows_of, time_text

PACKAGE = "pipeline.plan"


class Bar(NamedTuple):
    """The time of a stage; its ends are in percent of the picture's width."""

    name: str
    text: str
    ends: Interval
    slowest: bool


def plan_page(plan: Plan, title: str) -> str:
    """Render the page of a plan for what ``title`` names."""
    longest = max((part.high for part in plan.stage_s.values()), default=0.0) or 1.0
    bars = [
        Bar(name, ranged(part, time_text), part.scaled(100 / longest), name == plan.bottleneck)
        for name, part in plan.stage_s.items()
    ]
    figures = {"wall time": ranged(plan.wall_s, time_text), "output": ranged(plan.output_bytes, bytes_text)}
    if plan.cost is not None:
        figures["cost"] = ranged(plan.cost["total"], money)
    return (
        environment(PACKAGE)
        .get_template("plan.html")
        .render(
            style=asset(PACKAGE, "plan.css"),
            title=title,
            cluster=cluster_text(plan),
            figures=list(figures.items()),
            bars=bars,
            rows=list(rows_of(plan)),
            notes=plan.notes,
            bottleneck=plan.bottleneck,
            remedy=plan.remedy,
        )
    )
