"""Removal: a video is gone for ever, its neighbors stay; and small token shards are joined. Interruptions are ended."""

import shutil
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from pipeline import TokenCache
from pipeline.cache.header import HEADER, read_fingerprint, read_header, serialize_header
from pipeline.cache.live import LiveVideos
from pipeline.cache.merging import merge_table_fully
from pipeline.errors import CorruptShard, RemovedVideo, VideoFault
from pipeline.rewrite.compact import join_tokens
from pipeline.runner.claim import CacheLocked, Claim
from pipeline.storage.stores import LocalStore
from tests.builders.caches import encoded_failure, write_header, write_shard
from tests.pipeline.damage import flip, say_what_was_committed, shards, stop_at_each_change
from tests.pipeline.verifying import NOW, assert_tokens, kinds, remove, tokens_of, verified, video_of


def mentions(root: Path, video_id: str) -> list[str]:
    """The Parquet files that hold anything of a video but that it was removed."""
    files = {file.name: pq.read_table(file).to_pylist() for file in root.rglob("*.parquet")}
    wanted = [(video_id, status) for status in (None, "ok", "failed")]  # rows of tokens have no status
    return [name for name, rows in files.items() if any((r["video_id"], r.get("status")) in wanted for r in rows)]


def assert_removed(store: LocalStore, tokens: dict[str, torch.Tensor], *ids: str) -> None:
    assert_tokens(store.root, {name: values for name, values in tokens.items() if name not in ids})
    cache = TokenCache(store.root)
    for video_id in ids:
        assert video_id not in cache and video_id not in cache.failed and mentions(store.root, video_id) == []
        with pytest.raises(RemovedVideo, match=f"'{video_id}' was removed from .*: takedown 17"):
            cache.get(video_id)
    report = verified(store)
    assert (report.orphans, report.counts["removed_videos"]) == ([], len(ids))


def test_videos_are_gone_once_and_for_all_and_their_neighbours_stay_bit_for_bit(store, tokens):
    done = remove(store, "b", "f")
    assert (done.videos, done.unknown, done.moved) == (2, [], 3)
    assert_removed(store, tokens, "b", "f")
    assert {row["rewritten"] for row in map(TokenCache(store.root).metadata, "ace")} == {1}
    assert TokenCache(store.root).failed == {"bad": "corrupt"}
    done = remove(store, "b", "f", reason="another reason")
    assert (done.moved, done.deleted) == (0, [])
    assert_removed(store, tokens, "b", "f")
    for run, is_merged in (("late", False), ("later", True)):  # of a driver that was stopped
        write_shard(store, run, video_of("b", 9, attempts=9), video_of(run, 3))
        if is_merged:  # which drops the late row of b
            merge_table_fully(store, read_fingerprint(store))
        with pytest.raises(RemovedVideo):
            TokenCache(store.root).get("b")
        assert remove(store, "b").moved == 1 and mentions(store.root, "b") == []
    assert TokenCache(store.root).video_ids == [*"acde", "late", "later"] and kinds(verified(store)) == []


def files_of(store: LocalStore) -> set[str]:
    return {file.name for folder in ("tokens", "videos") for file in store.list_files(folder)}


def test_tokens_that_no_row_names_are_gone_too(store, tokens):
    """Of a merged row, of a killed run, and torn: nobody can say whose tokens a torn file holds."""
    before = files_of(store)
    killed = LocalStore(shutil.copytree(store.root, store.root.with_name("killed")))
    write_shard(killed, "run4", video_of("b", 9))
    (orphan,) = files_of(killed) - before - {*killed.names("videos", ".parquet")}
    write_shard(store, "run3", video_of("b", 9, attempts=3))
    merge_table_fully(store, read_fingerprint(store))
    store.put(orphan, killed.read(orphan))
    whole = store.read(store.names("tokens", ".parquet")[0])
    for number, data in enumerate((b"", whole[:-50], b"PAR1" + whole[-60:])):
        store.put(f"tokens/run9-{number:016x}-{number:032x}.parquet", data)
    left = {name for name in files_of(store) - before if name.startswith("tokens/")}
    before = files_of(store)
    done = remove(store, "b")
    gone = before - files_of(store)
    assert len(left) == 5 and left < gone <= {*done.deleted}  # those of the first of its merges too
    assert_removed(store, tokens, "b")


def test_what_a_run_beside_another_stored_of_a_video_is_gone_too(store):
    """Its row is dropped by a merge, and its token shard stays for another video; merged caches are alike."""
    ids = ("x", "x" * 5000)  # Parquet has no statistics of long texts
    for run, other in (("run3", "g"), ("run4", "h")):
        write_shard(store, run, *(video_of(video_id, 6) for video_id in ids), video_of(other, 7))
    merge_table_fully(store, read_fingerprint(store))
    assert [len(mentions(store.root, video_id)) for video_id in ids] == [3, 3]
    remove(store, *ids)
    assert [mentions(store.root, video_id) for video_id in ids] == [[], []] and kinds(verified(store)) == []
    assert TokenCache(store.root).video_ids == [*"abcdefgh"]


def test_what_old_code_stored_of_a_video_is_gone_too_and_takes_no_other_video_s_place(store):
    """Rows of old code came back as rows of the new one, before tokens of the new one."""
    old = read_fingerprint(store)
    header = read_header(store)
    header["identity"]["pruner"]["code"] = "2"
    store.put(HEADER, serialize_header(header))
    write_shard(store, "new", video_of("a", 30), video_of("b", 31))
    new = tokens_of(store.root)

    def assert_tokens_of_new_code(*ids: str) -> None:
        tokens = tokens_of(store.root)
        assert tokens.keys() == {*ids} and all(tokens[name].equal(new[name]) for name in ids)

    for _ in stop_at_each_change(lambda dying: remove(dying, "a"), lambda _: store.root, spared="runs/.*"):
        assert_tokens_of_new_code(*TokenCache(store.root))
    assert mentions(store.root, "a") == []
    assert_tokens_of_new_code("b")
    of_old = LiveVideos.open(store, old)  # which jobs.verify --repair sets aside
    rows = [of_old.row(name) for name in ("a", "b", "bad")]
    assert [row["status"] for row in rows] == ["removed", "ok", "failed"] and store.exists(rows[1]["token_shard"])


