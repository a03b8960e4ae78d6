"""The command that measures decoding, on a clip that is made for it here."""

import json

import numpy as np
import pytest

from jobs.benchmark import __main__ as benchmark
from jobs.benchmark.decode import clips
from jobs.benchmark.decode.loop import JOB
from jobs.benchmark.decode.measure import CHILD, FLOOR, HERE, Times, needed
from pipeline.video.containers import sniff
from pipeline.video.decoders import PyavDecoder
from pipeline.video.probe import probe

SMALL = ("decode", "--clips", "small", "--frames", "4", "--repeats", "1")


@pytest.fixture
def one_clip(monkeypatch):
    monkeypatch.setitem(clips.CLIPS, "h264-small", clips.Clip("libx264", 192, 128, 2, 12))


def test_all_ways_of_decoding_are_measured_beside_the_least(one_clip, tmp_path, capsys):
    file = tmp_path / "decode.json"
    argv = [*SMALL, "--folder", str(tmp_path / "clips"), "--json", str(file)]
    assert benchmark.main(argv) == 0
    (clip,) = json.loads(file.read_text())["clips"]
    assert clip["clip"] == "h264-small" and clip["bytes"] == 4 * 384 * 384 * 3
    measured = {way for way, seconds in clip["cpu_s"].items() if seconds is not None}
    assert measured >= {FLOOR, HERE, CHILD, "plain PyAV", "decord", "indexed", "ours, within 5 s of keyframes"}
    assert all(seconds > 0 for way, seconds in clip["cpu_s"].items() if way in measured)
    assert f"{HERE} / {FLOOR}" in capsys.readouterr().out.replace("\n", " ")
    (made,) = (tmp_path / "clips").iterdir()
    stamp = made.stat().st_mtime_ns
    assert benchmark.main(argv) == 0 and made.stat().st_mtime_ns == stamp  # kept, and not made again


def test_loops_over_one_number_of_videos_are_refused(one_clip, capsys):
    assert benchmark.main([*SMALL, "--loop", "6", "6"]) == 2
    assert "--loop takes two different numbers" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_job_is_measured_beside_loops(one_clip, tmp_path, capsys):
    file = tmp_path / "decode.json"
    argv = [*SMALL, "--loop", "1", "6", "--workers", "1", "--json", str(file)]
    assert benchmark.main([*argv, "--folder", str(tmp_path / "clips")]) == 0
    (clip,) = json.loads(file.read_text())["clips"]
    per_second = clip["videos_per_s"]
    assert set(per_second) == {JOB, "loop with decord", "loop with torchcodec"}
    assert per_second[JOB] and per_second["loop with decord"]
    assert f"{JOB}, videos/s" in capsys.readouterr().out.replace("\n", " ")


def test_packets_of_a_long_clip_are_those_of_a_short_one_repeated(monkeypatch, tmp_path):
    monkeypatch.setitem(clips.LONG_CLIPS, "long", clips.Clip("libx264", 96, 64, 25, 12))
    index = probe(str(clips.make_clips(tmp_path, ["long"])["long"]), "mov")
    assert len(index.timestamps) == 600 and len(index.keyframes) >= 50
    assert np.allclose(np.diff(index.timestamps), 1 / clips.FPS)
    frames = np.concatenate(list(PyavDecoder(index).read(np.arange(600))))
    assert np.array_equal(frames[:108], frames[492:])  # 492 frames were encoded
    assert not np.array_equal(frames[:108], frames[108:216])


def test_clips_that_there_are_none_of_are_named(capsys):
    assert benchmark.main(["decode", "--clips", "mpeg1"]) == 2
    assert "h264-720p-10s-g250" in capsys.readouterr().err.replace("\n", "")


def test_the_least_decodes_what_was_asked_for(one_clip, tmp_path):
    path = clips.make_clips(tmp_path, ["h264-small"])["h264-small"]
    index = probe(str(path), sniff(path))
    assert len(index.timestamps) == 48 and len(index.keyframes) == 4
    wanted = index.pts[np.array([0, 13, 40])].tolist()
    assert [frame.pts for frame in needed(str(path), wanted, index.keyframes.tolist())] == wanted


def test_the_best_of_the_rounds_counts_and_what_failed_has_no_figure():
    times = Times("a")
    for seconds in (3.0, 2.0, 4.0):
        times.add(HERE, seconds)
        times.add("torchcodec", None)
    times.ways[FLOOR] = 1.0
    assert (times.over_floor(HERE), times.over_floor("torchcodec")) == (2.0, None)
