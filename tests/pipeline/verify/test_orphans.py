"""Files that no live row needs: listed, no problem, and removed only where nothing may name them."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pipeline import TokenCache
from pipeline.cache.merging import KEEP
from pipeline.storage.stores import FileInfo, LocalStore, ObjectStore
from pipeline.verify.repair import UPLOAD_AGE, delete_leftovers
from pipeline.verify.report import Report
from tests.builders.caches import make_cache, random_tokens, write_shard
from tests.pipeline.damage import shards
from tests.pipeline.verifying import SHAPE, kinds, verified, video_of

NOW = timedelta(0)


def test_what_lies_about_is_listed_and_no_problem(store):
    (one, two) = shards(store)
    shutil.copy(one, store.root / "tokens" / "run0-orphan.parquet")
    for folder in ("tokens", "videos", "runs", "."):
        (store.root / folder).mkdir(exist_ok=True)
        (store.root / folder / ".tmp-x-1").write_bytes(b"PAR1")
    (store.root / "answers").mkdir()
    (store.root / "answers" / "run-000000-aa.parquet").write_bytes(b"not ours")
    write_shard(store, "run2", video_of("a", 2, attempts=2))
    report = verified(store)
    assert report.exit_code == 0
    assert [name for name, _ in report.orphans] == ["tokens/run0-orphan.parquet"]
    assert report.orphans[0].size == one.stat().st_size
    assert sorted(name for name, _ in report.leftovers) == [
        ".tmp-x-1",
        *(f"{f}/.tmp-x-1" for f in ("runs", "tokens", "videos")),
    ]
    superseded = {TokenCache(store.root).metadata("b")["token_shard"]} ^ {f"tokens/{file.name}" for file in (one, two)}
    assert {name for name, _ in report.superseded} == superseded
    before = {file for file in store.root.rglob("*") if file.is_file()}
    cleaned = verified(store, clean=True, keep=NOW)
    gone = before - {file for file in store.root.rglob("*") if file.is_file()}
    assert sorted(cleaned.removed) == sorted(file.relative_to(store.root).as_posix() for file in gone)
    assert {*report.orphans, *report.leftovers} == {(n, s) for n, s in (*cleaned.orphans, *cleaned.leftovers)}
    assert len(gone) == 5 and verified(store).orphans == []
    assert TokenCache(store.root).get("a").metadata["run_id"] == "run2"


class Growing(LocalStore):
    """Its first listings of commits lack the first one, as a folder's may while files are added to it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.late = 2

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
    report = verified(store)
    shutil.copy(shards(store)[0], store.root / "tokens" / "run0-orphan.parquet")
    (orphan,) = verified(store).orphans
    left = Report(str(store), orphans=[orphan])
    delete_leftovers(store, left, NOW, commits=store.names("videos", ".parquet")[:1])
    assert left.removed == [] and any("was added meanwhile" in note for note in left.notes)
    delete_leftovers(store, left, KEEP, commits=store.names("videos", ".parquet"))
    assert left.removed == [] and any("younger than 10 minutes stay" in note for note in left.notes)
    delete_leftovers(store, left, NOW, commits=store.names("videos", ".parquet"))
    assert left.removed == [orphan.name] and report.orphans == []


def test_the_same_on_s3(server):
    store = ObjectStore(server.uri("c"), server.objects())
    make_cache(store, {f"v{i}": random_tokens(i, SHAPE) for i in range(3)})
    assert verified(store).problems == []
    (name,) = store.names("tokens", ".parquet")
    store.put("tokens/run-orphan.parquet", store.read(name))
    pending = server.client.create_multipart_upload(Bucket=server.bucket, Key="c/tokens/half.parquet")
    server.client.create_multipart_upload(Bucket=server.bucket, Key="elsewhere/half.parquet")
    report = verified(store)
    assert [n for n, _ in report.orphans] == ["tokens/run-orphan.parquet"] and report.exit_code == 0
    assert [(u.uri, u.upload_id) for u in report.uploads] == [
        (server.uri("c/tokens/half.parquet"), pending["UploadId"])
    ]
    young = Report(str(store), uploads=report.uploads)
    delete_leftovers(store, young, NOW, now=report.uploads[0].started + UPLOAD_AGE / 2)
    assert young.removed == []
    assert datetime.now(UTC) - report.uploads[0].started > timedelta(hours=1)  # by the server's clock
    cleaned = verified(store, clean=True, keep=NOW)
    assert cleaned.removed[0] == "tokens/run-orphan.parquet" and "half.parquet" in cleaned.removed[1]
    after = verified(store)
    assert (after.orphans, after.uploads, after.problems) == ([], [], [])
    store.put(name, store.read(name)[:-50])
    assert kinds(verified(store)) == ["footer"]
    others = ObjectStore(server.uri("elsewhere"), server.objects()).uploads()
    assert len(list(others)) == 1  # not below the cache's prefix
