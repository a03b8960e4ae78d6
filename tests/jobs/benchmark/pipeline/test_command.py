"""The command that measures the whole job; its child processes are made up here."""

import json

import pytest

from jobs.benchmark import __main__ as benchmark
from jobs.benchmark.pipeline import measure
from tests.jobs.benchmark.pipeline.runs import run


@pytest.fixture
def ran(monkeypatch):
    """The works that were run. Each video takes as long as it is encoded, and starting takes a second."""
    works = []

    def run_child(work):
        works.append(work)
        return run(work.videos, 1 + work.videos * work.work_s / work.encoders, **{"main process": 1.0})

    monkeypatch.setattr(measure, "run_child", run_child)
    return works


def measured(tmp_path, *argv):
    file = tmp_path / "job.json"
    code = benchmark.main(["pipeline", *argv, "--folder", str(tmp_path), "--json", str(file)])
    return code, json.loads(file.read_text())


def test_each_cell_has_loop_job_single_process_and_decoding_in_turns(tmp_path, capsys, ran):
    argv = ["--frames", "2", "32", "--encode-ms", "50", "--workers", "3", "--seconds", "10", "--repeats", "2"]
    code, record = measured(tmp_path, *argv, "--plot", str(tmp_path / "job.png"))
    assert code == 0 and [cell["frames"] for cell in record["cells"]] == [2, 32]
    assert all(cell["rates"].keys() == cell["busy"].keys() | {"decode"} for cell in record["cells"])
    assert [busy for cell in record["cells"] for busy in cell["busy"].values()] == pytest.approx([1.0] * 6)
    assert [work.kind for work in ran[::2]] == ["loop", "job", "single", "decode"] * 4
    assert {(work.workers, work.encoders, work.videos) for work in ran} == {(3, 1, 50), (3, 1, 250)}
    assert "job / plain loop" in capsys.readouterr().out and (tmp_path / "job.png").exists()


def test_logical_nodes_have_a_worker_of_each_kind(tmp_path, ran):
    argv = ["--nodes", "1", "4", "--frames", "2", "--encode-ms", "50", "--seconds", "10"]
    _, record = measured(tmp_path, *argv)
    assert [(work.nodes, work.workers, work.encoders, work.videos) for work in ran] == [
        (1, 1, 1, 50), (1, 1, 1, 250), (4, 4, 4, 200), (4, 4, 4, 1000),
    ]  # fmt: skip
    assert [cell["job_of_nodes_times_first"] for cell in record["cells"]] == [None, pytest.approx(1.0)]


def test_an_interrupt_leaves_what_was_measured(tmp_path, monkeypatch, ran):
    real, runs = measure.run_child, []

    def interrupted(work):
        runs.append(work)
        if len(runs) > 8:
            raise KeyboardInterrupt
        return real(work)

    monkeypatch.setattr(measure, "run_child", interrupted)
    code, record = measured(tmp_path, "--frames", "2", "32", "--encode-ms", "50", "--workers", "1")
    assert code == 130 and [cell["frames"] for cell in record["cells"]] == [2]


def test_a_picture_in_no_folder_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["pipeline", "--plot", str(tmp_path / "none" / "job.png")])
    assert "there is no folder" in capsys.readouterr().err
