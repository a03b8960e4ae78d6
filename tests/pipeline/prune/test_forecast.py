"""The dry run: what a run would do, told without starting or writing anything."""

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.prune.config import PruneConfig
from pipeline.prune.forecast import Forecast, make_forecast, render_forecast
from tests.pipeline.inputs.test_manifest import write_jsonl


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "videos").mkdir()
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        (tmp_path / "videos" / name).write_bytes(b"never opened")
    return tmp_path


def make_config(folder: Path, **options) -> PruneConfig:
    options = {"videos": str(folder / "videos"), "out": str(folder / "c"), "model": "tiny", "num_frames": 4, **options}
    return PruneConfig(dtype="float32", **options)


def told(folder: Path, **options) -> Forecast:
    return make_forecast(make_config(folder, **options), Console(quiet=True))


def shown(plan: Forecast) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(render_forecast(plan))
    return " ".join(text.getvalue().split())


def test_videos_that_are_known_to_fail_are_told_and_take_no_bytes(folder):
    (folder / "outside.mp4").write_bytes(b"x")
    (folder / "videos" / "link.mp4").symlink_to(folder / "outside.mp4")
    rows = [
        {"video_id": "good", "uri": "a.mp4", "start_s": 1, "end_s": 2},
        {"video_id": "link", "uri": "link.mp4"},
        {"video_id": "gone 1", "uri": "gone.mp4"},
        {"video_id": "gone 2", "uri": "gone.mp4", "start_s": 1},
        {"video_id": "back", "uri": "a.mp4", "start_s": 4, "end_s": 2.5},
        {"video_id": "empty", "uri": "a.mp4", "start_s": 4, "end_s": 4},
        {"video_id": "zero", "uri": "a.mp4", "end_s": 0},
        {"video_id": "early", "uri": "a.mp4", "start_s": -1},
    ]
    write_jsonl(folder / "videos" / "m.jsonl", rows)
    plan = told(folder, videos=str(folder / "videos" / "m.jsonl"), on_forbidden="record")
    assert plan.n_todo == 8 and [found.n for found in plan.doomed.values()] == [1, 2, 4]
    said = shown(plan)
    assert f"about {plan.video_bytes:,} a video, {plan.video_bytes:,} in all" in said
    for line in (
        "1 of the 8 may not be read (policy), e.g. link: the path resolves outside",
        f"2 of the 8 do not exist on this machine (io), e.g. gone 1: {folder}/videos/gone.mp4",
        "4 of the 8 have a clip that starts before 0 or ends before it starts (unsupported), e.g. back: from 4 s to",
    ):
        assert line in said, said


def test_a_size_that_the_model_refuses_is_no_planned_size(folder):
    plan = told(folder, model="tiny-qwen3-vl", family="generic", num_frames=None, fps=4.0, max_frames=768)
    said = shown(plan)
    assert f"{math.prod(plan.grid)} tokens, about {plan.kept} kept, in 854x480 and of full length" in said
    assert f"kept in {plan.minute[2]:,} bytes, in 1280x720" in said and "in full HD" not in said
    assert "full HD videos of full length become rows of class unsupported: 768 frames of 1920x1080 pixels are" in said
    assert "preprocessing.processor.video_preprocessor_config.json 9 settings (--json lists them)" in said
    whole = told(folder, model="tiny-qwen3-vl", family="generic", num_frames=32)
    assert (whole.size, whole.minute_size, whole.refusal) == ("full HD", "full HD", None)
    assert "class unsupported" not in shown(whole)
