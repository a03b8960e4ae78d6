"""The driver's ledger: the live row of every video, by the same rule as ``pipeline.cache.live_rows``, from hashes and
numbers."""

import random

import numpy as np
import pyarrow as pa
import pytest

from pipeline import TokenCache
from pipeline.cache.ledger import Ledger
from pipeline.errors import VideoFault
from tests.pipeline.caches import encoded, encoded_failure, random_tokens, read_live, write_header, write_shard

TOKENS = random_tokens(0)


def good(name, **more):
    return encoded(name, TOKENS, 0.25, "gstep", **more)


def bad(name, fault="crash", **more):
    return encoded_failure(name, VideoFault(fault, f"{name} {fault}"), **more)


@pytest.fixture
def store(tmp_path):
    return write_header(tmp_path)


def test_it_takes_79_bytes_a_video(store):
    write_shard(store, "r1", good("a"))
    ledger = Ledger(store).refresh()
    assert sum(column.nbytes for column in ledger.columns.values()) == 79


def test_the_live_row_is_the_one_that_readers_take(store):
    """Many rows of few videos, in shards whose names are not in the order of their runs."""
    draw = random.Random(0)
    for run in draw.sample(range(100), 8):
        rows = [
            draw.choice([good, bad])(f"v{number}", attempts=draw.randint(1, 3))
            for number in draw.sample(range(6), draw.randint(1, 5))
        ]
        write_shard(store, f"r{run:02}", *rows)
    ledger = Ledger(store).refresh()
    live = read_live(store)
    assert len(ledger) == len(live) == 6
    for row in live.to_pylist():
        (place,) = ledger.find(pa.array([row["video_id"]])).tolist()
        mine = ledger.read(place)
        assert {name: mine[name] for name in ("video_id", "status", "attempts", "error_class")} == {
            name: row[name] for name in ("video_id", "status", "attempts", "error_class")
        }
        assert row["shard"].startswith(f"videos/{mine['run_id']}-")
        assert ledger.failed(np.array([place])).item() == (row["status"] != "ok")


def test_what_was_committed_since_is_read_and_nothing_twice(store):
    write_shard(store, "r2", good("a"), bad("b"))
    ledger = Ledger(store).refresh()
    reads = []
    store.read_all, read_all = lambda names: [reads.extend(names), read_all(names)][1], store.read_all
    newer = write_shard(store, "r1", good("b", attempts=2), bad("c", "timeout"), good("a"))
    assert len(ledger.refresh().refresh()) == 3 and reads == [newer]
    rows = ledger.find(pa.array(["a", "b", "c", "d"]))
    assert rows[3] == -1
    assert [ledger.classes[fault] for fault in ledger.faults(rows[:3])] == ["ok", "ok", "timeout"]
    assert ledger.read(rows[2].item())["error_message"] == "c timeout"
    assert (ledger.of_run("r1"), ledger.of_run("r2"), ledger.of_run("r")) == ((3, 1), (0, 0), (0, 0))
    assert ledger.read(rows[0].item())["run_id"] == TokenCache(store.root).metadata("a")["run_id"]  # of two alike


def test_attempts_on_another_file_are_told_apart(store):
    for attempts, size in ((1, 5), (2, 5), (3, 7), (4, 7)):
        write_shard(store, f"r{attempts}", bad("a", attempts=attempts, source_size=size))
    write_shard(store, "r5", bad("b", attempts=4, source_size=5))
    ledger = Ledger(store).refresh()
    rows = ledger.find(pa.array(["a", "b"]))
    assert ledger.columns["attempts"][rows].tolist() == [4, 4]
    assert ledger.columns["earlier"][rows].tolist() == [2, 0]


def test_an_empty_cache(store):
    ledger = Ledger(store).refresh()
    assert len(ledger) == 0 and ledger.find(pa.array(["a"])).tolist() == [-1]
