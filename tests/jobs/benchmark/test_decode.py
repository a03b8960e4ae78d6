"""The benchmark of decoding, on clips that are made for it here; nothing here asserts a time."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jobs import prune
from jobs.benchmark import __main__ as benchmark
from jobs.benchmark import decode
from jobs.benchmark.decode import FLOOR, IN_CHILD, IN_PROCESS, JOB, decode_needed_frames
from pipeline.video.containers import sniff
from pipeline.video.decoders import PyavDecoder
from pipeline.video.probe import probe

SMALL = ("decode", "--clips", "small", "--frames", "4", "--repeats", "2", "--json")


@pytest.fixture
def one_clip(monkeypatch):
    monkeypatch.setitem(decode.CLIPS, "h264-small", decode.Clip("libx264", 192, 128, 2, 12))


def test_all_ways_of_decoding_are_measured_beside_the_least(one_clip, tmp_path, capsys):
    argv = [*SMALL, "--folder", str(tmp_path / "clips")]
    assert benchmark.main(argv) == 0
    shown = capsys.readouterr()
    (clip,) = json.loads(shown.out)["clips"]
    assert clip["clip"] == "h264-small" and clip["bytes"] == 4 * 384 * 384 * 3
    measured = {way for way, seconds in clip["cpu_s"].items() if seconds is not None}
    assert measured >= {FLOOR, IN_PROCESS, IN_CHILD, "decord", "indexed", "ours, within 5 s of keyframes"}
    assert all(clip["cpu_s"][way] > 0 for way in measured)
    assert f"{IN_PROCESS} / {FLOOR}" in shown.err.replace("\n", " ")
    (made,) = (tmp_path / "clips").iterdir()
    stamp = made.stat().st_mtime_ns
    path = decode.make_clips(tmp_path / "clips", ["h264-small"])["h264-small"]
    assert path == made and made.stat().st_mtime_ns == stamp  # kept, and not made again
    index = probe(str(path), sniff(path))
    assert len(index.timestamps) == 48 and len(index.keyframes) == 4
    wanted = index.pts[np.array([0, 13, 40])].tolist()
    assert [frame.pts for frame in decode_needed_frames(str(path), wanted, index.keyframes.tolist())] == wanted


@pytest.mark.slow
def test_the_whole_job_is_measured_beside_loops(one_ray, one_clip, capsys, monkeypatch):
    """The job runs in this process, on the Ray that it has joined."""
    monkeypatch.setattr(decode, "subprocess", SimpleNamespace(run=lambda command, **_: prune.main(command[3:])))
    assert benchmark.main([*SMALL, "--loop", "1", "6", "--workers", "1", "--repeats", "1"]) == 0
    (clip,) = json.loads(capsys.readouterr().out)["clips"]
    per_second = clip["videos_per_s"]
    assert set(per_second) == {JOB, "loop with decord", "loop with torchcodec"}
    assert per_second[JOB] and per_second["loop with decord"]


def test_packets_of_a_long_clip_are_those_of_a_short_one_repeated(monkeypatch, tmp_path):
    monkeypatch.setitem(decode.LONG_CLIPS, "long", decode.Clip("libx264", 96, 64, 25, 12))
    index = probe(str(decode.make_clips(tmp_path, ["long"])["long"]), "mov")
    assert len(index.timestamps) == 600 and len(index.keyframes) >= 50
    assert np.allclose(np.diff(index.timestamps), 1 / decode.FPS)
    frames = np.concatenate(list(PyavDecoder(index).read(np.arange(600))))
    assert np.array_equal(frames[:108], frames[492:])  # 492 frames were encoded
    assert not np.array_equal(frames[:108], frames[108:216])
