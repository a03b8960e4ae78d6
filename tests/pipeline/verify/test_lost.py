"""A table that lost files: it is said on the screen, in the JSON and by a repair, and no token is removed for it."""

import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from typing import get_args

import pytest

from pipeline import TokenCache
from pipeline.cache.header import read_fingerprint
from pipeline.cache.merging import merge_table_fully
from pipeline.errors import ShardFault
from pipeline.storage.stores import LocalStore
from pipeline.verify.report import Kind
from tests.pipeline.damage import flip, say_what_was_committed, shards
from tests.pipeline.verifying import kinds, verified

NOW = timedelta(0)


def lose_table(store: LocalStore) -> None:
    shutil.rmtree(store.root / "videos")


def lose_table_and_runs(store: LocalStore) -> None:
    lose_table(store)
    shutil.rmtree(store.root / "runs")


def lose_merged_file(store: LocalStore) -> None:
    merge_table_fully(store, read_fingerprint(store))
    shards(store, "videos")[0].unlink()


def cut_merged_file(store: LocalStore) -> None:
    merge_table_fully(store, read_fingerprint(store))
    (file,) = shards(store, "videos")
    file.write_bytes(file.read_bytes()[:-100])


def lose_commit(store: LocalStore) -> None:
    shards(store, "videos")[0].unlink()


def flip_commit(store: LocalStore) -> None:
    flip(shards(store, "videos")[0], 700)


FAULTS: dict[Callable[[LocalStore], None], tuple[str, str]] = {  # the problem, and the videos that it costs
    lose_table: ("lost", "ab"),
    lose_table_and_runs: ("lost", "ab"),
    lose_merged_file: ("lost", "ab"),
    cut_merged_file: ("commit", "ab"),
    lose_commit: ("lost", "a"),
    flip_commit: ("commit", "a"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_table_that_lost_rows_is_said_and_costs_no_token(store, fault):
    kind, ids = FAULTS[fault]
    say_what_was_committed(store)
    tokens = sorted(file.name for file in shards(store))
    fault(store)
    report = verified(store, clean=True, keep=NOW)
    assert set(kinds(report)) == {kind} and report.exit_code == 1 and report.removed == []
    assert any("may name it" in note for note in report.notes)
    said = "\n".join(report.lines())
    assert f"{kind}, " in said and Kind(kind).remedy in said
    record = json.loads(json.dumps(report.as_record()))
    assert {(problem["class"], problem["remedy"]) for problem in record["problems"]} == {(kind, Kind(kind).remedy)}
    repaired = verified(store, repair=True, keep=NOW)
    assert kinds(repaired) == [] and repaired.exit_code == 0
    assert not any("a run writes here" in note for note in repaired.notes)  # it is the repair itself
    assert set(TokenCache(store.root).failed) >= {*ids}
    assert TokenCache(store.root).video_ids == [name for name in "ab" if name not in ids]
    assert sorted(file.name for file in shards(store)) == tokens  # a copy of the table may turn up


def test_what_a_first_run_left_that_was_killed_is_no_loss(store):
    """Its record is there and names no commit."""
    lose_table(store)
    store.put("runs/run.json", json.dumps({"run_id": "run", "status": "running"}).encode())
    report = verified(store, clean=True, keep=NOW)
    assert report.exit_code == 0 and len(report.removed) == 2


def test_every_fault_of_a_shard_is_a_class_with_a_remedy():
    assert all(Kind(fault).remedy for fault in get_args(ShardFault)) and all(kind.remedy for kind in Kind)
