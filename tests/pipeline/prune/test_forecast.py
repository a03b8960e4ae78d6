"""The dry run: what a run would do, told without starting or writing anything."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.errors import CacheLocked, UsageError
from pipeline.prune.config import PruneConfig
from pipeline.prune.forecast import Forecast, forecast, render_forecast
from pipeline.prune.resume import Tally
from pipeline.storage.lock import cache_lock
from pipeline.storage.stores import LocalStore


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
    assert (plan.tally, plan.n_todo, plan.n_policy) == (Tally(new=3), 3, 0)
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


def test_videos_that_may_not_be_read_take_no_bytes(folder):
    outside = folder / "outside.mp4"
    outside.write_bytes(b"x")
    (folder / "videos" / "link.mp4").symlink_to(outside)
    plan = told(folder)
    assert (plan.n_todo, plan.n_policy) == (4, 1)
    assert f"{3 * plan.video_bytes:,} in all" in shown(plan)
    assert "1 of the 4 may not be read" in shown(plan)


def test_the_identity_is_shown_leaf_by_leaf(folder):
    said = shown(told(folder, pruner_param=["alpha=0.25"]))
    assert "pruner.method gstep" in said and "pruner.params.alpha 0.25" in said and "dtype.compute float32" in said


def test_what_a_run_would_refuse_is_refused(folder):
    (folder / "c").mkdir()
    with cache_lock(LocalStore(folder / "c"), "r9", print), pytest.raises(CacheLocked, match="r9"):
        told(folder)
    (folder / "file").write_text("x")
    with pytest.raises(UsageError, match=rf"{folder}/file/c: nothing can be written here: .*file is no folder"):
        told(folder, out=str(folder / "file" / "c"))


@pytest.mark.skipif(os.geteuid() == 0, reason="who may do anything is refused nothing")
def test_a_folder_that_takes_nothing_is_refused(folder):
    (folder / "closed").mkdir(mode=0o555)
    with pytest.raises(UsageError, match="is not writable"):
        told(folder, out=str(folder / "closed" / "c"))
