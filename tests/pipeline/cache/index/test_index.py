"""The compacted index: it says what the videos shards say, opens without them, and whoever is killed while making it
leaves the earlier one."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pytest

from pipeline import CorruptShard, TokenCache, UnknownVideo
from pipeline.cache.index import compaction
from pipeline.cache.index.compaction import compact, try_compact
from pipeline.cache.index.files import INDEX, ROOT, Index, run_id_after
from pipeline.cache.index.live_videos import read_live_of
from pipeline.cache.ledger import Ledger
from pipeline.cache.live_rows import VIDEOS, read_live
from pipeline.errors import VideoFault
from pipeline.storage.lock import cache_lock
from pipeline.storage.stores import LocalStore, ObjectStore
from tests.paths import ROOT as PROJECT
from tests.pipeline.caches import encoded, encoded_failure, make_cache, random_tokens, write_header, write_shard
from tests.pipeline.s3 import S3Server

TOKENS = random_tokens(0)


def good(name, **more):
    return encoded(name, TOKENS, 0.25, "gstep", **more)


def bad(name, fault="crash", **more):
    return encoded_failure(name, VideoFault(fault, f"{name} {fault}"), **more)


@pytest.fixture
def store(tmp_path):
    return write_header(tmp_path)


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Several blocks and tables of shards, of few rows."""
    monkeypatch.setattr(compaction, "BLOCK_ROWS", 3)
    monkeypatch.setattr(compaction, "SHARDS_A_TABLE", 2)


def make_index(store, **more):
    with cache_lock(store, "compact", print) as lock:
        return compact(store, lock, **more)


def shown(cache):
    """All that a reader says of the videos of a cache."""
    return {
        name: (row["run_id"], row["status"], row["attempts"])
        for name in sorted([*cache.video_ids, *cache.failed])
        for row in [cache.metadata(name)]
    } | {"failed": cache.failed, "ids": cache.video_ids}


def by_shard(cache):
    """The ids with tokens, found shard by shard."""
    shards = cache.shards()
    found = []
    for number in range(len(shards)):
        rows = cache.rows_of(shards, number)
        assert len(rows) == shards.counts[number] > 0
        found += [row["video_id"] for row in rows]
    return found


def expected(store):
    """The same from the videos shards alone, by ``read_live``."""
    rows = read_live(store, ("video_id", "run_id", "status", "attempts", "error_class")).to_pylist()
    rows.sort(key=lambda row: row["video_id"])
    return {row["video_id"]: (row["run_id"], row["status"], row["attempts"]) for row in rows} | {
        "failed": {row["video_id"]: row["error_class"] for row in rows if row["status"] != "ok"},
        "ids": [row["video_id"] for row in rows if row["status"] == "ok"],
    }


def same_ledgers(store):
    """A ledger that begins with the index holds what one does that reads every shard."""
    short, full = Ledger(store).refresh(), Ledger(store, use_index=False).refresh()
    assert short.index is not None and not short.unusable
    for name, column in full.columns.items():
        if name == "place":
            continue
        mine, theirs = short.columns[name].tolist(), column.tolist()
        if name == "code":  # numbers of classes are each ledger's own
            mine = [short.classes[code & 63] for code in mine]
            theirs = [full.classes[code & 63] for code in theirs]
        assert mine == theirs, name
    rows = range(len(full))
    assert [short.read(row)["run_id"] for row in rows] == [full.read(row)["run_id"] for row in rows]
    return short


