"""The dry run: what a run would do, told without starting or writing anything."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.prune.config import PruneConfig
from pipeline.prune.forecast import Forecast, forecast, render_forecast
from pipeline.prune.resume import Tally
from tests.pipeline.inputs.test_manifest import write_jsonl


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "videos").mkdir()
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        (tmp_path / "videos" / name).write_bytes(b"never opened")
    return tmp_path


def config_of(folder: Path, **options) -> PruneConfig:
    options = {"videos": str(folder / "videos"), "out": str(folder / "c"), "model": "tiny", "num_frames": 4, **options}
    return PruneConfig(dtype="float32", **options)


def told(folder: Path, **options) -> Forecast:
    return forecast(config_of(folder, **options), Console(quiet=True))


def shown(plan: Forecast) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(render_forecast(plan))
    return " ".join(text.getvalue().split())


def test_a_forecast_counts_and_writes_nothing(folder):
    plan = told(folder)
    assert (plan.tally, plan.n_todo, plan.doomed) == (Tally(new=3), 3, {})
    assert plan.first_ids == ["a.mp4", "b.mp4", "c.mp4"] and plan.out == str(folder / "c")
    n_frames, per_frame = plan.grid
    assert n_frames == 4 and plan.one_size and plan.kept == round(0.25 * n_frames * per_frame)
    assert plan.video_bytes == plan.kept * 64 * 2
    assert not (folder / "c").exists()


def test_a_limit_leaves_the_rest_waiting(folder):
    plan = told(folder, limit=1)
    assert (plan.n_todo, plan.first_ids) == (1, ["a.mp4"])
    said = shown(plan)
    assert "dry run: nothing was started or written" in said
    assert "1 to do, 2 more wait (--limit), 0 done" in said and f"{plan.video_bytes:,} in all" in said


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
        f"2 of the 8 are not there, seen from this machine (io), e.g. gone 1: {folder}/videos/gone.mp4",
        "4 of the 8 have a clip that starts before 0 or ends before it starts (unsupported), e.g. back: from 4 s to",
    ):
        assert line in said, said


def test_a_forecast_is_json_able(folder):
    record = json.loads(json.dumps(told(folder, limit=1).as_record()))
    assert record["tally"] == {"new": 3, "retried": 0, "redone": 0, "done": 0, "failed": 0}
    assert (record["n_todo"], record["first_ids"], record["identity"]["retention_ratio"]) == (1, ["a.mp4"], 0.25)
