"""The simulated stages: they keep pace with the slowest one, and faults cost what they must."""

from dataclasses import replace

import pytest

from pipeline.plan.estimate import Cluster, estimate
from pipeline.plan.intervals import Interval
from pipeline.plan.simulate import Stages, simulate, simulated_s
from tests.pipeline.plan.workloads import A100S, PRICED, work

EVEN = Stages(
    videos=2000, decoders=8, encoders=4, cores=8, decode_s=0.05, encode_s=0.02, host_s=1e-3, driver_s=1e-3, nodes=4
)


def test_the_slowest_stage_sets_the_pace():
    by_decode, by_encode, by_driver = (
        EVEN,
        replace(EVEN, encode_s=0.2),
        replace(EVEN, driver_s=0.05, decode_s=0.01),
    )
    assert simulate(by_decode) == pytest.approx(2000 * 0.051 / 8, rel=0.05)
    assert simulate(by_encode) == pytest.approx(2000 * 0.2 / 4, rel=0.05)
    assert simulate(by_driver) == pytest.approx(2000 * 0.05, rel=0.05)


def test_the_same_seed_gives_the_same_time():
    assert simulate(EVEN) == simulate(EVEN) != simulate(replace(EVEN, seed=1))


def test_slow_workers_and_lost_nodes_cost_time_and_no_video():
    whole = simulate(EVEN)
    assert 1.05 * whole < simulate(replace(EVEN, slow=0.5)) < 2 * whole
    lost = simulate(replace(EVEN, lost={1: 5.0}, notice_s=1.0))
    assert 1.05 * whole < lost < 1.5 * whole  # a quarter of the workers is missing for half of the time
    late = simulate(replace(EVEN, lost={1: whole - 0.1}, notice_s=30.0))
    assert late == pytest.approx(whole + 30, abs=3)  # what it had in hand waits until its loss is noticed


def test_bundles_travel_whole():
    assert simulate(replace(EVEN, bundle=3)) == pytest.approx(simulate(EVEN), rel=0.05)
    assert simulate(replace(EVEN, videos=1)) < 1


@pytest.mark.parametrize("videos", [1000, 100_000])
@pytest.mark.parametrize("decode_s", [0.1, 5.0])
def test_a_plan_is_simulated_as_fast_as_its_closed_form_says(videos, decode_s):
    one = work(videos=videos, decode_s=Interval.exactly(decode_s))
    assert simulated_s(one, A100S) == pytest.approx(estimate(one, A100S, PRICED).wall_s.expected, rel=0.1)


def test_cpus_are_simulated_too():
    one, cpus = work(videos=200, flops=Interval.exactly(1e10)), Cluster(0, None, 8.0)
    assert simulated_s(one, cpus) == pytest.approx(estimate(one, cpus, PRICED).wall_s.expected, rel=0.15)
    assert simulated_s(work(videos=0), cpus) == 0
