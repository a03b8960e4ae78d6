"""The figures that are shown of the whole job."""

import pytest
from rich.console import Console

from jobs.benchmark.pipeline.report import as_table, cell
from jobs.benchmark.pipeline.work import DECODE, JOB, LOOP, SINGLE, Work


def took(seconds, **more):
    cpu = {"CPU main process": 0.02, "CPU raylet": 0.01}
    return {"seconds": seconds, "peak MB": 300.0, "store MB": 0.9, "store objects": 1.2, **cpu, **more}


def shown(cells):
    console = Console(width=200)
    with console.capture() as captured:
        console.print(as_table(cells, "a title"))
    return captured.get()


def test_busy_and_limits_come_from_the_speed_and_the_nominal_time():
    found = {LOOP: took(1 / 16), JOB: took(1 / 12), SINGLE: took(1 / 10), DECODE: took(1 / 30)}
    one = cell(Work("", 2, 0.05, 1), found)
    assert [one[f"{kind}, busy"] for kind in (LOOP, JOB, SINGLE)] == pytest.approx([0.8, 0.6, 0.5])
    assert one["slowest stage alone, videos/s"] == pytest.approx(20)
    assert (one["job / plain loop"], one["job / slowest stage"]) == pytest.approx((0.75, 0.6))
    assert one["job, CPU ms a video"] == pytest.approx(30) and one["job, CPU ms: raylet"] == pytest.approx(10)
    assert "job / nodes x the first" not in one
    text = shown([one])
    assert "a title" in text and "12.0" in text and "0.75" in text
    assert cell(Work("", 2, 0.02, 1), found)["slowest stage alone, videos/s"] == pytest.approx(30)


def test_nodes_are_compared_with_the_fewest():
    one, four = Work(JOB, 2, 0.05, 1, 1, 1), Work(JOB, 2, 0.05, 4, 4, 4)
    first = cell(one, {JOB: took(1 / 10)})
    more = cell(four, {JOB: took(1 / 30)}, first)
    assert more["job / nodes x the first"] == pytest.approx(0.75) and more["job, busy"] == pytest.approx(0.375)
    assert "0.75" in shown([first, more])
