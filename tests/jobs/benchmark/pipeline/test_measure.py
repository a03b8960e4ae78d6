"""What a video more takes, worked out from two runs of child processes."""

import pyarrow.parquet as pq
import pytest

from jobs.benchmark.pipeline import loop
from jobs.benchmark.pipeline.measure import make_videos, medians, run_child, slope
from jobs.benchmark.pipeline.work import DECODE, DRIVER, FRAME_BYTES, JOB, LOOP, SINGLE, Work
from pipeline.errors import RunFailed


def test_starting_falls_out_of_a_slope():
    few = {"seconds": 9.0, "peak MB": 200.0, "store MB": 0.5, "CPU raylet": 1.5, "CPU ended": 1.0}
    many = {"seconds": 14.0, "peak MB": 300.0, "store MB": 1.5, "CPU raylet": 2.0, "CPU ended": 1.0, "CPU late": 0.1}
    wanted = {"seconds": 0.05, "peak MB": 300, "store MB": 0.01, "CPU raylet": 5e-3, "CPU ended": 0, "CPU late": 1e-3}
    assert slope(few, many, 100) == pytest.approx(wanted)


def test_runs_too_short_to_tell_apart_are_refused():
    with pytest.raises(RunFailed, match="--seconds"):
        slope({"seconds": 9.0}, {"seconds": 8.9}, 100)


def test_medians_are_of_each_figure_by_itself():
    assert medians([{"a": 1, "b": 9}, {"a": 3, "b": 7}, {"a": 2}]) == {"a": 2, "b": 7}


@pytest.mark.parametrize("kind", [LOOP, SINGLE, DECODE])
def test_what_the_job_is_compared_with_runs_in_a_process_of_its_own(tmp_path, kind):
    done = run_child(Work(kind, 2, 0.01, 1, folder=str(tmp_path), videos=20))
    assert done["seconds"] > (0.0 if kind == DECODE else 20 * 0.01)
    assert done["CPU main process"] > 0 and done["peak MB"] > 10 and "store MB" not in done
    assert not list(tmp_path.iterdir())


def test_loops_of_several_encoders_share_the_videos(tmp_path):
    work = Work(LOOP, 2, 0.01, 2, encoders=2, folder=str(tmp_path), videos=20)
    make_videos(work)
    assert loop.run(work)["seconds"] > 10 * 0.01
    written = [pq.read_table(file)["video_id"].to_pylist() for file in sorted(work.out.iterdir())]
    assert [len(ids) for ids in written] == [10, 10] and len({*written[0], *written[1]}) == 20


@pytest.mark.slow
def test_the_job_runs_with_an_encoder_that_sleeps(tmp_path):
    done = run_child(Work(JOB, 2, 0.02, 1, nodes=1, folder=str(tmp_path), videos=16))
    assert done["seconds"] > 16 * 0.02 and done["peak MB"] > 100
    assert done["store objects"] >= 16 and 16 <= done["store MB"] * 1e6 / (2 * FRAME_BYTES) < 40
    kinds = ("main process", "decode actor", "decode child", "encode actor", "raylet", "gcs")
    assert all(done[f"CPU {kind}"] > 0 for kind in kinds)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_job_runs_by_stages_that_do_nothing_with_several_encoders(tmp_path):
    done = run_child(Work(DRIVER, 2, 0.0, 1, encoders=2, nodes=1, folder=str(tmp_path), videos=64))
    assert done["CPU main process"] > 0 and done["CPU encode actor"] > 0 and "CPU decode child" not in done


def test_a_child_that_fails_says_why(tmp_path):
    with pytest.raises(RunFailed, match="the single process over 2 videos failed: ValueError: sleep length"):
        run_child(Work(SINGLE, 2, -1.0, 1, folder=str(tmp_path), videos=2))
