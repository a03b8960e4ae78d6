"""A run says which videos a limit of frames changed: in its summary and in its record, and a rerun says it again."""

import json

import pytest

import pipeline
from jobs import prune
from tests.builders.clips import write_clip
from tests.builders.runs import document_of, run_here

pytestmark = pytest.mark.slow

CAPPED = (
    "frames 1 video was capped at 6 frames (lowest rate 0.3 frames per second, of long.mp4); --max-frames raises it"
)
FILLED = "frames 1 short video got more frames than --fps 1 gives, since this model takes at least 4"


@pytest.mark.parametrize(("model", "n_filled"), [("tiny", 0), ("tiny-qwen3-vl", 1)])
def test_capped_and_filled_videos_are_in_the_summary_and_in_the_record(one_ray, tmp_path, monkeypatch, model, n_filled):
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "videos").mkdir()
    write_clip(tmp_path / "videos/long.mp4", count=100, fps=5)
    write_clip(tmp_path / "videos/half.mp4", count=12, fps=24)
    (tmp_path / "videos/notes.txt").write_text("no video")
    argv = [str(tmp_path / "videos"), "--out", str(tmp_path / "c"), "--model", model, "--fps", "1", "--max-frames", "6"]
    said = " ".join(run_here(prune, argv).stdout.split())
    assert said.count(CAPPED) == 1 and said.count(FILLED) == n_filled
    assert f"left out 1 other file ({tmp_path}/videos/notes.txt)" in said
    (file,) = (tmp_path / "c/runs").glob("*.json")
    limits = json.loads(file.read_text())["summary"]["frame_limits"]
    assert (limits["n_capped"], limits["lowest_fps"], limits["longest"]) == (1, pytest.approx(0.3), "long.mp4")
    assert (limits["n_filled"], limits["filled"]) == (n_filled, ["half.mp4"] * n_filled)
    code, document, _ = document_of(prune, argv)
    assert code == 0 and document["n_new"] == 0 and document["frame_limits"] == limits


def test_a_run_without_a_capped_video_says_nothing_of_it(one_ray, tmp_path):
    write_clip(tmp_path / "a.mp4", count=10)
    for name, options in (("rate", {"fps": 1.0}), ("number", {"num_frames": 2})):
        summary = pipeline.prune_videos(tmp_path / "a.mp4", out=tmp_path / name, progress=False, **options)
        assert "frames " not in str(summary) and summary.n_ok == 1
        assert (summary.frame_limits is None) == ("num_frames" in options)
