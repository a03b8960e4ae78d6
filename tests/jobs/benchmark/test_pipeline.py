"""The whole job beside a plain loop: what one more video takes, by child processes that are watched."""

import pyarrow.parquet as pq
import pytest

from jobs.benchmark import __main__ as benchmark
from jobs.benchmark import pipeline
from jobs.benchmark.pipeline import make_videos, run_child
from jobs.benchmark.pipeline_work import FRAME_BYTES, JOB, LOOP, PipelineWork, encode_slice
from pipeline.errors import RunFailed


@pytest.fixture
def works(monkeypatch):
    """Let child processes end at once: a video takes as long as it is encoded, and starting a second. The works run."""
    works = []

    def run_child(work):
        works.append(work)
        seconds = 1 + work.videos * (work.encode_s or 0.001) / work.encoders
        figures = {"seconds": seconds, "peak MB": 9.0 + work.videos, "store MB": 1.0 + work.videos}
        return figures | {"store objects": 1.0, "CPU ms: main process": 1e3 * seconds, "CPU ms: ended": 1.0}

    monkeypatch.setattr(pipeline, "run_child", run_child)
    return works


WORK = ("pipeline", "--encode-ms", 50, "--seconds", 10)


def test_loop_and_job_take_turns_and_starting_cancels_out(measure, works):
    found = measure(*WORK, "--frames", 2, 32, "--workers", 3, "--repeats", 2)[0]["cells"]
    assert [cell["MB"] for cell in found] == pytest.approx([0.885, 14.156], abs=1e-3)
    for cell in found:
        shares = [cell[name] for name in ("plain loop, busy", "job, busy", "job / plain loop")]
        assert shares == pytest.approx([1.0] * 3)
        assert cell["job, CPU ms: main process"] == pytest.approx(50) and cell["job, CPU ms: ended"] == 0
        assert cell["store MB a video"] == pytest.approx(1) and cell["job, peak MB (PSS)"] == 259
    assert [work.kind for work in works[::2]] == [LOOP, JOB] * 4
    assert {(work.workers, work.encoders, work.videos) for work in works} == {(3, 1, 50), (3, 1, 250)}


def test_logical_nodes_have_a_worker_of_each_kind(measure, works):
    found = measure(*WORK, "--nodes", 4, 1, "--frames", 2)[0]["cells"]
    for kind in (JOB, LOOP):
        sizes = [(work.nodes, work.workers, work.encoders, work.videos) for work in works if work.kind == kind]
        assert sizes == [(1, 1, 1, 50), (1, 1, 1, 250), (4, 4, 4, 200), (4, 4, 4, 1000)]
    assert [cell.get("job / nodes x the first") for cell in found] == [None, pytest.approx(1.0)]


def test_the_driver_is_shown_by_what_a_video_more_takes(capsys, works):
    assert benchmark.main(["pipeline", "--driver", "300", "100", "--encoders", "3"]) == 0
    sizes = {(work.kind, work.encode_s, work.encoders, work.nodes, work.videos) for work in works}
    assert sizes == {(JOB, 0.0, 3, 1, 100), (JOB, 0.0, 3, 1, 300)}
    assert "3 encoders, a video more from 100 to 300" in " ".join(capsys.readouterr().out.split())


def test_times_that_cannot_be_told_are_no_figure(capsys, monkeypatch):
    took = {"seconds": 9.0, "peak MB": 1.0, "CPU ms: main process": 1e3}
    monkeypatch.setattr(pipeline, "run_child", lambda work: took | {"seconds": float(work.videos)})
    assert benchmark.main(["pipeline", "--driver", "5", "6"]) == 1
    assert "1 more videos took the driver no more CPU time" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(pipeline, "run_child", lambda work: took)
    with pytest.raises(RunFailed, match="--seconds"):
        pipeline.measure_growth(PipelineWork(JOB, 2, 0.1, 1), 16, 32)


def test_loops_of_several_encoders_share_the_videos(tmp_path):
    loop = PipelineWork(LOOP, 2, 0.01, 1, encoders=2, folder=str(tmp_path), videos=20)
    make_videos(loop)
    loop.out.mkdir()
    for encoder in range(2):
        encode_slice(loop, encoder)
    written = [pq.read_table(file)["video_id"].to_pylist() for file in sorted(loop.out.iterdir())]
    assert [len(ids) for ids in written] == [10, 10] and len({*written[0], *written[1]}) == 20


def test_a_child_process_is_measured_and_says_why_it_fails(tmp_path, monkeypatch):
    loop = PipelineWork(LOOP, 2, 0.01, 1, folder=str(tmp_path), videos=8)
    done = run_child(loop)
    assert done["seconds"] > 8 * 0.01 and done["CPU ms: main process"] > 0 and done["peak MB"] > 10
    monkeypatch.setattr(pipeline, "_CHILD", "raise ValueError('no sleep')")
    with pytest.raises(RunFailed, match="the plain loop over 8 videos failed: ValueError: no sleep"):
        run_child(loop)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_job_runs_with_an_encoder_that_sleeps(tmp_path):
    done = run_child(PipelineWork(JOB, 2, 0.02, 1, nodes=1, folder=str(tmp_path), videos=16))
    assert done["seconds"] > 16 * 0.02 and done["peak MB"] > 100
    assert done["store objects"] >= 16 and 16 <= done["store MB"] * 1e6 / (2 * FRAME_BYTES) < 40
    kinds = ("main process", "decode actor", "decode child", "encode actor", "raylet", "gcs")
    assert all(done[f"CPU ms: {kind}"] > 0 for kind in kinds)
