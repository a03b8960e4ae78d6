"""Removal: the video is gone for every reader and for ever, its neighbours stay, and any interruption is ended."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline import TokenCache
from pipeline.cache.header import HEADER, read_fingerprint, read_header, serialize_header
from pipeline.cache.live import LiveVideos
from pipeline.cache.merging import merge_table_files, merge_table_fully
from pipeline.errors import CacheLocked, NotACache, RemovedVideo
from pipeline.runner.claim import Claim
from pipeline.storage.stores import LocalStore
from tests.builders.caches import write_header, write_shard
from tests.pipeline.damage import stop_at_each_change
from tests.pipeline.verifying import assert_tokens, kinds, remove, six_videos, tokens_of, verified, video_of


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return six_videos(tmp_path_factory.mktemp("sound") / "c").root


@pytest.fixture
def store(sound, tmp_path) -> LocalStore:
    return LocalStore(shutil.copytree(sound, tmp_path / "c"))


def mentions(root: Path, video_id: str) -> list[str]:
    """The Parquet files that hold anything of a video but that it was removed."""
    files = {file.name: pq.read_table(file).to_pylist() for file in root.rglob("*.parquet")}
    wanted = [(video_id, status) for status in (None, "ok", "failed")]  # rows of tokens have no status
    return [name for name, rows in files.items() if any((r["video_id"], r.get("status")) in wanted for r in rows)]


def assert_removed(store: LocalStore, sound: Path, *ids: str) -> None:
    assert_tokens(store.root, {name: values for name, values in tokens_of(sound).items() if name not in ids})
    cache = TokenCache(store.root)
    for video_id in ids:
        assert video_id not in cache and video_id not in cache.failed and mentions(store.root, video_id) == []
        with pytest.raises(RemovedVideo, match=f"'{video_id}' was removed from .*: takedown 17"):
            cache.get(video_id)
    report = verified(store)
    assert (report.orphans, report.counts["removed_videos"]) == ([], len(ids))


def test_videos_are_gone_once_and_for_all_and_their_neighbours_stay_bit_for_bit(store, sound):
    done = remove(store, "b", "f")
    assert (done.videos, done.unknown, done.moved) == (2, [], 3)
    assert_removed(store, sound, "b", "f")
    assert {row["rewritten"] for row in map(TokenCache(store.root).metadata, "ace")} == {1}
    assert TokenCache(store.root).failed == {"bad": "corrupt"}
    done = remove(store, "b", "f", reason="another reason")
    assert (done.moved, done.deleted) == (0, [])
    assert_removed(store, sound, "b", "f")
    write_shard(store, "late", video_of("b", 9, attempts=9), video_of("g", 3))  # of a driver that was stopped
    with pytest.raises(RemovedVideo):
        TokenCache(store.root).get("b")
    assert remove(store, "b").moved == 1 and mentions(store.root, "b") == []
    merge_table_fully(store, read_fingerprint(store))
    assert TokenCache(store.root).video_ids == ["a", "c", "d", "e", "g"] and kinds(verified(store)) == []
    write_shard(store, "later", video_of("b", 9, attempts=9), video_of("h", 3))
    merge_table_fully(store, read_fingerprint(store))  # which drops the late row of b
    assert remove(store, "b").moved == 1 and mentions(store.root, "b") == []


def test_every_file_that_goes_is_named(store):
    """Those that the first of its merges deleted were not."""
    merge_table_files(store, read_fingerprint(store), everything=True)
    before = files_of(store)
    done = remove(store, "b")
    gone = before - files_of(store)
    assert len(gone) > 5 and gone <= {*done.deleted}


def files_of(store: LocalStore) -> set[str]:
    return {file.name for folder in ("tokens", "videos") for file in store.list_files(folder)}


def merge_an_attempt_away(store: LocalStore) -> None:
    write_shard(store, "run3", video_of("b", 9, attempts=3))
    merge_table_fully(store, read_fingerprint(store))


def leave_torn_token_shards(store: LocalStore) -> None:
    whole = store.read(store.names("tokens", ".parquet")[0])
    for number, data in enumerate((b"", whole[:-50], b"PAR1" + whole[-60:])):
        store.put(f"tokens/run9-{number:016x}-{number:032x}.parquet", data)


def leave_tokens_of_a_killed_run(store: LocalStore) -> None:
    killed = LocalStore(shutil.copytree(store.root, store.root.with_name("killed")))
    write_shard(killed, "run3", video_of("b", 9))
    (orphan,) = files_of(killed) - files_of(store) - {*killed.names("videos", ".parquet")}
    store.put(orphan, killed.read(orphan))


@pytest.mark.parametrize("leave", [merge_an_attempt_away, leave_torn_token_shards, leave_tokens_of_a_killed_run])
def test_tokens_that_no_row_names_are_gone_too(store, sound, leave):
    """Nobody can say whose tokens a torn file holds, and jobs.remove ended in a ValueError."""
    before = files_of(store)
    leave(store)
    left = files_of(store) - before
    remove(store, "b")
    assert left and not left & files_of(store)
    assert_removed(store, sound, "b")


@pytest.mark.parametrize("video_id", ["x", "x" * 5000])  # Parquet has no statistics of long texts
def test_what_a_run_beside_another_stored_of_a_video_is_gone_too(store, sound, video_id):
    """Its row is dropped by a merge, and its token shard stays for another video; merged caches are alike."""
    for run, other in (("run3", "g"), ("run4", "h")):
        write_shard(store, run, video_of(video_id, 6), video_of(other, 7))
    merge_table_fully(store, read_fingerprint(store))
    assert len(mentions(store.root, video_id)) == 3
    remove(store, video_id)
    assert mentions(store.root, video_id) == [] and kinds(verified(store)) == []
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


def test_damage_of_another_video_stops_no_removal_and_is_told(store, sound):
    shards = {name: TokenCache(sound).metadata(name)["token_shard"] for name in TokenCache(sound)}
    damaged = next(shard for shard in shards.values() if shard != shards["b"])
    whole = store.read(damaged)
    store.put(damaged, whole[:-50])
    done = remove(store, "b")
    assert done.unread == [damaged] and f"e.g. {damaged}, may hold tokens of the videos" in [*done.lines()][-1]
    store.put(damaged, whole)
    assert remove(store, "b").unread == []
    assert_removed(store, sound, "b")


def test_ids_without_a_row_never_get_one(store, sound):
    done = remove(store, "x", "bad")
    assert done.unknown == ["x"] and "1 of the ids are unknown here" in list(done.lines())[-1]
    assert_removed(store, sound, "x", "bad")
    empty = write_header(store.root.parent / "empty", hidden_size=8)  # it ended in a traceback
    assert remove(empty, "x").unknown == ["x"]
    with pytest.raises(RemovedVideo, match="takedown 17"):
        TokenCache(empty.root).get("x")
    done = remove(store, "bad.mp4", "d.mp4")  # "bad" is removed: nobody means it
    assert done.likely == {"d.mp4": ["d"]} and "d.mp4 was not found; did you mean d?" in list(done.lines())[-1]


def test_whatever_is_interrupted_the_next_one_ends(tmp_path):
    begun = write_header(tmp_path / "begun", hidden_size=8)
    write_shard(begun, "run", video_of("a", 0), video_of("b", 1))
    write_shard(begun, "run2", video_of("a", 2, attempts=2), video_of("c", 3))

    def copy(steps: int) -> Path:
        return shutil.copytree(begun.root, tmp_path / str(steps))

    for steps in stop_at_each_change(lambda dying: remove(dying, "a"), copy, spared="runs/.*"):
        store = LocalStore(tmp_path / str(steps))
        assert {"b", "c"} <= {*TokenCache(store.root).video_ids}
        if steps % 2:  # somebody else leaves out and deletes the rows that named the tokens
            merge_table_fully(store, read_fingerprint(store))
        remove(store, "a")
        assert mentions(store.root, "a") == []
        verified(store, clean=True)  # a token shard that was about to take the others
        assert_removed(store, begun.root, "a")


def test_what_cannot_be_removed_is_refused(store, tmp_path):
    with Claim(store, "r9", print), pytest.raises(CacheLocked, match="r9"):
        remove(store, "b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotACache):
        remove(LocalStore(tmp_path / "empty"), "b")