@pytest.mark.parametrize("seed", range(4))
def test_readers_and_runs_see_what_the_videos_shards_say_however_often_it_is_made(store, seed):
    """Many rows of few videos, in runs of any order of names, with and without newer shards; the sixth making of
    the index reads none of the shards that the fifth covered."""
    draw = random.Random(seed)
    runs = draw.sample(range(100), 6)
    for number, run in enumerate(sorted(runs)):
        rows = [
            draw.choice([good, bad])(f"v{video}", attempts=draw.randint(1, 3))
            for video in draw.sample(range(12), draw.randint(1, 7))
        ]
        write_shard(store, f"r{run:02}", *rows)
        assert shown(TokenCache(store.root)) == expected(store)
        assert sorted(by_shard(TokenCache(store.root))) == expected(store)["ids"]
        if number % 2:
            made = make_index(store)
            assert made.new_shards == 2
            assert shown(TokenCache(store.root)) == expected(store)
            assert sorted(by_shard(TokenCache(store.root))) == expected(store)["ids"]
        if number:
            same_ledgers(store)
    ids = draw.sample([f"v{video}" for video in range(14)], 6)
    columns = ("video_id", "status", "attempts", "n_tokens")
    live = read_live(store, columns)
    wanted = live.filter(pa.compute.is_in(live["video_id"], pa.array(ids)))
    assert read_live_of(store, ids, columns).sort_by("video_id").to_pylist() == wanted.sort_by("video_id").to_pylist()


def test_the_shards_know_which_of_their_rows_count(store):
    write_shard(store, "r1", good("a"), bad("b"), good("c"))
    write_shard(store, "r2", good("b", attempts=2), bad("c", attempts=2))
    make_index(store)
    index = Index.read(store)
    table = index.shards(0).to_pylist()
    assert [row["name"].split("-")[0] for row in table] == ["videos/r1", "videos/r2"]
    assert [(row["rows"], row["failed"], row["ok"], row["dead"]) for row in table] == [(3, 1, 2, [1]), (2, 1, 1, [1])]


def test_a_cache_without_a_row_has_an_index_of_none(store):
    assert make_index(store).videos == 0
    assert len(same_ledgers(store)) == 0 and TokenCache(store.root).video_ids == []
    write_shard(store, "r1", good("a"))
    assert TokenCache(store.root).video_ids == ["a"] and make_index(store).videos == 1


def test_what_is_the_same_is_not_written_again(store):
    for number in range(5):
        write_shard(store, f"r{number}", good(f"v{number}"), good(f"w{number}"))
    first = make_index(store)
    files = {file.name for file in store.listed(INDEX)}
    again = make_index(store)
    assert {file.name for file in store.listed(INDEX)} == files
    assert first.written == first.n_bytes and again.written == (store.root / ROOT).stat().st_size
    assert make_index(store, rebuild=True).videos == 10


def test_opening_a_compacted_cache_on_s3_is_two_gets_and_a_list_and_finding_a_video_three_gets():
    with S3Server() as server:
        store = write_header(ObjectStore(server.uri("c"), server.objects()))
        for number in range(7):
            write_shard(store, f"r{number}", good(f"v{number}"), good(f"w{number}"))
        make_index(store)

        def requests(call):
            server.requests.clear()
            return call(), server.counts()

        cache, counts = requests(lambda: TokenCache(store.root, store=store))
        assert counts == {"GET": 2, "LIST": 1}
        row, counts = requests(lambda: cache.metadata("v3"))
        assert row["video_id"] == "v3" and counts == {"GET": 3}
        _, counts = requests(lambda: cache.get("v3"))
        assert counts == {"GET": 1}  # a shard so small comes with its footer
        write_shard(store, "r8", good("x"), good("v3", attempts=2))
        cache, counts = requests(lambda: TokenCache(store.root, store=store))
        assert counts == {"GET": 3, "LIST": 1}
        assert cache.metadata("v3")["attempts"] == 2 and len(cache.get("x").index)
        with pytest.raises(UnknownVideo):
            cache.get("nobody")


def test_it_pickles_with_what_it_was_opened_with(store):
    make_cache(store, {"a": TOKENS, "b": TOKENS})
    make_index(store)
    write_shard(store, "s", good("c"))
    cache = pickle.loads(pickle.dumps(TokenCache(store.root)._live))  # noqa: S301
    assert cache.ok() == ["a", "b", "c"] and cache.find("c").shard.startswith("videos/s-")


