"""What the driver commits is what lies in its own cache, and stays what it was."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline import TokenCache
from pipeline.cache.writer import commit, write_token_shard
from pipeline.errors import RunFailed
from pipeline.storage.stores import LocalStore
from tests.pipeline.caches import encoded, random_tokens, write_header


def test_tokens_on_a_disk_that_is_not_shared_are_not_committed(tmp_path):
    store = write_header(tmp_path / "drivers")
    video = encoded("v", random_tokens(0), 0.25, "gstep")
    written = write_token_shard([video], store=write_header(tmp_path / "nodes"), run_id="run")
    with pytest.raises(FileNotFoundError, match="must be shared by all"):
        commit(store, "run", 0, written)
    assert len(TokenCache(tmp_path / "drivers")) == 0


@pytest.mark.parametrize("method", ["gstep", "random", "uniform"])
def test_a_late_write_with_another_last_bit_replaces_nothing(tmp_path, method):
    """A node that was taken for dead computed the same videos on another kind of GPU, and its write comes last."""
    store = write_header(tmp_path, method=method)
    video = encoded("v", random_tokens(0), 0.25, method)
    commit(store, "run", 0, write_token_shard([video], store=store, run_id="run"))
    before = TokenCache(tmp_path).get("v", order="selection")
    assert video.kept is not None
    other = replace(video.kept, tokens=video.kept.tokens ^ np.int16(1))
    if other.density is not None:
        other = replace(other, density=np.nextafter(other.density, np.float32(np.inf)))
    (late,) = write_token_shard([replace(video, kept=other)], store=store, run_id="run")
    after = TokenCache(tmp_path).get("v", order="selection", verify=True)
    assert np.array_equal(after.tokens.view(torch.int16).numpy(), before.tokens.view(torch.int16).numpy())
    assert late["token_shard"] != after.metadata["token_shard"] and len(store.names("tokens", ".parquet")) == 2


def test_a_driver_that_was_stopped_in_its_commit_shows_no_video_whose_tokens_were_removed(tmp_path):
    """It goes on when nothing names its tokens any more: before it looks for them, or after it has put the rows."""
    store = write_header(tmp_path)
    video = encoded("v", random_tokens(0), 0.25, "gstep")
    rows = write_token_shard([video], store=store, run_id="run")

    class Stopped(LocalStore):
        def put(self, name, data) -> None:
            store.delete(rows[0]["token_shard"])
            super().put(name, data)

    with pytest.raises(RunFailed, match="was removed before its videos were committed"):
        commit(Stopped(tmp_path), "run", 0, rows)
    with pytest.raises(FileNotFoundError, match="removed meanwhile"):
        commit(store, "run", 0, rows)
    assert store.names("videos", ".parquet") == [] and len(TokenCache(tmp_path)) == 0


def test_a_commit_never_makes_a_cache_that_is_gone(tmp_path):
    store = write_header(tmp_path / "c")
    rows = write_token_shard([encoded("v", random_tokens(0), 0.25, "gstep")], store=store, run_id="run")
    (tmp_path / "c").rename(tmp_path / "old")
    with pytest.raises(FileNotFoundError):
        commit(store, "run", 0, rows)
    with pytest.raises(FileNotFoundError):
        store.put("videos/x.parquet", b"x")
    assert not (tmp_path / "c").exists()
