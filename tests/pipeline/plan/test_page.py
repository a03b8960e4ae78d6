"""The page of a plan: self-contained, with a bar for each stage whose range can be seen."""

import re

from pipeline.plan.estimate import estimate
from pipeline.plan.intervals import Interval
from pipeline.plan.page import plan_page
from tests.pipeline.plan.workloads import A100S, PRICED, work


def test_a_page_shows_every_stage_with_its_range_and_loads_nothing():
    plan = estimate(work(decode_s=Interval(5, 10, 20)), A100S, PRICED)
    page = plan_page(plan, "<videos> & model")
    assert "&lt;videos&gt; &amp; model" in page and "<script" not in page and "://" not in page
    assert page.count('class="bar"') == len(plan.stage_s) and page.count('class="stage slowest"') == 1
    widths = [float(width) for width in re.findall(r'class="bar"[^>]* width="([\d.]+)"', page)]
    longest = max(part.high for part in plan.stage_s.values())
    assert widths == [round(100 * part.expected / longest, 2) for part in plan.stage_s.values()]
    for text in (plan.remedy, "4 x A100, 48 vCPUs", *plan.notes[:1]):
        assert text in page.replace("&#39;", "'")


def test_nothing_to_do_has_a_page_too():
    assert "nothing is left to do" in plan_page(estimate(work(videos=0), A100S, PRICED), "none")
