"""Which row of a video counts, and that no damaged shard is read."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import CorruptShard, TokenCache
from pipeline.cache.ledger import Ledger
from pipeline.cache.live_rows import VideoRows, check_content, live_rows, read_live, shard_name
from pipeline.cache.writer import PrunedVideo
from pipeline.errors import VideoFault
from pipeline.storage.stores import LocalStore
from tests.pipeline.caches import encoded, encoded_failure, make_cache, random_tokens, write_header, write_shard

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


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "video_id": st.sampled_from(["a", "b", "ä", "a0"]),
            "status": st.sampled_from(["ok", "failed"]),
            "attempts": st.integers(1, 3),
            "shard": st.sampled_from(["videos/r1-0", "videos/r10-0", "videos/r2-0", "videos/r3-0"]),
        }
    ),
    min_size=1,
    unique_by=lambda row: (row["video_id"], row["shard"]),  # a shard holds a video once
)


def expected_live(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rule in plain Python: ok before failed, most attempts, smallest shard name."""
    live = {}
    for row in sorted(rows, key=lambda row: (row["status"] != "ok", -row["attempts"], row["shard"])):
        live.setdefault(row["video_id"], row)
    return [live[name] for name in sorted(live)]


@settings(deadline=None)
@given(rows=ROWS)
def test_the_live_row_is_by_the_rule(rows):
    assert live_rows(pa.Table.from_pylist(rows)).to_pylist() == expected_live(rows)


@settings(deadline=None, max_examples=10)
@given(rows=ROWS)
def test_readers_and_the_ledger_of_a_run_agree_on_it(tmp_path_factory, rows):
    """On real shards, whose names begin with the run and so sort by it."""
    store = write_header(tmp_path_factory.mktemp("c"))
    by_run: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_run.setdefault(row["shard"].partition("/")[2].partition("-")[0], []).append(row)
    for run_id, mine in by_run.items():
        write_shard(store, run_id, *(video_of(row) for row in mine))
    wanted = [(row["video_id"], row["status"], row["attempts"], run_of(row["shard"])) for row in expected_live(rows)]
    live = read_live(store).to_pylist()
    assert [(row["video_id"], row["status"], row["attempts"], run_of(row["shard"])) for row in live] == wanted
    ledger = Ledger(store).refresh()
    places = ledger.find(pa.array([name for name, *_ in wanted]))
    read = [ledger.read(place) for place in places.tolist()]
    assert [(row["video_id"], row["status"], row["attempts"], row["run_id"]) for row in read] == wanted
    full = VideoRows(store)
    assert [full(row["shard"], row["row"])["run_id"] for row in live] == [run_id for *_, run_id in wanted]


def video_of(row: dict[str, Any]) -> PrunedVideo:
    name, attempts = row["video_id"], row["attempts"]
    if row["status"] == "ok":
        return encoded(name, TOKENS, 0.25, "uniform", attempts=attempts)
    return encoded_failure(name, VideoFault("corrupt", "x"), attempts=attempts)


def run_of(shard: str) -> str:
    return shard.removeprefix("videos/").partition("-")[0]


def test_the_rule_goes_for_questions_too():
    rows = [
        {"question_id": "q", "status": "failed", "attempts": 2, "shard": "s1"},
        {"question_id": "q", "status": "ok", "attempts": 1, "shard": "s2"},
    ]
    assert live_rows(pa.Table.from_pylist(rows), ["question_id"]).to_pylist() == rows[1:]
    both = [{**rows[0], "pruning": "a"}, {**rows[1], "pruning": None}, {**rows[1], "pruning": "a"}]
    live = live_rows(pa.Table.from_pylist(both), ["question_id", "pruning"])
    assert {(row["pruning"], row["status"]) for row in live.to_pylist()} == {("a", "ok"), (None, "ok")}
    assert len(live_rows(pa.Table.from_pylist(rows).slice(0, 0), ["question_id"])) == 0


def test_a_cache_without_a_commit_has_columns_and_no_rows(tmp_path):
    table = read_live(write_header(tmp_path), ("video_id", "status"))
    assert (table.schema.names, len(table)) == (["video_id", "status", "shard", "row"], 0)


def test_many_small_shards_are_read_as_a_few(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.cache.live_rows._SHARDS_AT_ONCE", 3)
    store = write_header(tmp_path)
    for number in range(8):
        fault = VideoFault("corrupt", "x")
        write_shard(store, "run", *(encoded_failure(f"v{number}{i}", fault) for i in range(2)))
    live = read_live(store).to_pylist()
    assert [row["video_id"] for row in live] == [f"v{number}{i}" for number in range(8) for i in range(2)]
    assert [row["row"] for row in live] == [0, 1] * 8


def test_the_name_of_a_shard_is_its_content(tmp_path):
    store, data = LocalStore(tmp_path), b"content"
    name = shard_name("videos", "run", 7, data)
    assert name.startswith("videos/run-000007-") and name.endswith(".parquet")
    check_content(store, name, data)
    with pytest.raises(CorruptShard, match="restore the file") as caught:
        check_content(store, name, b"content!")
    assert caught.value.kind == "commit"


def test_more_text_than_offsets_of_32_bits_reach(tmp_path, monkeypatch):
    """Taking rows of it raised "offset overflow", at about 27 million videos."""
    store = make_cache(tmp_path, {"v": random_tokens(0), "w": random_tokens(1)})
    monkeypatch.setattr("pipeline.cache.live_rows._MOST_TEXT", 1)
    live = read_live(store)
    assert live.schema.field("video_id").type == pa.large_string()
    assert live["video_id"].to_pylist() == ["v", "w"] == TokenCache(tmp_path).video_ids
    assert TokenCache(tmp_path).metadata("w")["status"] == "ok"
