"""Files that no live row needs are listed, and removed where nothing may name them: not where rows were lost."""

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_args

import pytest

from pipeline import TokenCache
from pipeline.cache.header import read_fingerprint
from pipeline.cache.merging import KEEP, merge_table_fully
from pipeline.errors import ShardFault
from pipeline.storage.stores import FileInfo, LocalStore, ObjectStore
from pipeline.verify.repair import UPLOAD_AGE, delete_leftovers
from pipeline.verify.report import Kind, Report
from tests.builders.caches import make_cache, random_tokens, write_shard
from tests.pipeline.damage import cut, flip, say_what_was_committed, shards
from tests.pipeline.verifying import NOW, SHAPE, kinds, verified, video_of


def files_of(store: LocalStore) -> set[str]:
    return {file.relative_to(store.root).as_posix() for file in store.root.rglob("*") if file.is_file()}


def test_what_lies_about_is_listed_and_no_problem(store):
    (one, two) = shards(store)
    shutil.copy(one, store.root / "tokens" / "run0-orphan.parquet")
    temporary = {".tmp-x-1", "runs/.tmp-x-1", "tokens/.tmp-x-1", "videos/.tmp-x-1"}
    for name in (*temporary, "answers/run-000000-aa.parquet"):
        (store.root / name).parent.mkdir(exist_ok=True)
        (store.root / name).write_bytes(b"PAR1")
    write_shard(store, "run2", video_of("a", 2, attempts=2))
    report = verified(store)
    assert report.exit_code == 0 and report.orphans == [("tokens/run0-orphan.parquet", one.stat().st_size)]
    assert {name for name, _ in report.leftovers} == temporary
    superseded = {TokenCache(store.root).metadata("b")["token_shard"]} ^ {f"tokens/{file.name}" for file in (one, two)}
    assert {name for name, _ in report.superseded} == superseded
    before, cleaned = files_of(store), verified(store, clean=True)
    assert {*cleaned.removed} == before - files_of(store) == {"tokens/run0-orphan.parquet", *temporary}
    assert (cleaned.orphans, {*cleaned.leftovers}) == (report.orphans, {*report.leftovers})
    assert verified(store).orphans == [] and TokenCache(store.root).get("a").metadata["run_id"] == "run2"


class Growing(LocalStore):
    """Its first listings of commits lack the first one, as a folder's may while files are added to it."""

    late = 2

    def list_files(self, folder: str) -> list[FileInfo]:
        return super().list_files(folder)[self._lacking(folder) :]

    def names(self, folder: str, suffix: str) -> list[str]:
        return super().names(folder, suffix)[self._lacking(folder) :]

    def _lacking(self, folder: str) -> int:
        lacks = folder == "videos" and self.late > 0
        self.late -= lacks
        return int(lacks)


def test_a_commit_that_a_listing_lacks_while_a_run_adds_others_is_not_lost(store):
    report = verified(Growing(store.root))
    assert (report.problems, report.exit_code, len(report.orphans)) == ([], 0, 1)


def test_what_a_commit_that_came_meanwhile_may_name_is_not_removed(store):
    shutil.copy(shards(store)[0], store.root / "tokens" / "run0-orphan.parquet")
    (orphan,) = verified(store).orphans
    left, commits = Report(str(store), orphans=[orphan]), store.names("videos", ".parquet")
    for keep, known, note in (
        (NOW, commits[:1], "was added meanwhile"),
        (KEEP, commits, "younger than 10 minutes stay"),
    ):
        delete_leftovers(store, left, keep, commits=known)
        assert left.removed == [] and any(note in said for said in left.notes)
    delete_leftovers(store, left, NOW, commits=commits)
    assert left.removed == [orphan.name]


