"""Removal: the video is gone for every reader and for ever, its neighbours stay, and any interruption is ended."""

import shutil
from datetime import timedelta
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from pipeline import TokenCache
from pipeline.cache.header import made_with
from pipeline.cache.merging import merge
from pipeline.errors import CacheLocked, NotACache, RemovedVideo, VideoFault
from pipeline.runner.claim import Claim
from pipeline.storage.stores import LocalStore
from pipeline.verify.moves import remove_videos
from tests.pipeline.caches import encoded, encoded_failure, random_tokens, write_header, write_shard
from tests.pipeline.damage import Dying
from tests.pipeline.verifying import SHAPE, kinds, verified

NOW = timedelta(0)


def of(video_id: str, seed: int, **more):
    return encoded(video_id, random_tokens(seed, SHAPE), 0.25, "gstep", **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """a, b, c share a token shard; b was done a second time with d; bad failed."""
    store = write_header(tmp_path_factory.mktemp("whole") / "c", hidden_size=8)
    write_shard(store, "run", *(of(name, i) for i, name in enumerate("abc")))
    write_shard(store, "run2", of("b", 7, attempts=2), of("d", 8), encoded_failure("bad", VideoFault("corrupt", "x")))
    return store.root


@pytest.fixture
def store(whole, tmp_path) -> LocalStore:
    return LocalStore(shutil.copytree(whole, tmp_path / "c"))


def tokens_of(root: Path) -> dict[str, torch.Tensor]:
    cache = TokenCache(root)
    return {name: cache.get(name, verify=True, order="selection").tokens for name in cache.video_ids}


def mentions(root: Path, video_id: str) -> list[str]:
    """The Parquet files that hold anything of a video but that it was removed."""
    found = []
    for file in root.rglob("*.parquet"):
        table = pq.read_table(file)
        mine = table.filter(pc.equal(table["video_id"], video_id))
        if "status" in mine.schema.names:
            mine = mine.filter(pc.not_equal(mine["status"], "removed"))
        found += [file.name] * bool(len(mine))
    return found


def assert_removed(store: LocalStore, whole: Path, *ids: str) -> None:
    before, now = tokens_of(whole), tokens_of(store.root)
    assert now.keys() == before.keys() - {*ids}
    assert all(torch.equal(now[name], before[name]) for name in now)
    cache = TokenCache(store.root)
    for video_id in ids:
        assert video_id not in cache and video_id not in cache.failed and mentions(store.root, video_id) == []
        with pytest.raises(RemovedVideo, match=f"'{video_id}' was removed from .*: takedown 17"):
            cache.get(video_id)
    report = verified(store)
    assert (kinds(report), report.orphans, report.counts["removed_videos"]) == ([], [], len(ids))


def test_a_video_is_gone_and_its_neighbours_stay_bit_for_bit(store, whole):
    done = remove_videos(store, ["b"], "takedown 17", print, NOW)
    assert (done.videos, done.unknown, done.moved) == (1, [], 3)
    assert_removed(store, whole, "b")
    assert {row["rewritten"] for row in map(TokenCache(store.root).metadata, "acd")} == {1}
    assert TokenCache(store.root).failed == {"bad": "corrupt"}


def test_an_earlier_attempt_whose_row_was_merged_away_is_gone_too(store):
    write_shard(store, "run3", of("b", 9, attempts=3))
    merge(store, made_with(store), everything=True, keep=NOW)
    merge(store, made_with(store), everything=True, keep=NOW)
    assert len(store.names("tokens", ".parquet")) == 3
    remove_videos(store, ["b"], "licence", lambda line: None, NOW)
    assert mentions(store.root, "b") == [] and sorted(tokens_of(store.root)) == ["a", "c", "d"]
    assert kinds(verified(store)) == []


def test_what_a_killed_run_left_of_a_video_is_gone_too(store):
    killed = LocalStore(shutil.copytree(store.root, store.root.with_name("killed")))
    write_shard(killed, "run3", of("a", 9))
    (orphan,) = set(killed.names("tokens", ".parquet")) - set(store.names("tokens", ".parquet"))
    store.put(orphan, killed.read(orphan))
    remove_videos(store, ["a"], "licence", lambda line: None, NOW)
    assert mentions(store.root, "a") == [] and sorted(tokens_of(store.root)) == ["b", "c", "d"]


def test_the_same_again_changes_nothing(store, whole):
    remove_videos(store, ["b"], "takedown 17", print, NOW)
    done = remove_videos(store, ["b"], "another reason", print, NOW)
    assert (done.moved, done.deleted) == (0, [])
    assert_removed(store, whole, "b")


def test_one_that_comes_late_does_not_bring_it_back(store, whole):
    """A driver that was stopped commits the video after all."""
    remove_videos(store, ["b"], "takedown 17", print, NOW)
    write_shard(store, "late", of("b", 9, attempts=9))
    with pytest.raises(RemovedVideo):
        TokenCache(store.root).get("b")
    remove_videos(store, ["b"], "takedown 17", print, NOW)
    assert_removed(store, whole, "b")


def test_ids_without_a_row_never_get_one(store, whole):
    done = remove_videos(store, ["x", "bad"], "takedown 17", print, NOW)
    assert done.unknown == ["x"] and "1 of the videos had no row" in list(done.lines())[-1]
    assert_removed(store, whole, "x", "bad")
    done = remove_videos(store, ["bad.mp4", "d.mp4"], "takedown 17", print, NOW)  # "bad" is removed: nobody means it
    assert done.likely == {"d.mp4": ["d"]} and "d.mp4 was not there; did you mean d?" in list(done.lines())[-1]


def test_whatever_is_interrupted_the_next_one_ends(whole, tmp_path):
    for steps in range(30):
        store = Dying(shutil.copytree(whole, tmp_path / str(steps)), spared="runs/.*")
        store.left = steps
        try:
            remove_videos(store, ["b", "a"], "takedown 17", print, NOW)
        except KeyboardInterrupt:
            pass
        else:
            break
        sound = LocalStore(store.root)
        assert {"c", "d"} <= {*TokenCache(store.root).video_ids}
        for _ in range(steps % 2 * 2):  # somebody else leaves out and deletes the rows that named the tokens
            merge(sound, made_with(sound), everything=True, keep=NOW)
        remove_videos(sound, ["b", "a"], "takedown 17", print, NOW)
        assert mentions(sound.root, "a") == mentions(sound.root, "b") == []
        verified(sound, clean=True, keep=NOW)  # a token shard that was about to take the others
        assert_removed(sound, whole, "b", "a")
    assert 6 < steps < 29


def test_what_cannot_be_removed_is_refused(store, tmp_path):
    with Claim(store, "r9", print), pytest.raises(CacheLocked, match="r9"):
        remove_videos(store, ["b"], "why", print, NOW)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotACache):
        remove_videos(LocalStore(tmp_path / "empty"), ["b"], "why", print, NOW)


def test_merging_keeps_what_was_removed(store, whole):
    remove_videos(store, ["b"], "takedown 17", print, NOW)
    write_shard(store, "late", of("e", 3))
    for _ in range(2):
        merge(store, made_with(store), everything=True, keep=NOW)
    with pytest.raises(RemovedVideo):
        TokenCache(store.root).get("b")
