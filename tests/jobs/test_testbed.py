"""jobs.testbed: what make writes and says, what it refuses, and how it ends."""

import signal
import stat

import av
import numpy as np
import pytest

from jobs.testbed import main
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.shapes import layout
from tests.builders.runs import run


def make(folder, *options):
    return main(["make", str(folder), "--videos", "3", *options])


def said(captured):
    return " ".join(captured.split())


def bytes_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def seeds_of(folder):
    return {int(path.stem.removeprefix("shapes-")) for path in (folder / "data").iterdir()}


def test_a_folder_is_made_that_the_benchmark_reads_and_the_same_command_again_is_well(tmp_path, capsys):
    assert make(tmp_path / "d") == 0
    items = find_benchmark("shapes").load(tmp_path / "d").items
    assert f"3 videos and {len(items)} questions are in {tmp_path / 'd'}" in said(capsys.readouterr().out)
    assert len({item.video_id for item in items}) == 3 and len(items) >= 18
    before = bytes_of(tmp_path / "d")
    assert make(tmp_path / "d", "--picture", str(tmp_path / "p.png")) == 0
    assert make(tmp_path / "d", "--seed", "1") == 2
    assert "holds videos of another recipe" in said(capsys.readouterr().err)
    assert bytes_of(tmp_path / "d") == before
    with av.open(str(tmp_path / "p.png")) as file:
        (picture,) = (frame.to_ndarray(format="rgb24") for frame in file.decode(video=0))
    rows = (8 + 16 + 32) // 8
    assert picture.shape == (2 * (rows * 96 + 2 * 4), 2 * 8 * 96, 3)
    assert np.unique(picture.reshape(-1, 3), axis=0).shape[0] > 100


def test_two_processes_write_the_same_bytes(tmp_path):
    assert make(tmp_path / "here", "--hardness", "mixed") == 0
    argv = ("make", str(tmp_path / "there"), "--videos", "3", "--hardness", "mixed")
    done = run("jobs.testbed", *argv, PYTHONHASHSEED="3")
    assert done.returncode == 0, done.stdout
    assert bytes_of(tmp_path / "here") == bytes_of(tmp_path / "there")


def test_options_choose_the_videos(tmp_path):
    assert make(tmp_path / "a", "--seed", "4", "--durations", "long", "--hardness", "dim", "needle", "pan") == 0
    items = find_benchmark("shapes").load(tmp_path / "a").items
    assert {item.splits["duration"] for item in items} == {"long"}
    assert {item.splits["domain"] for item in items} == {"dim", "needle", "pan"}
    assert make(tmp_path / "b", "--durations", "short") == 0
    assert not seeds_of(tmp_path / "a") & seeds_of(tmp_path / "b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seed", "100"), "--seed must be 0 to 99 on the split development, got 100"),
        (("--seed", "-1"), "--seed must be 0 to 99"),
        (("--videos", "10001"), "--videos must be 1 to 10000, got 10001"),
    ],
)
def test_what_cannot_be_made_is_refused_and_nothing_is_written(tmp_path, capsys, options, message):
    assert make(tmp_path / "d", *options) == 2
    assert message in said(capsys.readouterr().err) and not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: make"),
        (["bake"], "invalid choice: 'bake'"),
        (["make"], "the following arguments are required: DIR"),
        (["make", "d", "--hardness", "hard"], "invalid choice: 'hard'"),
        (["make", "d", "--split", "dev"], "invalid choice: 'dev'"),
        (["make", "d", "--videos", "0"], "must be at least 1, got 0"),
        (["make", "d", "--picture", "nowhere/p.png"], "there is no folder nowhere"),
    ],
)
def test_mistyped_flags_end_with_2(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2 and message in said(capsys.readouterr().err)


def test_a_file_in_the_way_of_the_folder_is_refused(tmp_path, capsys):
    (tmp_path / "d").write_text("mine")
    assert make(tmp_path / "d") == 2
    assert "is a file: name a folder" in said(capsys.readouterr().err)
    assert make(tmp_path / "d" / "e") == 1
    assert "failed: " in said(capsys.readouterr().err)
    assert stat.S_ISREG((tmp_path / "d").stat().st_mode)


def test_an_interrupted_one_ends_with_130_and_goes_on(tmp_path, monkeypatch):
    write_mp4 = layout.write_mp4

    def write_and_interrupt(path, *video):
        write_mp4(path, *video)
        if len([*path.parent.iterdir()]) == 2:
            path.write_bytes(path.read_bytes()[:-99])  # as in the middle of the second video
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(layout, "write_mp4", write_and_interrupt)
        assert make(tmp_path / "d") == 130
    assert len([*tmp_path.glob("d/data/*.mp4")]) == 2
    assert make(tmp_path / "d") == 0 and make(tmp_path / "whole") == 0
    assert bytes_of(tmp_path / "d") == bytes_of(tmp_path / "whole")
