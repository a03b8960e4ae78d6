"""``--plan`` of the commands that have it: the plan as a table, as a page, as a document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from jobs.frame.json_document import Done
from pipeline.plan.estimate import Plan
from pipeline.plan.options import PlanOptions

C = TypeVar("C", bound=PlanOptions)


def show_plan(config: C, console: Console, planned: Callable[[C, Console], Plan]) -> Done:
    """Print the plan of a configuration, write its page where ``--html`` names a file, and return its document."""
    from pipeline.inspect.page import check_file, write_file  # noqa: PLC0415 - most runs plan nothing
    from pipeline.plan.page import plan_page  # noqa: PLC0415
    from pipeline.plan.render import render_plan  # noqa: PLC0415

    if config.html is not None:
        check_file(Path(config.html))
    plan = planned(config, console)
    if config.html is not None:
        write_file(Path(config.html), plan_page(plan, config.subject))
    return Done(0, plan.as_record(), [render_plan(plan)])