def test_orphans_and_uploads_on_s3(server):
    store = ObjectStore(server.uri("c"), server.objects())
    make_cache(store, {f"v{i}": random_tokens(i, SHAPE) for i in range(3)})
    assert verified(store).problems == []
    (name,) = store.names("tokens", ".parquet")
    store.put("tokens/run-orphan.parquet", store.read(name))
    pending = server.client.create_multipart_upload(Bucket=server.bucket, Key="c/tokens/half.parquet")
    server.client.create_multipart_upload(Bucket=server.bucket, Key="elsewhere/half.parquet")
    report = verified(store)
    assert [n for n, _ in report.orphans] == ["tokens/run-orphan.parquet"] and report.exit_code == 0
    (upload,) = report.uploads
    assert (upload.uri, upload.upload_id) == (server.uri("c/tokens/half.parquet"), pending["UploadId"])
    young = Report(str(store), uploads=report.uploads)
    delete_leftovers(store, young, NOW, now=upload.started + UPLOAD_AGE / 2)
    assert young.removed == []
    assert datetime.now(UTC) - upload.started > timedelta(hours=1)  # by the server's clock
    orphan, half = verified(store, clean=True).removed
    assert orphan == "tokens/run-orphan.parquet" and "half.parquet" in half
    after = verified(store)
    assert (after.orphans, after.uploads, after.problems) == ([], [], [])
    store.put(name, store.read(name)[:-50])
    assert kinds(verified(store)) == ["footer"]
    assert len(list(ObjectStore(server.uri("elsewhere"), server.objects()).uploads())) == 1  # not below the prefix


def lose_table(store: LocalStore) -> None:
    shutil.rmtree(store.root / "videos")


def lose_table_and_runs(store: LocalStore) -> None:
    lose_table(store)
    shutil.rmtree(store.root / "runs")


def merged(store: LocalStore) -> Path:
    merge_table_fully(store, read_fingerprint(store))
    (file,) = shards(store, "videos")
    return file


FAULTS = {  # how rows are lost, the problem, and the videos that it costs
    "the table": (lose_table, "lost", "ab"),
    "the table and the runs": (lose_table_and_runs, "lost", "ab"),
    "a merged file": (lambda store: merged(store).unlink(), "lost", "ab"),
    "the end of a merged file": (lambda store: cut(merged(store), 100), "commit", "ab"),
    "a commit": (lambda store: shards(store, "videos")[0].unlink(), "lost", "a"),
    "a bit of a commit": (lambda store: flip(shards(store, "videos")[0], 700), "commit", "a"),
}


@pytest.mark.parametrize(("fault", "kind", "ids"), FAULTS.values(), ids=FAULTS)
def test_a_table_that_lost_rows_is_said_and_costs_no_token(store, fault, kind, ids):
    say_what_was_committed(store)
    tokens = {file.name for file in shards(store)}
    fault(store)
    report = verified(store, clean=True)
    assert {*kinds(report)} == {kind} and report.exit_code == 1 and report.removed == []
    assert any("may name it" in note for note in report.notes)
    said = "\n".join(report.lines())
    assert f"{kind}, " in said and Kind(kind).remedy in said
    record = json.loads(json.dumps(report.as_record()))
    assert {(problem["class"], problem["remedy"]) for problem in record["problems"]} == {(kind, Kind(kind).remedy)}
    repaired = verified(store, repair=True)
    assert kinds(repaired) == [] and repaired.exit_code == 0
    assert not any("a run writes here" in note for note in repaired.notes)  # it is the repair itself
    assert {*TokenCache(store.root).failed} >= {*ids}
    assert TokenCache(store.root).video_ids == [name for name in "ab" if name not in ids]
    assert {file.name for file in shards(store)} == tokens  # a copy of the table may turn up


def test_what_a_first_run_left_that_was_killed_is_no_loss(store):
    """Its record is there and names no commit."""
    lose_table(store)
    store.put("runs/run.json", json.dumps({"run_id": "run", "status": "running"}).encode())
    report = verified(store, clean=True)
    assert report.exit_code == 0 and len(report.removed) == 2


def test_every_fault_of_a_shard_is_a_class_with_a_remedy():
    assert all(Kind(fault).remedy for fault in get_args(ShardFault)) and all(kind.remedy for kind in Kind)
