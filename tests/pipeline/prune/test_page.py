"""The page of a prune run, from the command and from Python: its steps, refusals and end. Nothing here starts Ray."""

import io
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray
import torch
from rich.console import Console

import pipeline
from pipeline.cache.header import HEADER
from pipeline.errors import (
    CacheLocked,
    IdentityMismatch,
    ManifestError,
    RunFailed,
    TooManyFailed,
    UsageError,
    VideoFault,
)
from pipeline.prune import run
from pipeline.prune.committed import CommittedVideos
from pipeline.prune.config import PruneConfig
from pipeline.prune.facts import Facts
from pipeline.prune.request import Request, check_request
from pipeline.prune.run import make_summary
from pipeline.runner.claim import Claim, find_holder
from pipeline.storage.stores import LocalStore, Store
from tests.builders.caches import begin_cache, encoded, encoded_failure, random_tokens
from tests.builders.clips import write_clip


@pytest.fixture
def config(tmp_path) -> PruneConfig:
    """A request for a clip."""
    (tmp_path / "videos").mkdir()
    write_clip(tmp_path / "videos" / "a.mp4", count=2)
    return PruneConfig(videos=[str(tmp_path / "videos")], out=str(tmp_path / "c"), num_frames=4)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=400)


def fill(config: PruneConfig) -> Store:
    """Write the row of the clip, so that nothing is left to do."""
    request = check_request(config, Console(quiet=True))
    uri = request.videos.known["uri"][0].as_py()
    return begin_cache(request, encoded("a.mp4", random_tokens(0, (4, 196, 64)), 0.25, "gstep", uri=uri))


def test_a_run_with_nothing_to_do_looks_at_its_device_under_the_claim_and_leaves_no_record(
    config, console, monkeypatch
):
    store, holders = fill(config), []
    monkeypatch.setattr(run, "check_device", lambda config, say: holders.append(find_holder(store)))
    monkeypatch.setattr(run, "process_videos", None)  # it is not called
    summary = run.prune(config, console)
    assert (summary.n_ok, summary.n_new, summary.out) == (1, 0, config.out)
    assert holders[0] is not None and find_holder(store) is None and store.names("runs", ".json") == []
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("configuration: ") and "1 of 1 videos" in lines[1]


@pytest.mark.parametrize(
    ("owner", "step"),
    [(run, "check_request"), (Request, "select_todo"), (run, "process_videos"), (run, "make_summary")],
)
def test_a_store_that_fails_at_any_step_ends_the_run_and_frees_the_place(config, console, monkeypatch, owner, step):
    store, holders = LocalStore(config.out), []

    def fail(*args: object, **keywords: object) -> None:
        holders.append(Path(config.out).exists() and find_holder(store))
        raise OSError(28, "No space left on device")

    if step == "make_summary":
        fill(config)
    monkeypatch.setattr(owner, step, fail)
    with pytest.raises(RunFailed, match=r"OSError: .*No space left") as caught:
        run.prune(config, console)
    assert isinstance(caught.value.__cause__, OSError)
    assert [*map(bool, holders)] == [step != "check_request"]  # all later steps are under the claim
    assert step == "check_request" or find_holder(store) is None


def test_a_refusal_under_the_claim_stays_one_and_writes_nothing(config, console, monkeypatch):
    monkeypatch.setattr(Request, "select_todo", Mock(side_effect=UsageError("no")))
    with pytest.raises(UsageError, match="no"):
        run.prune(config, console)
    store = LocalStore(config.out)
    assert find_holder(store) is None and not store.exists(HEADER) and store.names("videos", ".parquet") == []


def test_a_place_that_another_run_holds_is_not_touched(config, console):
    store = fill(config)
    before = sorted(path for path in store.root.rglob("*") if path.is_file())
    with Claim(store, "other", print), pytest.raises(CacheLocked, match="other"):
        run.prune(config, console)
    assert sorted(path for path in store.root.rglob("*") if path.is_file()) == before


