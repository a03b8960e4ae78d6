"""The live rows of few videos and of none, and the ledger of a run; test_merging.py has the rule of the live row."""

from itertools import pairwise

import pyarrow as pa
import pytest

from pipeline import TokenCache
from pipeline.cache.live import _LEDGER_READS, Ledger, _assign_numbers
from pipeline.cache.merging import merge_table_fully
from pipeline.cache.schema import VIDEO_SCHEMA
from pipeline.inspect.report import list_failed_videos
from pipeline.prune.summary import summarize_videos
from tests.builders.caches import make_cache, random_tokens, read_live, write_header
from tests.pipeline.cache.table_rows import commit_failures, commit_rows
from tests.pipeline.damage import Merging


@pytest.fixture
def store(tmp_path):
    return write_header(tmp_path)


def test_a_cache_without_a_commit_has_columns_and_no_rows(store):
    table, ledger = read_live(store, ("video_id", "status")), Ledger(store).refresh()
    assert (table.schema.names, len(table)) == (["video_id", "status", "file", "row"], 0)
    assert len(ledger) == 0 and ledger.find(pa.array(["a"])).tolist() == [-1]


def test_more_text_than_offsets_of_32_bits_reach(tmp_path, monkeypatch):
    """Taking rows of it raised "offset overflow", at about 27 million videos."""
    store = make_cache(tmp_path, {"v": random_tokens(0), "w": random_tokens(1)})
    monkeypatch.setattr("pipeline.cache.live._MAX_TEXT_BYTES", 1)
    live = read_live(store)
    assert live.schema.field("video_id").type == pa.large_string()
    assert live["video_id"].to_pylist() == ["v", "w"] == TokenCache(tmp_path).video_ids
    assert TokenCache(tmp_path).metadata("w")["status"] == "ok"


def row(video_id, error_class=None, attempts=1):
    status = "failed" if error_class else "ok"
    return {"video_id": video_id, "status": status, "attempts": attempts, "error_class": error_class}


def test_a_ledger_reads_what_was_committed_since_and_nothing_twice(store):
    commit_rows(store, "r2", [row("a"), row("b", "crash")])
    ledger = Ledger(store).refresh()
    assert sum(column.nbytes for column in ledger.columns.values()) == 2 * 100
    reads = []
    store.read_all, read_all = lambda names: [reads.extend(names), read_all(names)][1], store.read_all
    newer = commit_rows(store, "r1", [row("b", attempts=2), row("c", "timeout"), row("a")])
    assert len(ledger.refresh().refresh()) == 3 and reads == [newer]
    rows = ledger.find(pa.array(["a", "b", "c", "d"]))
    assert rows[3] == -1
    assert [ledger.classes[fault] for fault in ledger.columns["fault"][rows[:3]]] == ["ok", "ok", "timeout"]
    assert [ledger.count_run_rows(run) for run in ("r1", "r2", "r")] == [(3, 1), (0, 0), (0, 0)]
    assert ledger.read(rows[0].item())["run_id"] == TokenCache(store.root).metadata("a")["run_id"]  # of two alike


def test_a_ledger_is_read_whatever_is_merged_away_meanwhile(store):
    """It raised FileNotFoundError, which ended jobs.inspect, and a run beside another one."""
    commit_failures(store, "r", "abcd")
    merge_table_fully(store, None)
    for reads in range(20):
        for name in "efgh":
            commit_failures(store, f"{reads}{name}", name)
        merging = Merging(store.root, reads)
        ledger = Ledger(merging).refresh()
        assert sorted(ledger.read(place)["video_id"] for place in range(len(ledger))) == [*"abcdefgh"]
        if not merging.is_merged:
            break
    assert reads > 5


def test_the_failures_are_listed_whatever_is_merged_away_meanwhile(store):
    """jobs.inspect --failed ended with "No such file"; jobs.recode and jobs.merge read the table alike."""
    commit_failures(store, "r", "abcd")
    merge_table_fully(store, None)
    cache = TokenCache(store.root)
    for reads in range(20):
        for name in "efgh":
            commit_failures(store, f"{reads}{name}", name)
        merging = Merging(store.root, reads)
        cache.store = merging
        assert [row["video_id"] for row in list_failed_videos(cache)] == [*"abcdefgh"]
        if not merging.is_merged:
            break
    assert reads > 5


def test_a_summary_reads_rows_that_the_run_has_merged_since_it_began(store):
    """A run that merged the row of an earlier failure away failed at its end, with all videos committed."""
    commit_rows(store, "r1", [row("a"), row("b", "crash")])
    ledger = Ledger(store).refresh()
    commit_rows(store, "r2", [row("c")])
    merge_table_fully(store, None)
    summary = summarize_videos(ledger.refresh())
    assert (summary.n_ok, summary.examples) == (2, {"crash": ("b", "")})
    for name in store.names("videos", ".parquet"):
        store.delete(name)
    with pytest.raises(FileNotFoundError):  # nobody has merged these rows
        summarize_videos(ledger.refresh())


def test_rows_behind_an_error_are_read_by_the_next_refresh(store, monkeypatch):
    """The files that were read before the error counted as read, and their rows were lost."""
    ledger = Ledger(store).refresh()
    commit_rows(store, "r1", [row("a")])
    commit_rows(store, "r2", [row("b")])
    convert, n_calls = ledger._to_columns, iter(range(9))

    def fail_first(*arguments):
        if next(n_calls) == 0:
            raise OSError("the store is away")
        return convert(*arguments)

    monkeypatch.setattr(ledger, "_to_columns", fail_first)
    with pytest.raises(OSError, match="away"):
        ledger.refresh()
    assert len(ledger) == 0 and len(ledger.refresh()) == 2


def test_the_columns_of_the_ledger_lie_in_three_stretches_of_a_file():
    """Each stretch is a read of every row group: a column elsewhere would cost large caches one more."""
    is_read = [name in _LEDGER_READS for name in VIDEO_SCHEMA.names]
    assert sum(is_read) == len(set(_LEDGER_READS)) == len(_LEDGER_READS)
    assert sum(now and not before for before, now in pairwise([False, *is_read])) == 3


def test_texts_past_the_limit_share_the_last_number():
    known = ["a"]
    numbers = _assign_numbers(pa.chunked_array([["b", "c"], ["d", "a"]]), known, 3)
    assert (numbers.tolist(), known) == ([1, 2, 2, 0], ["a", "b", "c"])
    assert _assign_numbers(pa.chunked_array([["d", "c"]]), known, 3).tolist() == [2, 2]
