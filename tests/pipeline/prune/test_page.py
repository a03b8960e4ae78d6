"""The page of a prune run: its steps, what is under the claim, and how it ends. Nothing here starts Ray."""

import io
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from pipeline.cache.header import HEADER
from pipeline.errors import CacheLocked, IdentityMismatch, RunFailed, UsageError
from pipeline.prune import run
from pipeline.prune.config import PruneConfig
from pipeline.prune.request import Request, check_request
from pipeline.runner.claim import Claim, find_holder
from pipeline.storage.stores import LocalStore, Store
from tests.builders.caches import begin_cache, encoded, random_tokens
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


@pytest.mark.parametrize("refusal", [UsageError("no"), IdentityMismatch("other settings")])
def test_a_refusal_under_the_claim_stays_one_and_writes_nothing(config, console, monkeypatch, refusal):
    monkeypatch.setattr(Request, "select_todo", Mock(side_effect=refusal))
    with pytest.raises(type(refusal), match=str(refusal)):
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