def test_a_folder_is_not_listed_where_nothing_came_since(store, monkeypatch):
    monkeypatch.setattr(compaction, "_MARKED", 1)
    monkeypatch.setattr("pipeline.storage.stores._CLOCK_NS", 10**8)
    write_shard(store, "r1", good("a"))
    make_index(store)
    assert Index.read(store).root["mark"]
    time.sleep(0.2)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "names", lambda *_: pytest.fail("listed"))
        assert TokenCache(store.root).get("a").video_id == "a"
    write_shard(store, "r2", good("b"))
    assert TokenCache(store.root).video_ids == ["a", "b"]


def test_a_run_whose_clock_is_behind_gets_a_later_name(store):
    write_shard(store, "20300101T000000Z-ffffff", good("a"))
    make_index(store)
    index = Index.read(store)
    late = run_id_after(index, "20260101T000000Z-0a1b2c")
    assert late == "20300101T000000Z-ffffff_000001"
    assert run_id_after(index, "20300101T000001Z-000000") == "20300101T000001Z-000000"
    assert run_id_after(None, "x") == "x"
    write_shard(store, late, good("b"))
    assert TokenCache(store.root).video_ids == ["a", "b"]
    make_index(store)
    assert run_id_after(Index.read(store), "20260101T000000Z-0a1b2c") == "20300101T000000Z-ffffff_000002"


def test_a_shard_that_comes_late_under_an_earlier_name_is_covered_by_the_next_run(store):
    """A driver that was stopped may commit after another one has made the index."""
    write_shard(store, "r5", good("a"))
    make_index(store)
    write_shard(store, "r1", good("late"))
    assert "late" not in TokenCache(store.root)
    ledger = Ledger(store).refresh()
    assert len(ledger) == 2
    said: list[str] = []
    with cache_lock(store, "r6", print) as lock:
        assert try_compact(store, lock, ledger, 1000, said.append)
    assert said[-1].startswith("index: 2 videos of 2 shards")
    assert "late" in TokenCache(store.root)


def test_a_run_makes_it_once_enough_shards_are_in_none(store):
    for number in range(3):
        write_shard(store, f"r{number}", good(f"v{number}"))
    with cache_lock(store, "r9", print) as lock:
        ledger = Ledger(store).refresh()
        assert not try_compact(store, lock, ledger, 4, print) and not try_compact(store, lock, ledger, 0, print)
        assert not store.exists(ROOT)
        assert try_compact(store, lock, ledger, 3, print)
    assert store.exists(ROOT)


def test_a_run_that_cannot_make_it_says_so_and_has_lost_nothing(store, monkeypatch):
    write_shard(store, "r1", good("a"))
    said: list[str] = []
    with cache_lock(store, "r2", print) as lock, monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert not try_compact(store, lock, Ledger(store).refresh(), 1, said.append)
    assert "the index was not made ([Errno 28] No space left on device); python -m jobs.compact" in said[-1]
    assert TokenCache(store.root).video_ids == ["a"]


def test_an_id_that_is_no_text_is_in_no_cache(store):
    write_shard(store, "r1", good("a"))
    make_index(store)
    assert "\udc80" not in TokenCache(store.root)


def test_a_shard_that_was_removed_makes_runs_read_all_and_readers_say_so(store):
    name = write_shard(store, "r1", good("a"))
    write_shard(store, "r2", good("b"))
    make_index(store)
    store.delete(name)
    cache = TokenCache(store.root)
    with pytest.raises(CorruptShard, match=r"is gone; python -m jobs\.compact CACHE --rebuild"):
        cache.metadata("a")
    assert cache.get("b").video_id == "b"
    ledger = Ledger(store).refresh()
    assert ledger.index is None and "1 videos shards that are gone" in ledger.unusable and len(ledger) == 1
    with cache_lock(store, "r3", print) as lock:
        assert try_compact(store, lock, ledger, 0, print)
    assert TokenCache(store.root).video_ids == ["b"]


