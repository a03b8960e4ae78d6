"""What a video more takes, worked out from two runs."""

import pytest

from jobs.benchmark.pipeline.measure import medians, run_child, slope
from jobs.benchmark.pipeline.work import FRAME_BYTES, Work
from pipeline.errors import RunFailed
from tests.jobs.benchmark.pipeline.runs import cell, rates, run


def test_starting_falls_out_of_a_slope():
    few = run(20, 9.0, 500, 3, raylet=1.5, driver=4.0)
    many = run(120, 14.0, 500 + 10**6, 203, 3 * 10**8, raylet=2.0, driver=5.0, writer=0.1)
    found = slope(few, many)
    assert found.videos_per_s == pytest.approx(20)
    assert found.cpu_ms == pytest.approx({"raylet": 5, "driver": 10, "writer": 1})
    assert (found.store_bytes, found.store_objects, found.peak_mb) == pytest.approx((10**4, 2, 300))


def test_runs_too_short_to_tell_apart_are_refused():
    with pytest.raises(RunFailed, match="--seconds"):
        slope(run(20, 9.0), run(120, 8.9))


def test_medians_are_of_each_figure_by_itself():
    found = medians([rates(10, writer=0.1), rates(30, writer=0.3), rates(20)])
    assert found.videos_per_s == pytest.approx(20) and found.cpu_ms == pytest.approx({"main": 10, "writer": 1})


def test_busy_and_limits_come_from_the_speed_and_the_nominal_time():
    found = cell(encoders=2, work_s=0.05, loop=16, job=12, decode=30)
    assert found.busy(found.rates["job"]) == pytest.approx(0.3)
    assert found.slowest_stage == pytest.approx(30)  # decoding; two encoders would do 40
    assert (found.job_of_loop, found.job_of_stage) == pytest.approx((0.75, 0.4))
    alone = cell(job=12)
    assert alone.slowest_stage is alone.job_of_loop is alone.job_of_stage is None


@pytest.mark.parametrize("kind", ["loop", "single", "decode"])
def test_what_the_job_is_compared_with_runs_in_a_process_of_its_own(tmp_path, kind):
    done = run_child(Work(kind, 20, 2, 0.01, 1, folder=str(tmp_path)))
    assert (done.videos, done.answer.store_bytes, done.answer.store_objects) == (20, 0, 0)
    assert done.answer.seconds > (0.0 if kind == "decode" else 20 * 0.01)
    assert done.cpu_s["main process"] > 0 and done.peak_bytes > 10**7
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_job_runs_with_an_encoder_that_sleeps(tmp_path):
    done = run_child(Work("job", 16, 2, 0.02, 1, nodes=1, folder=str(tmp_path)))
    assert done.videos == 16 and done.answer.seconds > 16 * 0.02
    assert done.answer.store_objects >= 16 and 16 * 2 * FRAME_BYTES < done.answer.store_bytes < 40 * 2 * FRAME_BYTES
    assert {"main process", "decode actor", "decode child", "encode actor", "raylet", "gcs"} <= done.cpu_s.keys()
    assert not list(tmp_path.iterdir())


def test_a_child_that_fails_says_why(tmp_path):
    with pytest.raises(RunFailed, match="the single over 2 videos failed: ValueError: sleep length"):
        run_child(Work("single", 2, 2, -1.0, 1, folder=str(tmp_path)))
