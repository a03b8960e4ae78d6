"""The command that measures the whole job; its child processes are made up here."""

import json

import pytest

from jobs.benchmark import __main__ as benchmark
from jobs.benchmark.pipeline import measure
from jobs.benchmark.pipeline.work import DRIVER, JOB, LOOP, SIMULATION


@pytest.fixture
def answering(monkeypatch):
    """Let child processes end at once with the figures that a function gives; returns the list of works that it ran."""

    def answering(figures):
        works = []

        def run_child(work):
            works.append(work)
            return {"seconds": 50.0, "peak MB": 9.0, **figures(work)}

        monkeypatch.setattr(measure, "run_child", run_child)
        return works

    return answering


@pytest.fixture
def ran(answering):
    """The works that were run. Each video takes as long as it is encoded, and starting takes a second."""

    def figures(work):
        seconds = 1 + work.videos * (work.work_s or 0.001) / work.encoders
        return {"seconds": seconds, "store MB": 1.0, "store objects": 1.0, "CPU main process": seconds}

    return answering(figures)


def measured(tmp_path, *argv):
    file = tmp_path / "job.json"
    assert benchmark.main(["pipeline", *argv, "--folder", str(tmp_path), "--json", str(file)]) == 0
    return json.loads(file.read_text())["cells"]


def test_loop_job_single_process_and_decoding_take_turns(tmp_path, capsys, ran):
    argv = ["--frames", "2", "32", "--encode-ms", "50", "--workers", "3", "--seconds", "10", "--repeats", "2"]
    cells = measured(tmp_path, *argv, "--plot", str(tmp_path / "job.png"))
    assert [cell["MB"] for cell in cells] == pytest.approx([0.885, 14.156], abs=1e-3)
    for cell in cells:
        busy = [cell[f"{kind}, busy"] for kind in ("plain loop", "job", "single process")]
        assert [*busy, cell["job / plain loop"], cell["job / slowest stage"]] == pytest.approx([1.0] * 5)
    assert [work.kind for work in ran[::2]] == ["plain loop", "job", "single process", "decode alone"] * 4
    assert {(work.workers, work.encoders, work.videos) for work in ran} == {(3, 1, 50), (3, 1, 250)}
    assert "job / plain loop" in capsys.readouterr().out and (tmp_path / "job.png").exists()


@pytest.mark.parametrize("kind", [JOB, LOOP])
def test_logical_nodes_have_a_worker_of_each_kind(tmp_path, ran, kind):
    cells = measured(tmp_path, "--nodes", "4", "1", "--frames", "2", "--encode-ms", "50", "--seconds", "10")
    assert [(work.nodes, work.workers, work.encoders, work.videos) for work in ran if work.kind == kind] == [
        (1, 1, 1, 50), (1, 1, 1, 250), (4, 4, 4, 200), (4, 4, 4, 1000),
    ]  # fmt: skip
    assert [cell.get("job / nodes x the first") for cell in cells] == [None, pytest.approx(1.0)]
    assert all("job / plain loop" in cell for cell in cells)


def test_the_driver_is_shown_by_what_a_video_more_takes(tmp_path, capsys, ran):
    assert benchmark.main(["pipeline", "--driver", "300", "100", "--encoders", "3", "--folder", str(tmp_path)]) == 0
    assert {(work.kind, work.encoders, work.nodes, work.videos) for work in ran} == {
        (DRIVER, 3, 1, 100),
        (DRIVER, 3, 1, 300),
    }
    assert "3 encoders, a video more from 100 to 300" in " ".join(capsys.readouterr().out.split())
    assert benchmark.main(["pipeline", "--driver", "100", "100"]) == 2


@pytest.mark.parametrize("cpu", [0.0, -0.01])
def test_a_driver_whose_time_cannot_be_told_has_no_figure(cpu, capsys, answering):
    answering(lambda work: {"seconds": work.videos, "CPU main process": 1 + cpu * work.videos})
    assert benchmark.main(["pipeline", "--driver", "5", "6"]) == 1
    assert "1 videos more took the driver no more of a CPU" in " ".join(capsys.readouterr().err.split())


def test_a_simulation_has_videos_enough_to_be_measured(answering):
    figures = ("reached", "offered", "driver CPU ms", "tick", "slow tick", "driver MB", "reports sent", "seconds")
    works = answering(lambda work: dict.fromkeys([*figures, "reports read", "CPU heartbeat actor"], 1.0))
    assert benchmark.main(["pipeline", "--simulate", "1", "--seconds", "1", "--encode-ms", "5000"]) == 0
    assert [work.videos for work in works] == [16]


def test_forms_of_a_corpus_are_shown_beside_the_folder(tmp_path, capsys, answering):
    def figures(work):
        s3 = {"GETs": 2.0 + work.videos, "HEADs": 4.0, "sent MB": 2.0 * work.videos} if work.on_s3 else {}
        seconds = work.videos / (50 if "tar" in work.form else 100)
        return {"seconds": seconds, "CPU gcs": 1.0, "CPU raylet": seconds / 2, **s3}

    works = answering(figures)
    argv = ["pipeline", "--forms", "300", "100", "--s3", "--repeats", "3", "--folder", str(tmp_path)]
    file = tmp_path / "forms.json"
    assert benchmark.main([*argv, "--json", str(file)]) == 0
    names = ["folder", "one tar", "tars", "column", "folder on S3", "tars on S3"]
    assert [(work.videos, work.name) for work in works] == [(n, name) for n in (100, 300) for name in names * 3]
    assert {work.work_s for work in works} == {0.015}
    said = capsys.readouterr().out
    assert "one tar: 20.0 ms a video (2.00 of the folder's), 10.0 core ms (2.00)\n" in said
    assert "tars on S3: 20.0 ms a video (2.00 of the folder's), 10.0 core ms (2.00), 1.000 GETs, 0.000 HEADs" in said
    assert list(json.loads(file.read_text())["a_video"]) == names
    assert benchmark.main(["pipeline", "--forms", "100", "100"]) == 2


def test_simulated_encoders_are_shown_with_what_the_driver_does_most(tmp_path, capsys, answering):
    def figures(work):
        shares = {
            "in _Fetcher.next": 0.5,
            "in commit": 0.3,
            "in _Writer.write": 0.1,
            "in Facts.add": 0.06,
            "in look": 0.04,
        }
        times = {
            "tick": 0.01,
            "slow tick": 0.02,
            "driver CPU ms": 0.5,
            "driver MB": 300.0,
            "CPU heartbeat actor": 0.1,
        }
        return {"reached": 200.0, "offered": 256.0, "reports sent": 9.0, "reports read": 8.0, **times, **shares}

    works = answering(figures)
    argv = ["pipeline", "--simulate", "64", "1000", "--request-ms", "20", "--seconds", "2", "--folder", str(tmp_path)]
    assert benchmark.main(argv) == 0
    assert [(work.kind, work.encoders, work.frames, work.videos) for work in works] == [
        (SIMULATION, 64, 32, 512),
        (SIMULATION, 1000, 32, 8000),
    ]
    assert {work.request_s for work in works} == {0.02}
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "64 encoders: 200 videos/s of 256 offered" in said
        and "8 of 9 reports/s read, each 0.25 CPU ms; it waits for videos 50 % of the time" in said
    )
    assert "in commit 30 %, in _Writer.write 10 %, in Facts.add 6 %" in said and "look" not in said


def test_a_picture_in_no_folder_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["pipeline", "--plot", str(tmp_path / "none" / "job.png")])
    assert "there is no folder" in capsys.readouterr().err
