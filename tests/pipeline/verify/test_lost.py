"""A table that lost files: it is said on the screen, in the JSON and by a repair, and no token is removed for it."""

import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from typing import get_args

import pytest

from pipeline import TokenCache
from pipeline.cache.header import made_with
from pipeline.cache.merging import merge
from pipeline.errors import ShardFault
from pipeline.storage.stores import LocalStore
from pipeline.verify.report import Kind
from tests.pipeline.damage import flip, say_what_was_committed, shards
from tests.pipeline.verifying import kinds, verified

NOW = timedelta(0)


def merged(store: LocalStore) -> None:
    for _ in range(2):
        merge(store, made_with(store), everything=True, keep=NOW)


def without_table(store: LocalStore) -> None:
    shutil.rmtree(store.root / "videos")


def without_table_and_runs(store: LocalStore) -> None:
    without_table(store)
    shutil.rmtree(store.root / "runs")


def without_the_merged_file(store: LocalStore) -> None:
    merged(store)
    shards(store, "videos")[0].unlink()


def with_a_truncated_merged_file(store: LocalStore) -> None:
    merged(store)
    (file,) = shards(store, "videos")
    file.write_bytes(file.read_bytes()[:-100])


def with_flipped_bits(store: LocalStore) -> None:
    for file in shards(store, "videos"):
        flip(file, 700)


FAULTS: dict[Callable[[LocalStore], None], str] = {
    without_table: "lost",
    without_table_and_runs: "lost",
    without_the_merged_file: "lost",
    with_a_truncated_merged_file: "commit",
    with_flipped_bits: "commit",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_table_that_is_gone_is_said_and_costs_no_token(store, fault):
    say_what_was_committed(store)
    tokens = sorted(file.name for file in shards(store))
    fault(store)
    report = verified(store, clean=True, keep=NOW)
    assert set(kinds(report)) == {FAULTS[fault]} and report.exit_code == 1 and report.removed == []
    said = "\n".join(report.lines())
    assert f"{FAULTS[fault]}, " in said and Kind(FAULTS[fault]).remedy in said
    record = json.loads(json.dumps(report.as_record()))
    assert {(problem["class"], problem["remedy"]) for problem in record["problems"]} == {
        (FAULTS[fault], Kind(FAULTS[fault]).remedy)
    }
    repaired = verified(store, repair=True, keep=NOW)
    assert kinds(repaired) == [] and repaired.exit_code == 0
    assert not any("a run writes here" in note for note in repaired.notes)  # it is the repair itself
    assert set(TokenCache(store.root).failed) >= {"a", "b"} and TokenCache(store.root).video_ids == []
    assert sorted(file.name for file in shards(store)) == tokens  # a copy of the table may turn up


def test_what_a_first_run_left_that_was_killed_is_no_loss(store):
    """Its record is there and names no commit."""
    without_table(store)
    store.put("runs/run.json", json.dumps({"run_id": "run", "status": "running"}).encode())
    report = verified(store, clean=True, keep=NOW)
    assert report.exit_code == 0 and len(report.removed) == 2


def test_every_fault_of_a_shard_is_a_class_with_a_remedy():
    assert all(Kind(fault).remedy for fault in get_args(ShardFault)) and all(kind.remedy for kind in Kind)
