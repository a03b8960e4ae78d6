"""Small token shards are joined: the same tokens, whatever stops it, and no run beside it."""

from datetime import timedelta

import pytest
import torch

from pipeline import TokenCache
from pipeline.errors import CorruptShard, VideoFault
from pipeline.rewrite.compact import join_tokens
from pipeline.runner.claim import CacheLocked, Claim
from tests.builders.caches import encoded_failure, write_header, write_shard
from tests.pipeline.damage import flip, say_what_was_committed, shards, stop_at_each_change
from tests.pipeline.verifying import NOW, assert_tokens, tokens_of, verified, video_of


@pytest.fixture
def store(tmp_path):
    store = write_header(tmp_path / "c", hidden_size=8)
    for seed, name in enumerate("abcdefg"):
        write_shard(store, f"run{seed}", video_of(name, seed))
    write_shard(store, "run8", encoded_failure("bad", VideoFault("corrupt", "cut off")))
    write_shard(store, "run9", video_of("a", 9, attempts=2))  # replaces the first
    say_what_was_committed(store)
    return store


def join(store, keep=NOW, *size):
    return join_tokens(store, lambda line: None, keep, *size)


def assert_same(store, before):
    assert_tokens(store.root, before)
    assert TokenCache(store.root).failed == {"bad": "corrupt"}


def test_all_become_one_and_the_old_ones_go_when_readers_had_time(store):
    before, reader = tokens_of(store.root), TokenCache(store.root)
    done = join(store, timedelta(hours=1))
    assert (done.videos, len(done.read), len(done.written), done.deleted) == (7, 7, 1, [])
    assert_same(store, before)
    assert all(torch.equal(reader.get(name, order="selection").tokens, before[name]) for name in before)
    assert len(shards(store)) == 9  # seven old ones, the new one, and that of the first "a"
    again = join(store)
    assert (again.run_id, again.read, len(again.deleted)) == ("", [], 7)
    assert_same(store, before)
    assert len(shards(store)) == 2


def test_large_ones_stay_and_bundles_are_of_the_size(store):
    before, size = tokens_of(store.root), 3 * min(file.stat().st_size for file in shards(store)) - 1
    done = join(store, NOW, size)
    assert (len(done.read), len(done.written)) == (6, 2)  # the seventh has none to join
    assert_same(store, before)
    assert join(store, NOW, 2).read == []


def test_what_is_damaged_or_written_to_is_left_as_it_was(store):
    before, file = tokens_of(store.root), shards(store)[2]
    flip(file, 100)
    with pytest.raises(CorruptShard, match=file.name):
        join(store)
    flip(file, 100)
    assert_same(store, before)
    with Claim(store, "other", print), pytest.raises(CacheLocked):
        join(store)


def test_the_same_command_ends_what_was_stopped_anywhere(store):
    """It stops before each change of the store once; the tokens are the same after each stop."""
    before, size = tokens_of(store.root), 3 * min(file.stat().st_size for file in shards(store)) - 1
    for _ in stop_at_each_change(lambda s: join(s, NOW, size), lambda _: store.root, spared=r".*\.running"):
        assert_same(store, before)
    for _ in range(2):
        join(store, NOW, size)
    assert_same(store, before)
    verified(store, clean=True)
    assert len(shards(store)) <= 4
