"""Small token shards are joined: the same tokens, whatever stops it, and no run beside it."""

from datetime import timedelta

import pytest
import torch

from pipeline import TokenCache
from pipeline.errors import CorruptShard, VideoFault
from pipeline.runner.claim import CacheLocked, Claim
from pipeline.verify.moves import join_tokens
from tests.pipeline.caches import encoded, encoded_failure, random_tokens, write_header, write_shard
from tests.pipeline.damage import Dying, flip, say_what_was_committed, shards
from tests.pipeline.verifying import SHAPE, kinds, verified

NOW, LATER = timedelta(0), timedelta(hours=1)
NAMES = tuple("abcdefg")


@pytest.fixture
def store(tmp_path):
    store = write_header(tmp_path / "c", hidden_size=8)
    for number, name in enumerate(NAMES):
        write_shard(store, f"run{number}", encoded(name, random_tokens(number, SHAPE), 0.25, "gstep"))
    write_shard(store, "run8", encoded_failure("bad", VideoFault("corrupt", "cut off")))
    write_shard(store, "run9", encoded("a", random_tokens(9, SHAPE), 0.25, "gstep", attempts=2))  # replaces the first
    say_what_was_committed(store)
    return store


def quiet(_):
    """Take what the user would be told."""


def tokens(store):
    cache = TokenCache(store.root)
    return {video_id: cache.get(video_id).tokens for video_id in cache.video_ids}


def assert_same(store, before):
    now = tokens(store)
    assert now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)
    assert TokenCache(store.root).failed == {"bad": "corrupt"} and kinds(verified(store)) == []


def size_of(store, n):
    """A size of shards that n of these small ones make."""
    return n * min(file.stat().st_size for file in shards(store)) - 1


def test_all_become_one_and_the_old_ones_go_when_readers_had_time(store):
    before, reader = tokens(store), TokenCache(store.root)
    done = join_tokens(store, quiet, LATER)
    assert (done.videos, len(done.read), len(done.written), done.deleted) == (7, 7, 1, [])
    assert_same(store, before)
    assert all(torch.equal(reader.get(name).tokens, before[name]) for name in NAMES)
    assert len(shards(store)) == 9  # seven old ones, the new one, and that of the first "a"
    again = join_tokens(store, quiet, NOW)
    assert (again.run_id, again.read, len(again.deleted)) == ("", [], 7)
    assert_same(store, before)
    assert len(shards(store)) == 2


def test_large_ones_stay_and_bundles_are_of_the_size(store):
    before = tokens(store)
    done = join_tokens(store, quiet, NOW, size_of(store, 3))
    assert (len(done.read), len(done.written)) == (6, 2)  # the seventh has none to join
    assert_same(store, before)
    assert join_tokens(store, quiet, NOW, 2).read == []


def test_a_damaged_shard_is_named_and_costs_nothing(store):
    before = tokens(store)
    file = shards(store)[2]
    flip(file, 100)
    with pytest.raises(CorruptShard, match=file.name):
        join_tokens(store, quiet, NOW)
    flip(file, 100)
    assert_same(store, before)


def test_a_run_that_writes_is_not_disturbed(store):
    with Claim(store, "other", quiet), pytest.raises(CacheLocked):
        join_tokens(store, quiet, NOW)


def test_the_same_command_ends_what_was_stopped_anywhere(store):
    """It stops before each change of the store once; the tokens are the same after each stop."""
    before = tokens(store)
    for allowed in range(100):
        stopped = Dying(store.root, spared=r".*\.running")
        stopped.left = allowed
        try:
            join_tokens(stopped, quiet, NOW, size_of(store, 3))
        except KeyboardInterrupt:
            assert_same(store, before)
        else:
            break
    assert allowed > 5
    join_tokens(store, quiet, NOW, size_of(store, 3))
    join_tokens(store, quiet, NOW, size_of(store, 3))
    assert_same(store, before)
    verified(store, clean=True, keep=NOW)
    assert len(shards(store)) <= 4
