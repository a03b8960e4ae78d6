"""The benchmark of decoding, on clips that are made for it here; nothing here asserts a time."""

import json
import sys

import numpy as np

from jobs.benchmark import __main__ as benchmark
from jobs.benchmark.decode import CLIPS, FLOOR, IN_CHILD, IN_PROCESS, Clip, decode_needed_frames, make_clip
from pipeline.video.containers import sniff
from pipeline.video.probe import probe

NAME = "h264-144p-2s-g12"


def test_all_ways_of_decoding_are_measured_beside_the_least(tmp_path, capsys):
    argv = ["decode", "--clips", NAME, "--frames", "4", "--repeats", "2", "--folder", str(tmp_path / "clips")]
    assert benchmark.main([*argv, "--json"]) == 0
    shown = capsys.readouterr()
    (clip,) = json.loads(shown.out)["clips"]
    assert clip["clip"] == NAME and clip["bytes"] == 4 * 384 * 384 * 3
    measured = {way for way, seconds in clip["cpu_s"].items() if seconds is not None}
    assert measured >= {FLOOR, IN_PROCESS, IN_CHILD, "decord", "indexed", "ours, within 5 s of keyframes"}
    assert all(clip["cpu_s"][way] > 0 for way in measured)
    assert f"{IN_PROCESS} / {FLOOR}" in shown.err.replace("\n", " ")
    (made,) = (tmp_path / "clips").iterdir()
    stamp = made.stat().st_mtime_ns
    path = make_clip(tmp_path / "clips", Clip.parse(NAME))
    assert path == made and made.stat().st_mtime_ns == stamp  # kept, and not made again
    index = probe(str(path), sniff(path))
    assert len(index.timestamps) == 48 and len(index.keyframes) == 4 and (index.width, index.height) == (256, 144)
    wanted = index.pts[np.array([0, 13, 40])].tolist()
    assert [frame.pts for frame in decode_needed_frames(str(path), wanted, index.keyframes.tolist())] == wanted


def test_a_library_that_cannot_decode_a_clip_has_no_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "decord", None)
    argv = ["decode", "--clips", NAME, "--frames", "2", "--repeats", "1", "--folder", str(tmp_path)]
    assert benchmark.main([*argv, "--json"]) == 0
    shown = capsys.readouterr()
    (clip,) = json.loads(shown.out)["clips"]
    assert clip["cpu_s"]["decord"] is None and f"decord / {FLOOR}" in shown.err


def test_a_clip_is_its_name():
    assert [Clip.parse(str(clip)) for clip in CLIPS] == CLIPS
