"""The table and the record of the whole job."""

import json

import pytest
from rich.console import Console

from jobs.benchmark.pipeline.report import as_record, as_table, scaled
from tests.jobs.benchmark.pipeline.runs import cell


def shown(cells):
    console = Console(width=200)
    with console.capture() as captured:
        console.print(as_table(cells, "a title"))
    return captured.get()


def test_a_cell_is_a_column_with_busy_shares_and_ratios():
    cells = [cell(loop=16, job=12, single=10, decode=30)]
    text = shown(cells)
    assert "0.9 MB; 50 ms; 1" in text and "12.0 (60%)" in text and "16.0 (80%)" in text
    (record,) = json.loads(json.dumps(as_record(cells)))
    assert record["busy"] == pytest.approx({"loop": 0.8, "job": 0.6, "single": 0.5})
    assert record["slowest_stage"] == pytest.approx(20)
    assert (record["job_of_loop"], record["job_of_slowest_stage"]) == pytest.approx((0.75, 0.6))
    assert "nodes x the first" not in text and record["job_of_nodes_times_first"] is None


def test_nodes_are_compared_with_the_fewest():
    cells = [cell(1, 1, job=10), cell(4, 4, job=30), cell(4, 4, work_s=0.1, job=30)]
    assert [scaled(cells, one) for one in cells] == [None, pytest.approx(0.75), None]
    text = shown(cells)
    assert "job / nodes x the first" in text and "0.75" in text and "plain loop" not in text


def test_nothing_measured_is_an_empty_table():
    assert "a title" in shown([]) and as_record([]) == []