@pytest.mark.parametrize("which", [ROOT, "videos", "shards"])
def test_every_damage_to_it_is_named_and_a_run_goes_on_without_it(store, which):
    for number in range(4):
        write_shard(store, f"r{number}", good(f"v{number}"))
    make_index(store)
    names = [ROOT] if which == ROOT else [f.name for f in store.listed(INDEX) if f"/{which}-" in f.name]
    for name in names:
        data = bytearray(store.read(name))
        data[len(data) // 2] ^= 1
        (store.root / name).write_bytes(data)
    with pytest.raises(CorruptShard):
        shown(TokenCache(store.root))
    ledger = Ledger(store).refresh()
    assert ledger.unusable and len(ledger) == 4
    assert make_index(store).why_anew
    assert shown(TokenCache(store.root)) == expected(store)


def test_a_file_of_it_that_is_gone_says_to_open_the_cache_again(store):
    write_shard(store, "r1", good("a"))
    make_index(store)
    cache = TokenCache(store.root)
    for file in store.listed(INDEX):
        store.delete(file.name)
    with pytest.raises(CorruptShard, match="open the cache again"):
        cache.get("a")


def test_files_of_the_index_before_the_last_go_once_they_are_a_day_old(store):
    def files():
        return {file.name for file in store.listed(INDEX)}

    write_shard(store, "r1", good("a"))
    make_index(store)
    oldest = files()
    write_shard(store, "r2", good("b"))
    make_index(store)
    assert oldest < files()
    for name in oldest:
        os.utime(store.root / name, (time.time() - 90_000,) * 2)
    write_shard(store, "r3", good("c"))
    before = files()
    assert make_index(store).removed == len(oldest - before | oldest)
    assert not oldest & files() and before - oldest < files()


def test_readers_go_on_with_the_index_that_they_opened(store):
    write_shard(store, "r1", good("a"), good("b"))
    make_index(store)
    cache = TokenCache(store.root)
    write_shard(store, "r2", good("a", attempts=2), good("c"))
    make_index(store)
    assert cache.video_ids == ["a", "b"] and cache.metadata("a")["attempts"] == 1


def test_one_that_knows_of_no_index_reads_the_same(store):
    """As earlier versions of the reader do: the live rows of all videos shards."""
    write_shard(store, "r1", good("a"), bad("b"))
    before = read_live(store).to_pylist()
    make_index(store)
    assert read_live(store).to_pylist() == before
    assert store.names(VIDEOS, ".parquet") == [row["shard"] for row in before[:1]]


_COMPACT_AND_DIE = """
import os, signal, sys
from pathlib import Path
from pipeline.cache.index import compaction
from pipeline.storage.lock import cache_lock
from pipeline.storage.stores import LocalStore

compaction.BLOCK_ROWS, compaction.SHARDS_A_TABLE = 3, 2
left = int(sys.argv[2])
put = LocalStore.put
def dying(self, name, data):
    global left
    left -= 1
    if left < 0:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(".tmp-" + path.name).write_bytes(bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, name, data)
LocalStore.put = dying
store = LocalStore(Path(sys.argv[1]))
with cache_lock(store, "dies", print) as lock:
    compaction.compact(store, lock)
"""


def test_killed_before_any_file_the_earlier_one_stays_and_the_next_goes_on(store):
    for number in range(4):
        write_shard(store, f"r{number}", good(f"v{number}"), bad(f"w{number}"))
    make_index(store)
    write_shard(store, "r5", good("w1", attempts=2), good("x"))
    wanted, root = expected(store), store.read(ROOT)
    ended = []
    for puts in range(12):
        child = subprocess.run(
            [sys.executable, "-c", _COMPACT_AND_DIE, str(store.root), str(puts)],
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
            check=False,
            capture_output=True,
        )
        ended.append(child.returncode)
        assert child.returncode in (0, -signal.SIGKILL), child.stderr
        if child.returncode == 0:
            break
        assert store.read(ROOT) == root
        assert shown(TokenCache(store.root)) == wanted
        same_ledgers(store)
    assert ended[-1] == 0 and len(ended) > 3
    assert json.loads(store.read(ROOT))["shards"] == 5
    assert shown(TokenCache(store.root)) == wanted