def test_damage_of_another_video_stops_no_removal_and_is_told(store, tokens):
    damaged = TokenCache(store.root).metadata("d")["token_shard"]
    whole = store.read(damaged)
    store.put(damaged, whole[:-50])
    done = remove(store, "b")
    assert done.unread == [damaged] and f"e.g. {damaged}, may hold tokens of the videos" in [*done.lines()][-1]
    store.put(damaged, whole)
    assert remove(store, "b").unread == []
    assert_removed(store, tokens, "b")


def test_ids_without_a_row_never_get_one(store, tokens):
    with Claim(store, "r9", print), pytest.raises(CacheLocked, match="r9"):
        remove(store, "x")
    done = remove(store, "x", "bad")
    assert done.unknown == ["x"] and "1 of the ids are unknown here" in list(done.lines())[-1]
    assert_removed(store, tokens, "x", "bad")
    empty = write_header(store.root.parent / "empty", hidden_size=8)  # it ended in a traceback
    assert remove(empty, "x").unknown == ["x"]
    with pytest.raises(RemovedVideo, match="takedown 17"):
        TokenCache(empty.root).get("x")
    done = remove(store, "bad.mp4", "d.mp4")  # "bad" is removed: nobody means it
    assert done.likely == {"d.mp4": ["d"]} and "d.mp4 was not found; did you mean d?" in list(done.lines())[-1]


def test_whatever_is_interrupted_the_next_one_ends(tokens, tmp_path):
    begun = write_header(tmp_path / "begun", hidden_size=8)
    write_shard(begun, "run", video_of("a", 0), video_of("b", 1))
    write_shard(begun, "run2", video_of("a", 2, attempts=2), video_of("c", 2))

    def copy(steps: int) -> Path:
        return shutil.copytree(begun.root, tmp_path / str(steps))

    for steps in stop_at_each_change(lambda dying: remove(dying, "a"), copy, spared="runs/.*"):
        store = LocalStore(tmp_path / str(steps))
        assert [*TokenCache(store.root)] in ([*"abc"], [*"bc"])
        if steps % 2:  # somebody else leaves out and deletes the rows that named the tokens
            merge_table_fully(store, read_fingerprint(store))
        remove(store, "a")
        assert mentions(store.root, "a") == []
        if steps % 3 == 0:
            verified(store, clean=True)  # a token shard that was about to take the others
            assert_removed(store, {name: tokens[name] for name in "bc"}, "a")


@pytest.fixture
def scattered(tmp_path):
    scattered = write_header(tmp_path / "c", hidden_size=8)
    for seed, name in enumerate("abcde"):
        write_shard(scattered, f"run{seed}", video_of(name, seed))
    write_shard(scattered, "run8", encoded_failure("bad", VideoFault("corrupt", "cut off")))
    write_shard(scattered, "run9", video_of("a", 9, attempts=2))  # replaces the first
    say_what_was_committed(scattered)
    return scattered


def join(store, keep=NOW, *size):
    return join_tokens(store, lambda line: None, keep, *size)


def assert_same(store, before):
    assert_tokens(store.root, before)
    assert TokenCache(store.root).failed == {"bad": "corrupt"}


def test_all_become_one_and_the_old_ones_go_when_readers_had_time(scattered):
    before, reader = tokens_of(scattered.root), TokenCache(scattered.root)
    done = join(scattered, timedelta(hours=1))
    assert (done.videos, len(done.read), len(done.written), done.deleted) == (5, 5, 1, [])
    assert_same(scattered, before)
    assert all(torch.equal(reader.get(name, order="selection").tokens, before[name]) for name in before)
    assert len(shards(scattered)) == 7  # five old ones, the new one, and that of the first "a"
    again = join(scattered)
    assert (again.run_id, again.read, len(again.deleted)) == ("", [], 5)
    assert_same(scattered, before)
    assert len(shards(scattered)) == 2


def test_large_ones_stay_and_bundles_are_of_the_size(scattered):
    before, size = tokens_of(scattered.root), 3 * min(file.stat().st_size for file in shards(scattered)) - 1
    done = join(scattered, NOW, size)
    assert (len(done.read), len(done.written)) == (5, 2)
    assert_same(scattered, before)
    assert join(scattered, NOW, 2).read == []


def test_what_is_damaged_or_written_to_is_left_as_it_was(scattered):
    before, file = tokens_of(scattered.root), shards(scattered)[2]
    flip(file, 100)
    with pytest.raises(CorruptShard, match=file.name):
        join(scattered)
    flip(file, 100)
    assert_same(scattered, before)
    with Claim(scattered, "other", print), pytest.raises(CacheLocked):
        join(scattered)


def test_the_same_command_ends_what_was_stopped_anywhere(scattered):
    """It stops before each change of the scattered once; the tokens are the same after each stop."""
    before, size = tokens_of(scattered.root), 3 * min(file.stat().st_size for file in shards(scattered)) - 1
    for _ in stop_at_each_change(lambda s: join(s, NOW, size), lambda _: scattered.root, spared=r".*\.running"):
        assert_same(scattered, before)
    for _ in range(2):
        join(scattered, NOW, size)
    assert_same(scattered, before)
    verified(scattered, clean=True)
    assert len(shards(scattered)) <= 4
