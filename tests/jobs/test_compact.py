"""``python -m jobs.compact``, in this process: what it says and how it ends."""

from __future__ import annotations

import pytest

from jobs import compact, inspect
from pipeline import TokenCache
from pipeline.cache.index.files import INDEX, ROOT
from pipeline.storage.lock import cache_lock
from pipeline.storage.stores import LocalStore
from tests.pipeline.caches import encoded, make_cache, random_tokens, write_shard


@pytest.fixture
def store(tmp_path):
    return make_cache(tmp_path / "cache", {"a": random_tokens(0), "b": random_tokens(1)})


def test_it_makes_the_index_and_says_what_it_covers(store, capsys):
    assert compact.main([str(store.root)]) == 0
    assert "2 videos (0 failed) in 1 videos shards, 1 of them new to the index" in capsys.readouterr().err
    write_shard(store, "s", encoded("c", random_tokens(2), 0.25, "gstep"))
    assert compact.main([str(store.root)]) == 0
    assert "3 videos (0 failed) in 2 videos shards, 1 of them new to the index" in capsys.readouterr().err
    assert TokenCache(store.root).video_ids == ["a", "b", "c"]
    assert inspect.main([str(store.root)]) == 0
    assert "2 videos shards, and 0 newer ones" in capsys.readouterr().out


def test_what_is_damaged_is_made_anew(store, capsys):
    assert compact.main([str(store.root)]) == 0
    (store.root / ROOT).write_text("{")
    assert compact.main([str(store.root), "--rebuild"]) == 0
    (store.root / ROOT).write_text("{")
    assert compact.main([str(store.root)]) == 0
    assert "made anew" in capsys.readouterr().err
    assert TokenCache(store.root).video_ids == ["a", "b"]


def test_it_waits_for_no_run_and_refuses_what_is_no_cache(store, tmp_path, capsys):
    with cache_lock(store, "other", print):
        assert compact.main([str(store.root)]) == 2
    assert "another run writes here" in capsys.readouterr().err
    assert compact.main([str(tmp_path / "nothing")]) == 2
    assert "not a pruned-token cache" in capsys.readouterr().err
    assert not LocalStore(tmp_path / "nothing").root.exists()


def test_a_damaged_videos_shard_ends_it_and_leaves_no_index(store, capsys):
    (name,) = store.names("videos", ".parquet")
    (store.root / name).write_bytes(b"PAR1")
    assert compact.main([str(store.root)]) == 1
    assert name in capsys.readouterr().err
    assert not store.exists(ROOT) and not store.listed(INDEX)
