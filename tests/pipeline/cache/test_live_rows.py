"""Which row of a video counts, and that no damaged shard is read."""

import pytest

from pipeline import CorruptShard, TokenCache
from pipeline.errors import VideoFault
from tests.pipeline.caches import encoded, encoded_failure, make_cache, random_tokens, write_header, write_shard


def test_the_live_row_is_ok_before_failed_then_most_attempts(tmp_path):
    store = write_header(tmp_path)
    tokens = [random_tokens(i) for i in range(3)]
    write_shard(store, "r1", encoded("a", tokens[0], 0.25, "gstep", attempts=2))
    write_shard(store, "r2", encoded("a", tokens[1], 0.25, "gstep", attempts=3))
    write_shard(store, "r3", encoded_failure("a", VideoFault("crash", "x"), attempts=9))
    write_shard(store, "r4", encoded_failure("b", VideoFault("crash", "old"), attempts=1))
    write_shard(store, "r5", encoded_failure("b", VideoFault("timeout", "new"), attempts=2))
    write_shard(store, "r6", encoded("c", tokens[2], 0.25, "gstep", attempts=1))
    write_shard(store, "r7", encoded("c", tokens[0], 0.25, "gstep", attempts=1))
    cache = TokenCache(tmp_path)
    assert cache.metadata("a")["run_id"] == "r2"
    assert cache.metadata("c")["run_id"] == "r6"
    assert cache.failed == {"b": "timeout"}


def test_a_damaged_videos_shard_raises(tmp_path):
    store = make_cache(tmp_path, {"v": random_tokens(0)})
    (name,) = store.names("videos", ".parquet")
    data = bytearray(store.read(name))
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorruptShard, match="hash in its name"):
        TokenCache(tmp_path)
