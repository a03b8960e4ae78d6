"""Removal: the video is gone for every reader and for ever, its neighbours stay, and any interruption is ended."""

import shutil
from datetime import timedelta
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipeline import TokenCache
from pipeline.cache.header import HEADER, read_fingerprint, read_header, serialize_header
from pipeline.cache.live import LiveVideos
from pipeline.cache.merging import merge_table_files, merge_table_fully
from pipeline.errors import CacheLocked, NotACache, RemovedVideo
from pipeline.rewrite.remove import remove_videos
from pipeline.runner.claim import Claim
from pipeline.storage.stores import LocalStore
from tests.builders.caches import write_header, write_shard
from tests.pipeline.damage import Dying
from tests.pipeline.verifying import assert_tokens, kinds, six_videos, tokens_of, verified, video_of

NOW = timedelta(0)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return six_videos(tmp_path_factory.mktemp("sound") / "c").root


@pytest.fixture
def store(sound, tmp_path) -> LocalStore:
    return LocalStore(shutil.copytree(sound, tmp_path / "c"))


def remove(store, *ids, reason="takedown 17"):
    return remove_videos(store, ids, reason, print, NOW)


def mentions(root: Path, video_id: str) -> list[str]:
    """The Parquet files that hold anything of a video but that it was removed."""
    files = []
    for file in root.rglob("*.parquet"):
        table = pq.read_table(file)
        rows = table.filter(pc.equal(table["video_id"], video_id))
        if "status" in rows.schema.names:
            rows = rows.filter(pc.not_equal(rows["status"], "removed"))
        files += [file.name] * bool(len(rows))
    return files


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
    before = {file.name for folder in ("tokens", "videos") for file in store.list_files(folder)}
    done = remove(store, "b")
    left = {file.name for folder in ("tokens", "videos") for file in store.list_files(folder)}
    assert len(before - left) > 5 and before - left <= {*done.deleted}


def test_an_earlier_attempt_whose_row_was_merged_away_is_gone_too(store, sound):
    write_shard(store, "run3", video_of("b", 9, attempts=3))
    merge_table_fully(store, read_fingerprint(store))
    assert len(store.names("tokens", ".parquet")) == 5
    remove(store, "b")
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
    pruner = {**header["identity"]["pruner"], "code": "2"}
    store.put(HEADER, serialize_header({**header, "identity": {**header["identity"], "pruner": pruner}}))
    write_shard(store, "new", video_of("a", 30), video_of("b", 31))
    new = tokens_of(store.root)
    for steps in range(40):
        dying = Dying(store.root, spared="runs/.*")
        dying.left = steps
        try:
            remove(dying, "a")
        except KeyboardInterrupt:
            assert_tokens_of_new_code(store, {name: new[name] for name in TokenCache(store.root)})
        else:
            break
    assert steps > 3 and mentions(store.root, "a") == []
    assert_tokens_of_new_code(store, {"b": new["b"]})
    of_old = LiveVideos.open(store, old)  # which jobs.verify --repair sets aside
    rows = [of_old.row(name) for name in ("a", "b", "bad")]
    assert [row["status"] for row in rows] == ["removed", "ok", "failed"] and store.exists(rows[1]["token_shard"])


def assert_tokens_of_new_code(store, expected):
    tokens = tokens_of(store.root)
    assert tokens.keys() == expected.keys() and all(tokens[name].equal(expected[name]) for name in tokens)


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


def test_a_token_shard_that_broke_off_is_gone_too(store, sound):
    """Nobody can say whose tokens it holds, and jobs.remove ended in a ValueError."""
    whole = store.read(store.names("tokens", ".parquet")[0])
    for number, data in enumerate((b"", whole[:-50], b"PAR1" + whole[-60:])):
        store.put(f"tokens/run9-{number:016x}-{number:032x}.parquet", data)
    assert len(remove(store, "b").deleted) > 3
    assert_removed(store, sound, "b")


def test_what_a_killed_run_left_of_a_video_is_gone_too(store, sound):
    killed = LocalStore(shutil.copytree(store.root, store.root.with_name("killed")))
    write_shard(killed, "run3", video_of("a", 9))
    (orphan,) = set(killed.names("tokens", ".parquet")) - set(store.names("tokens", ".parquet"))
    store.put(orphan, killed.read(orphan))
    remove(store, "a")
    assert_removed(store, sound, "a")


def test_ids_without_a_row_never_get_one(store, sound):
    done = remove(store, "x", "bad")
    assert done.unknown == ["x"] and "1 of the ids are unknown here" in list(done.lines())[-1]
    assert_removed(store, sound, "x", "bad")
    done = remove(store, "bad.mp4", "d.mp4")  # "bad" is removed: nobody means it
    assert done.likely == {"d.mp4": ["d"]} and "d.mp4 was not found; did you mean d?" in list(done.lines())[-1]


def test_ids_are_barred_from_a_cache_without_a_row(tmp_path):
    """It ended in a traceback."""
    empty = write_header(tmp_path / "empty", hidden_size=8)
    assert remove(empty, "x").unknown == ["x"]
    with pytest.raises(RemovedVideo, match="takedown 17"):
        TokenCache(empty.root).get("x")


def test_whatever_is_interrupted_the_next_one_ends(tmp_path):
    begun = write_header(tmp_path / "begun", hidden_size=8)
    write_shard(begun, "run", video_of("a", 0), video_of("b", 1))
    write_shard(begun, "run2", video_of("a", 2, attempts=2), video_of("c", 3))
    for steps in range(30):
        store = Dying(shutil.copytree(begun.root, tmp_path / str(steps)), spared="runs/.*")
        store.left = steps
        try:
            remove(store, "a")
        except KeyboardInterrupt:
            pass
        else:
            break
        whole = LocalStore(store.root)
        assert {"b", "c"} <= {*TokenCache(store.root).video_ids}
        if steps % 2:  # somebody else leaves out and deletes the rows that named the tokens
            merge_table_fully(whole, read_fingerprint(whole))
        remove(whole, "a")
        assert mentions(whole.root, "a") == []
        verified(whole, clean=True, keep=NOW)  # a token shard that was about to take the others
        assert_removed(whole, begun.root, "a")
    assert 6 < steps < 29


def test_what_cannot_be_removed_is_refused(store, tmp_path):
    with Claim(store, "r9", print), pytest.raises(CacheLocked, match="r9"):
        remove(store, "b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotACache):
        remove(LocalStore(tmp_path / "empty"), "b")
