"""What ``jobs.verify`` finds wrong with the compacted index."""

from __future__ import annotations

import pytest
from rich.console import Console

from pipeline.cache.index.compaction import compact
from pipeline.cache.index.files import INDEX, ROOT
from pipeline.cache.ledger import Ledger
from pipeline.storage.lock import cache_lock
from pipeline.verify.verify import Request, verify
from tests.pipeline.caches import encoded, random_tokens, write_header, write_shard


@pytest.fixture
def store(tmp_path):
    store = write_header(tmp_path, hidden_size=16, deepstack_levels=0)
    for run, tokens in (("r1", random_tokens(0)), ("r2", random_tokens(1))):
        write_shard(store, run, encoded("a", tokens, 0.25, "gstep", attempts=int(run[1:])))
    write_shard(store, "r3", encoded("b", random_tokens(2), 0.25, "gstep"))
    return store


def make_index(store, ledger=None):
    with cache_lock(store, "compact", print) as lock:
        compact(store, lock, ledger)


def found(store):
    report = verify(store, Request(), Console(quiet=True))
    return [(problem.kind, problem.what) for problem in report.problems], report


def test_one_that_says_what_the_shards_say_is_well_also_beside_newer_shards(store):
    make_index(store)
    write_shard(store, "r4", encoded("b", random_tokens(3), 0.25, "gstep", attempts=2))
    problems, report = found(store)
    assert problems == [] and report.counts["indexed_shards"] == 3
    assert not report.leftovers and not report.orphans


def test_one_that_says_another_row_is_found(store):
    ledger = Ledger(store).refresh()
    (row,) = (row for row in range(2) if ledger.read(row)["video_id"] == "a")
    ledger.columns["place"][row] = 0  # r1's, which r2's has superseded
    make_index(store, ledger)
    ((kind, what),), _ = found(store)
    assert kind == "index" and "another row of a than the videos shards; python -m jobs.compact" in what


def test_one_that_covers_what_is_gone_is_found(store):
    make_index(store)
    store.delete(store.names("videos", ".parquet")[0])
    assert "index" in {kind for kind, _ in found(store)[0]}


@pytest.mark.parametrize("which", [ROOT, INDEX])
def test_one_that_is_damaged_is_found(store, which):
    make_index(store)
    name = ROOT if which == ROOT else store.listed(INDEX)[0].name
    data = bytearray(store.read(name))
    data[len(data) // 2] ^= 1
    (store.root / name).write_bytes(data)
    assert [kind for kind, _ in found(store)[0]] == ["index"]