def test_what_the_cache_is_under_the_claim_counts(config, console, monkeypatch):
    """Another run may have made the cache between the check and the claim."""
    check = run.check_request
    with monkeypatch.context() as patch:
        patch.setattr(run, "check_request", lambda *given: [check(*given), fill(config)][0])
        assert run.prune(config, console).n_ok == 1
    with pytest.raises(IdentityMismatch):
        run.prune(replace(config, num_frames=2), console)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch, tmp_path):
    monkeypatch.setattr(ray, "init", Mock(side_effect=AssertionError("Ray was started")))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def clips(tmp_path):
    """Two clips whose rows the cache ``c`` holds: one is ok, one failed."""
    paths = [write_clip(tmp_path / name, count=2) for name in ("a.mp4", "b.mp4")]
    request = check_request(PruneConfig(out="c", num_frames=4), Console(quiet=True), paths)
    good = encoded("a.mp4", random_tokens(0, (4, 196, 64)), 0.25, "gstep", uri=str(paths[0]))
    begin_cache(request, good, encoded_failure("b.mp4", VideoFault("corrupt", "cut"), uri=str(paths[1])))
    return paths


def test_what_is_there_is_a_summary_that_names_the_failed_and_prints_as_a_table(clips):
    told = []
    summary = pipeline.prune_videos(clips, out="c", num_frames=4, progress=told.append)
    assert isinstance(summary, pipeline.Summary)
    assert (summary.n_videos, summary.n_ok, summary.n_new) == (2, 1, 0)
    assert (summary.failed, summary.failures, summary.out) == ({"b.mp4": "corrupt"}, {"corrupt": 1}, "c")
    assert str(summary).startswith("videos    1 ok, 1 failed, 0 without a row\n") and "b.mp4: cut" in str(summary)
    assert any("2 of 2 videos" in one.note for one in told)
    assert "nothing to do: every video has a row already" in str(summary)
    rows = [{"video_id": path.name, "uri": str(path)} for path in clips]
    assert pipeline.prune_videos(rows[:1], out="c", num_frames=4, progress=False).failed == {}


def test_a_ratio_that_the_method_does_not_keep_is_a_note():
    for ratio, notes in ((0.5, ["note: --pruner none keeps 1 of the tokens, not 0.5"]), (0.25, []), (1.0, [])):
        console = Console(file=io.StringIO(), width=200)
        check_request(PruneConfig(out="new", pruner="none", retention_ratio=ratio), console)
        assert console.file.getvalue().splitlines() == notes


def test_a_limit_of_hours_in_the_second_pass_counts_a_video_once(clips):
    request = check_request(PruneConfig(out="c", num_frames=4, retry_failed=True), Console(quiet=True), clips)
    table, todo = request.select_todo("r")
    facts = Facts(1.0, videos=2, limit_reached="--max-hours 1 is reached")  # b.mp4 has been tried twice
    done = CommittedVideos(table, Mock(), Mock(), facts)
    assert make_summary(request, table, todo, done, 1.0).n_new == len(todo) == 1


def test_more_failures_than_may_be_are_an_error_that_has_the_summary(clips):
    with pytest.raises(TooManyFailed, match=r"1 of 1 videos failed \(1 corrupt\), e\.g\. b\.mp4: cut") as caught:
        pipeline.prune_videos(clips[1:], out="c", num_frames=4, progress=False)
    assert caught.value.summary.failed == {"b.mp4": "corrupt"}
    with pytest.raises(pipeline.RunFailed):
        pipeline.prune_videos(clips, out="c", num_frames=4, max_failed=0, progress=False)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error_with_nothing_left_to_do_too(clips, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # whatever runs on this machine
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UsageError, match="--device cuda: this machine has no GPU"):
        pipeline.prune_videos(clips, out="c", num_frames=4, device="cuda", progress=False)


@pytest.mark.parametrize(
    ("videos", "options", "error", "said"),
    [
        ("gone", {}, ManifestError, "gone: no such folder"),
        ([], {}, ManifestError, "the list is empty"),
        ("gone", {"retention_ration": 1}, UsageError, r"prune_videos\(\): .*did you mean retention_ratio\?"),
        (["a.mp4"], {"num_frames": 4, "model": "tiny-qwen3-vl"}, UsageError, "made with other settings"),
        (["a.mp4"], {"clips_from": "from,to"}, UsageError, "rows have start_s and end_s"),
        (["t.parquet"], {"column": "video"}, UsageError, "column is for .parquet, .arrow and .feather files"),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_started(clips, videos, options, error, said):
    with pytest.raises(error, match=said):
        pipeline.prune_videos(videos, out="c", progress=False, **options)
