"""Which row of a video counts: one rule, in the driver's ledger and for readers."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import TokenCache
from pipeline.cache.live import Ledger, _assign_numbers
from pipeline.cache.table import VideosTable, list_table_files, read_file
from pipeline.cache.writer import VideoItem
from pipeline.errors import VideoFault
from tests.pipeline.caches import (
    encoded,
    encoded_failure,
    make_cache,
    random_tokens,
    read_live,
    write_header,
    write_shard,
)

TOKENS = random_tokens(0)


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
    rows = [cache.metadata("c"), *(row for row in read_file_rows(store) if row["video_id"] == "c")]
    assert len(rows) == 3 and rows[0]["tie_break"] == min(row["tie_break"] for row in rows)
    assert cache.failed == {"b": "timeout"}


def read_file_rows(store):
    return [row for file in list_table_files(store) for row in read_file(store, file).to_pylist()]


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "video_id": st.sampled_from(["a", "b", "ä", "a0"]),
            "status": st.sampled_from(["ok", "failed", "removed"]),
            "attempts": st.integers(1, 3),
            "run": st.sampled_from(["r1", "r10", "r2", "r3"]),
        }
    ),
    min_size=1,
    unique_by=lambda row: (row["video_id"], row["run"]),  # a file holds a video once
)


def expected_live(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rule in plain Python: removed before ok before failed, most attempts, most rewritten, smallest tie_break."""
    live = {}
    order = ["removed", "ok", "failed"]
    for row in sorted(
        rows, key=lambda row: (order.index(row["status"]), -row["attempts"], -row["rewritten"], row["tie_break"])
    ):
        live.setdefault(row["video_id"], row)
    return [live[name] for name in sorted(live)]


@settings(deadline=None, max_examples=25)
@given(rows=ROWS)
def test_readers_and_the_ledger_of_a_run_agree_on_the_rule(tmp_path_factory, rows):
    store = write_header(tmp_path_factory.mktemp("c"))
    by_run: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_run.setdefault(row["run"], []).append(row)
    for run_id, mine in by_run.items():
        write_shard(store, run_id, *(video_of(row) for row in mine))
    names = ("video_id", "status", "attempts", "run_id")
    wanted = [tuple(row[name] for name in names) for row in expected_live(read_file_rows(store))]
    assert len(wanted) == len({row["video_id"] for row in rows})
    live = read_live(store).to_pylist()
    table = VideosTable(store)
    assert [tuple(table.read_row(row["shard"], row["row"])[name] for name in names) for row in live] == wanted
    ledger = Ledger(store).refresh()
    places = ledger.find(pa.array([name for name, *_ in wanted]))
    assert [tuple(ledger.read(place)[name] for name in names) for place in places.tolist()] == wanted
    cache = TokenCache(store.root)
    assert [tuple(cache.metadata(name)[key] for key in names) for name, *_ in wanted] == wanted


def video_of(row: dict[str, Any]) -> VideoItem:
    name, attempts = row["video_id"], row["attempts"]
    if row["status"] == "ok":
        return encoded(name, TOKENS, 0.25, "uniform", attempts=attempts)
    failed = encoded_failure(name, VideoFault("corrupt", "x"), attempts=attempts)
    return replace(failed, record={**failed.record, "status": row["status"]})


def test_a_cache_without_a_commit_has_columns_and_no_rows(tmp_path):
    table = read_live(write_header(tmp_path), ("video_id", "status"))
    assert (table.schema.names, len(table)) == (["video_id", "status", "shard", "row"], 0)


def test_more_text_than_offsets_of_32_bits_reach(tmp_path, monkeypatch):
    """Taking rows of it raised "offset overflow", at about 27 million videos."""
    store = make_cache(tmp_path, {"v": random_tokens(0), "w": random_tokens(1)})
    monkeypatch.setattr("pipeline.cache.live._MAX_TEXT_BYTES", 1)
    live = read_live(store)
    assert live.schema.field("video_id").type == pa.large_string()
    assert live["video_id"].to_pylist() == ["v", "w"] == TokenCache(tmp_path).video_ids
    assert TokenCache(tmp_path).metadata("w")["status"] == "ok"


def good(name, **more):
    return encoded(name, TOKENS, 0.25, "gstep", **more)


def bad(name, fault="crash", **more):
    return encoded_failure(name, VideoFault(fault, f"{name} {fault}"), **more)


@pytest.fixture
def store(tmp_path):
    return write_header(tmp_path)


def test_a_ledger_takes_96_bytes_a_video(store):
    write_shard(store, "r1", good("a"))
    ledger = Ledger(store).refresh()
    assert sum(column.nbytes for column in ledger.columns.values()) == 96


def test_the_live_row_of_the_ledger_is_the_one_that_readers_take(store):
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
    assert [ledger.classes[fault] for fault in ledger.columns["fault"][rows[:3]]] == ["ok", "ok", "timeout"]
    assert ledger.read(rows[2].item())["error_message"] == "c timeout"
    assert (ledger.count_run_rows("r1"), ledger.count_run_rows("r2"), ledger.count_run_rows("r")) == (
        (3, 1),
        (0, 0),
        (0, 0),
    )
    assert ledger.read(rows[0].item())["run_id"] == TokenCache(store.root).metadata("a")["run_id"]  # of two alike


def test_attempts_on_another_file_are_told_apart(store):
    for attempts, size in ((1, 5), (2, 5), (3, 7), (4, 7)):
        write_shard(store, f"r{attempts}", bad("a", attempts=attempts, source_size=size))
    write_shard(store, "r5", bad("b", attempts=4, source_size=5))
    ledger = Ledger(store).refresh()
    rows = ledger.find(pa.array(["a", "b"]))
    assert ledger.columns["attempts"][rows].tolist() == [4, 4]
    assert ledger.columns["earlier"][rows].tolist() == [2, 0]


def test_a_ledger_of_an_empty_cache(store):
    ledger = Ledger(store).refresh()
    assert len(ledger) == 0 and ledger.find(pa.array(["a"])).tolist() == [-1]


def test_texts_past_the_limit_share_the_last_number():
    known = ["a"]
    numbers = _assign_numbers(pa.chunked_array([["b", "c"], ["d", "a"]]), known, 3)
    assert (numbers.tolist(), known) == ([1, 2, 2, 0], ["a", "b", "c"])
    assert _assign_numbers(pa.chunked_array([["d", "c"]]), known, 3).tolist() == [2, 2]
