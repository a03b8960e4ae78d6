"""The load of stages, from reports of their workers: busy shares, queues, and what limits the run."""

import pytest

from pipeline.runner.progress import StageLoad, find_bottleneck
from pipeline.runner.worker_reports import WorkerReport


def report(n_passed_on=(0, 0, 0), up_s=(0.0, 0.0, 0.0), busy_s=(0.0, 0.0, 0.0)) -> WorkerReport:
    def by_stage(numbers):
        return dict(zip(("decode", "encode", "write"), numbers, strict=True))

    return WorkerReport(n_passed_on=by_stage(n_passed_on), up_s=by_stage(up_s), busy_s=by_stage(busy_s))


def test_shares_are_those_of_the_last_looks_alone():
    load = StageLoad()
    for look in range(1, 6):
        idle = max(0, look - 2)  # from the third look on nobody works
        load.add(report(up_s=(10 * look,) * 3, busy_s=(10 * (look - idle), 0, 5 * look)))
    assert load.busy() == {"decode": 0.0, "encode": 0.0, "write": pytest.approx(0.5)}


def test_shares_are_of_the_time_in_which_workers_could_work_and_a_stage_of_dead_workers_is_not_busy():
    load = StageLoad()
    assert load.busy() == {}
    for look in range(1, 5):
        load.add(report(up_s=(10 * look, 10 * min(look, 3), 0), busy_s=(5 * look, 10 * min(look, 3), 0)))
        assert load.busy() == {"decode": 0.5, "encode": 1.0 if look < 4 else 0.0}


def test_queues_hold_what_the_stage_before_is_through_with():
    load = StageLoad()
    load.add(report(n_passed_on=(7, 4, 4)))
    assert load.waiting(10) == {"decode": 3, "encode": 3, "write": 0}
    load.add(report(n_passed_on=(11, 4, 5)))  # an item was decoded again on another node
    assert load.waiting(10) == {"decode": 0, "encode": 7, "write": 0}


@pytest.mark.parametrize(
    ("busy", "limits"),
    [
        ({"decode": 0.97, "encode": 0.41, "write": 0.02}, "decode"),
        ({"decode": 0.60, "encode": 0.99, "write": 0.02}, "encode"),
        ({"decode": 0.97, "encode": 0.96, "write": 0.02}, "encode"),  # decoders fill what is in front of the encoders
        ({"decode": 0.95, "encode": 0.95, "write": 0.95}, "write"),
        ({"decode": 0.70, "encode": 0.60, "write": 0.02}, "decode"),
        ({"decode": 0.30, "encode": 0.20, "write": 0.02}, ""),  # they wait for something else
        ({"answer": 1.0}, ""),
        ({}, ""),
    ],
)
def test_the_last_stage_that_is_always_busy_limits_the_run(busy, limits):
    assert find_bottleneck(busy) == limits
