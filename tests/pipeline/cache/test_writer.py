"""What the driver commits is what lies in its own cache, and stays what it was."""

from dataclasses import replace
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch

from pipeline import TokenCache
from pipeline.cache.writer import PrunedVideo, commit, write_token_shard
from pipeline.storage import lock
from pipeline.storage.lease import CacheLease
from pipeline.storage.stores import LocalStore, ObjectStore
from pipeline.verify import orphans
from tests.pipeline.caches import encoded, random_tokens, write_header
from tests.pipeline.s3 import S3Server
from tests.pipeline.stopping import BEAT, ENDED_BY_THE_LOCK, stopped_driver
from tests.pipeline.verifying import SHAPE, kinds, verified


def test_tokens_on_a_disk_that_is_not_shared_are_not_committed(tmp_path):
    store = write_header(tmp_path / "drivers")
    video = encoded("v", random_tokens(0), 0.25, "gstep")
    written = write_token_shard([video], store=LocalStore(tmp_path / "nodes"), run_id="run")
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


def tiny() -> PrunedVideo:
    return encoded("v", random_tokens(0, SHAPE), 0.25, "gstep")


@pytest.fixture(scope="module")
def server():
    with S3Server("fence") as server:
        yield server


@pytest.fixture
def remote(server, request, monkeypatch) -> ObjectStore:
    """A cache on S3 without videos, whose lease beats fast."""
    monkeypatch.setattr(lock, "CacheLease", partial(CacheLease, heartbeat_s=BEAT))
    return write_header(ObjectStore(server.uri(request.node.name), server.objects()), hidden_size=SHAPE[2])


@pytest.mark.parametrize("place", ["request", "send"])
def test_a_driver_that_was_stopped_shows_no_video_whose_tokens_another_one_removed(server, remote, monkeypatch, place):
    monkeypatch.setattr(orphans, "ORPHAN_AGE", timedelta(0))
    with stopped_driver(remote.root, place, tiny(), server.environment()) as goes_on:
        (removed,) = verified(remote, clean=True).removed  # it takes the lock of the silent one
        assert removed.startswith("tokens/s-")
        code = goes_on()
    assert (TokenCache(remote.root, store=remote).video_ids, kinds(verified(remote))) == ([], [])
    assert code == ENDED_BY_THE_LOCK


def test_what_a_stopped_driver_may_still_commit_is_not_removed(server, remote):
    with stopped_driver(remote.root, "send", tiny(), server.environment()) as goes_on:
        report = verified(remote, clean=True)
        assert report.removed == [] and any("younger than a day" in note for note in report.notes)
        assert goes_on() == ENDED_BY_THE_LOCK
    cache = TokenCache(remote.root, store=remote)
    assert (cache.video_ids, kinds(verified(remote))) == (["v"], [])
    assert len(cache.get("v", verify=True).index) == 9
