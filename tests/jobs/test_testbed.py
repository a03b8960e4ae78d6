"""jobs.testbed: what make writes and says, what it refuses, and how it ends."""

import signal

from jobs import testbed
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.shapes import layout
from tests.builders.runs import run, said_by


def make(folder, *options, code=0):
    return said_by(testbed, "make", folder, "--videos", 3, *options, code=code)


def bytes_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def seeds_of(folder):
    return {int(path.stem.removeprefix("shapes-")) for path in (folder / "data").iterdir()}


def test_a_folder_is_made_that_the_benchmark_reads_and_the_same_command_again_is_well(tmp_path):
    said = make(tmp_path / "d")
    items = find_benchmark("shapes").load(tmp_path / "d").items
    assert f"3 videos and {len(items)} questions are in {tmp_path / 'd'}" in said
    assert len({item.video_id for item in items}) == 3 and len(items) >= 18
    before = bytes_of(tmp_path / "d")
    make(tmp_path / "d", "--picture", str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "holds videos of another recipe" in make(tmp_path / "d", "--seed", "1", code=2)
    assert bytes_of(tmp_path / "d") == before


def test_options_choose_the_videos(tmp_path):
    make(tmp_path / "a", "--seed", "4", "--durations", "long", "--hardness", "dim", "needle", "pan")
    items = find_benchmark("shapes").load(tmp_path / "a").items
    assert {item.splits["duration"] for item in items} == {"long"}
    assert {item.splits["domain"] for item in items} == {"dim", "needle", "pan"}
    make(tmp_path / "b", "--durations", "short")
    assert not seeds_of(tmp_path / "a") & seeds_of(tmp_path / "b")


def test_an_interrupted_one_ends_with_130_and_goes_on(tmp_path, monkeypatch):
    write_mp4 = layout.write_mp4

    def write_and_interrupt(path, *video):
        write_mp4(path, *video)
        if len([*path.parent.iterdir()]) == 2:
            path.write_bytes(path.read_bytes()[:-99])  # as in the middle of the second video
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(layout, "write_mp4", write_and_interrupt)
        make(tmp_path / "d", code=130)
    assert len([*tmp_path.glob("d/data/*.mp4")]) == 2
    make(tmp_path / "d")
    make(tmp_path / "whole")
    assert bytes_of(tmp_path / "d") == bytes_of(tmp_path / "whole")


def test_a_folder_that_cannot_be_made_is_a_failure_in_a_line(tmp_path):
    (tmp_path / "d").write_text("mine")
    assert "failed: " in make(tmp_path / "d" / "e", code=1)
    assert (tmp_path / "d").is_file()


def test_two_processes_write_the_same_bytes(tmp_path):
    make(tmp_path / "here", "--hardness", "mixed")
    argv = ("make", str(tmp_path / "there"), "--videos", "3", "--hardness", "mixed")
    done = run("jobs.testbed", *argv, PYTHONHASHSEED="3")
    assert done.returncode == 0, done.stdout
    assert bytes_of(tmp_path / "here") == bytes_of(tmp_path / "there")
