"""A plan as a self-contained page: its numbers, and one picture of the time that each stage would take alone."""

from __future__ import annotations

from pipeline.html_pages import asset, environment
from pipeline.plan.estimate import Plan
from pipeline.plan.render import bytes_text, cluster_text, money, ranged, rows_of, time_text

PACKAGE = "pipeline.plan"


def plan_page(plan: Plan, title: str) -> str:
    """Render the page of a plan for what ``title`` names."""
    figures = {"wall time": ranged(plan.wall_s, time_text), "output": ranged(plan.output_bytes, bytes_text)}
    if plan.cost is not None:
        figures["cost"] = ranged(plan.cost["total"], money)
    longest = max((part.high for part in plan.stage_s.values()), default=0.0) or 1.0
    return (
        environment(PACKAGE)
        .get_template("plan.html")
        .render(
            style=asset(PACKAGE, "plan.css"),
            title=title,
            plan=plan,
            cluster=cluster_text(plan),
            figures=figures,
            bars=[(name, ranged(part, time_text), part.scaled(100 / longest)) for name, part in plan.stage_s.items()],
            rows=list(rows_of(plan)),
        )
    )
