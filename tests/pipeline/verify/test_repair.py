"""A repair marks what is damaged and keeps what is sound, wherever it is ended; files that no row needs are listed."""

import errno
import json
import shutil
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import TokenCache
from pipeline.cache.header import read_fingerprint
from pipeline.cache.live import LiveVideos
from pipeline.cache.merging import KEEP, merge_table_files, merge_table_fully
from pipeline.errors import RunFailed, ShardFault, UsageError
from pipeline.storage.random_access import LocalFile
from pipeline.storage.stores import FileInfo, LocalStore, ObjectStore
from pipeline.verify.repair import UPLOAD_AGE, delete_leftovers
from pipeline.verify.report import KEPT_IN, Kind, Report
from tests.builders.caches import make_cache, random_tokens, write_header, write_shard
from tests.pipeline import damage, verifying
from tests.pipeline.damage import cut, flip_token, rewrite_row, say_what_was_committed, shards
from tests.pipeline.verifying import NOW, SHAPE, assert_tokens, kinds, verified, video_of


def without(tokens, lost: str):
    return {name: values for name, values in tokens.items() if name not in lost}


def token_shard(store, video_id: str) -> Path:
    return store.root / TokenCache(store.root).metadata(video_id)["token_shard"]


def commit_of(store, video_id: str) -> Path:
    return store.root / LiveVideos.open(store).find(video_id).file


HARM = {  # and the videos that it costs
    "a token": (lambda s: flip_token(s.root, "b"), "b"),
    "a token of a table in sorted files and still in small ones": (
        lambda s: (merge_table_files(s, None, everything=True), flip_token(s.root, "b")),
        "b",
    ),
    "a token shard cut": (lambda s: cut(token_shard(s, "a"), 1), "abc"),
    "a token shard gone": (lambda s: token_shard(s, "a").unlink(), "abc"),
    "tokens of which an earlier attempt is there": (lambda s: token_shard(s, "f").unlink(), "f"),
    "a row without tokens of which an earlier attempt is there": (
        lambda s: rewrite_row(s, "f", lambda row: row.update(token_shard=None)),
        "f",
    ),
    "a row that contradicts itself": (lambda s: rewrite_row(s, "a", lambda r: r.update(n_total=r["n_total"] + 1)), "a"),
    "a commit gone": (lambda s: commit_of(s, "a").unlink(), "abc"),
    "several commits of a run gone": (lambda s: [file.unlink() for file in map(commit_of, [s] * 2, "ad")], "abcd"),
    "a file that no run wrote": (lambda s: s.put("videos/notes.parquet", b"not ours"), ""),
}


@pytest.mark.parametrize("harm", HARM)
def test_what_is_harmed_is_marked_and_its_neighbours_stay_bit_for_bit(store, tokens, harm):
    """An earlier attempt at a harmed video does not come back: its tokens may be of another file."""
    act, lost = HARM[harm]
    say_what_was_committed(store)
    act(store)
    report = verified(store, repair=True)
    assert (kinds(report), report.exit_code) == ([], 0)
    assert_tokens(store.root, without(tokens, lost))
    cache = TokenCache(store.root)
    assert {name: fault for name, fault in cache.failed.items() if name != "bad"} == dict.fromkeys(lost, "io")
    assert all("marked by a repair" in cache.metadata(name)["error_message"] for name in lost)
    for name in report.repaired.replaced:
        assert not store.exists(name) and (store.root / KEPT_IN / Path(name).name).exists()
    merge_table_fully(store, None)
    assert TokenCache(store.root).failed == cache.failed and len(shards(store, "videos")) == 1


def test_what_was_replaced_is_kept_and_named(store):
    flip_token(store.root, "b")
    row = TokenCache(store.root).metadata("b")
    report = verified(store, repair=True)
    assert [problem.kind for problem in report.found] == ["damaged"] and report.repaired.moved == 2
    assert [(video.video_id, video.uri) for video in report.repaired.marked] == [("b", "/videos/b")]
    (name,) = report.repaired.replaced
    assert row["checksum"] in pq.read_table(store.root / KEPT_IN / Path(name).name)["checksum"].to_pylist()
    now = TokenCache(store.root).metadata("b")
    assert (now["status"], now["attempts"], now["uri"]) == ("failed", 1, "/videos/b")


def test_tokens_of_a_lost_commit_stay_until_they_are_cleaned(store):
    """A copy of the commit may turn up."""
    file = token_shard(store, "a")
    say_what_was_committed(store)
    commit_of(store, "a").unlink()
    report = verified(store, repair=True)
    assert file.exists() and [orphan.name for orphan in report.orphans] == [f"tokens/{file.name}"]
    assert "--clean" in report.notes[-1]
    verified(store, clean=True)
    assert not file.exists() and kinds(verified(store)) == []


def test_a_sound_cache_is_only_cleaned_and_a_removed_video_stays_so(store, tokens):
    shutil.copy(token_shard(store, "a"), store.root / "tokens" / "run0-orphan.parquet")
    report = verified(store, repair=True)
    assert report.repaired is None and report.removed == ["tokens/run0-orphan.parquet"]
    assert_tokens(store.root, tokens)
    verifying.remove(store, "a")
    flip_token(store.root, "b")
    verified(store, repair=True)
    assert TokenCache(store.root).metadata("a")["status"] == "removed"


def test_a_repair_on_s3(server, sound):
    store = verifying.copy_to_s3(LocalStore(sound), server)
    name = TokenCache(str(store), store=store).metadata("a")["token_shard"]
    store.put(name, store.read(name)[:-20])
    report = verified(store, repair=True)
    assert (kinds(report), report.repaired.moved) == ([], 0)
    cache = TokenCache(str(store), store=store)
    assert sorted(cache.failed) == ["a", "b", "bad", "c"] and cache.video_ids == ["d", "e", "f"]


def test_a_cache_of_which_nothing_would_stay_is_left_alone(store):
    """Its tokens may be on a disk that is not mounted, or its header is that of another one."""
    (store.root / "tokens").rename(store.root / "elsewhere")
    with pytest.raises(RunFailed, match="tokens/ is mounted"):
        verified(store, repair=True)
    (store.root / "elsewhere").rename(store.root / "tokens")
    assert kinds(verified(store)) == []
    before = {file: file.read_bytes() for file in (store.root / "videos").iterdir()}
    write_header(store.root, ratio=0.5, hidden_size=8)
    with pytest.raises(RunFailed, match="belongs to this cache"):
        verified(store, repair=True)
    assert {file: file.read_bytes() for file in (store.root / "videos").iterdir()} == before


def test_files_of_other_settings_are_left_out_and_set_aside(store, tokens, tmp_path):
    """As a run leaves them whose cache was moved away, and another one begun in its place."""
    other = write_header(tmp_path / "other", ratio=0.25, method="topk", hidden_size=8)
    name = write_shard(other, "run3", *(video_of(v, 9, "topk", attempts=5) for v in "ax"))
    (shard,) = other.names("tokens", ".parquet")
    for moved in (name, shard):
        shutil.copy(other.root / moved, store.root / moved)
    flip_token(store.root, "b")
    report = verified(store)
    assert sorted(kinds(report)) == ["damaged", "fingerprint"] and [file.name for file in report.orphans] == [shard]
    assert verified(store, clean=True).removed == []
    report = verified(store, repair=True)
    assert report.repaired.replaced[0] == name and (store.root / KEPT_IN / Path(name).name).exists()
    assert_tokens(store.root, without(tokens, "b"))
    assert store.exists(shard) and shard in verified(store, clean=True).removed


class BadCable(LocalStore):
    """A token shard is damaged when it is read for the first time."""

    def __init__(self, root: Path, name: str, damaged: bytes) -> None:
        super().__init__(root)
        self._damaged = {name: damaged}

    def open(self, name):
        data = self._damaged.pop(name, None)
        return super().open(name) if data is None else LocalFile(pa.BufferReader(data))


def test_damage_that_another_look_does_not_find_is_let_be(store, tokens):
    name = f"tokens/{token_shard(store, 'a').name}"
    whole = store.read(name)
    flip_token(store.root, "a")
    cable = BadCable(store.root, name, store.read(name))
    store.put(name, whole)
    report = verified(cable, repair=True)
    assert kinds(report) == [] and any("sound when it was read again" in note for note in report.notes)
    assert [(problem.kind, problem.video_id) for problem in report.found] == [("damaged", "a")]
    assert (report.repaired.marked, report.repaired.moved, report.repaired.replaced) == ([], 0, [])
    assert_tokens(store.root, tokens)


class Ahead(LocalStore):
    """A folder of another machine, whose clock is ahead of this one."""

    def compute_age(self, name):
        return super().compute_age(name) - timedelta(seconds=5)


def test_a_clock_that_is_ahead_keeps_no_replaced_row(store, tokens):
    """The sources of the merge stayed, and one of them was written as a file that no reader takes."""
    flip_token(store.root, "b")
    report = verified(Ahead(store.root), repair=True)
    assert kinds(report) == [] and TokenCache(store.root).failed == {"b": "io", "bad": "corrupt"}
    assert_tokens(store.root, without(tokens, "b"))


def test_a_row_that_comes_during_a_repair_leaves_a_table_that_opens(store, monkeypatch):
    """A driver that was stopped commits the damaged video again, after the merge."""

    def merge_and_be_late(place, made_with):
        merge_table_fully(place, made_with)
        write_shard(place, "late", video_of("b", 9, attempts=2))

    monkeypatch.setattr("pipeline.verify.repair.merge_table_fully", merge_and_be_late)
    flip_token(store.root, "b")
    verified(store, repair=True)
    monkeypatch.undo()
    assert TokenCache(store.root).failed == {"b": "io", "bad": "corrupt"} and kinds(verified(store)) == []


def test_a_repair_that_is_ended_anywhere_is_ended_by_the_next(tokens, tmp_path):
    begun = write_header(tmp_path / "begun", hidden_size=8)
    write_shard(begun, "run", video_of("a", 0), video_of("b", 1))
    write_shard(begun, "run", video_of("d", 3))

    def place(steps: int) -> Path:
        store = LocalStore(shutil.copytree(begun.root, tmp_path / str(steps)))
        commit = commit_of(store, "d")
        flip_token(store.root, "b")
        commit.write_bytes(b"PAR1")
        return store.root

    down = OSError(errno.EIO, "the machine went down", "a file")
    ends = OSError, UsageError  # the second where no note of the repair could be written
    for steps in damage.stop_at_each_change(partial(verified, repair=True), place, ends, error=down):
        store = LocalStore(tmp_path / str(steps))
        verified(store, repair=True)
        assert TokenCache(store.root).failed == {"b": "io", "d": "io"}
        if steps % 3 == 0:
            assert_tokens(store.root, {"a": tokens["a"]})


@pytest.fixture
def pair(tmp_path) -> LocalStore:
    return verifying.two_shards(tmp_path / "pair")


def files_of(store: LocalStore) -> set[str]:
    return {file.relative_to(store.root).as_posix() for file in store.root.rglob("*") if file.is_file()}


def test_what_lies_about_is_listed_and_no_problem(pair):
    (one, two) = shards(pair)
    shutil.copy(one, pair.root / "tokens" / "run0-orphan.parquet")
    temporary = {".tmp-x-1", "runs/.tmp-x-1", "tokens/.tmp-x-1", "videos/.tmp-x-1"}
    for name in (*temporary, "answers/run-000000-aa.parquet"):
        (pair.root / name).parent.mkdir(exist_ok=True)
        (pair.root / name).write_bytes(b"PAR1")
    write_shard(pair, "run2", video_of("a", 2, attempts=2))
    report = verified(pair)
    assert report.exit_code == 0 and report.orphans == [("tokens/run0-orphan.parquet", one.stat().st_size)]
    assert {name for name, _ in report.leftovers} == temporary
    superseded = {TokenCache(pair.root).metadata("b")["token_shard"]} ^ {f"tokens/{file.name}" for file in (one, two)}
    assert {name for name, _ in report.superseded} == superseded
    before, cleaned = files_of(pair), verified(pair, clean=True)
    assert {*cleaned.removed} == before - files_of(pair) == {"tokens/run0-orphan.parquet", *temporary}
    assert (cleaned.orphans, {*cleaned.leftovers}) == (report.orphans, {*report.leftovers})
    assert verified(pair).orphans == [] and TokenCache(pair.root).get("a").metadata["run_id"] == "run2"


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


def test_a_commit_that_a_listing_lacks_while_a_run_adds_others_is_not_lost(pair):
    report = verified(Growing(pair.root))
    assert (report.problems, report.exit_code, len(report.orphans)) == ([], 0, 1)


def test_what_a_commit_that_came_meanwhile_may_name_is_not_removed(pair):
    shutil.copy(shards(pair)[0], pair.root / "tokens" / "run0-orphan.parquet")
    (orphan,) = verified(pair).orphans
    left, commits = Report(str(pair), orphans=[orphan]), pair.names("videos", ".parquet")
    for keep, known, note in (
        (NOW, commits[:1], "was added meanwhile"),
        (KEEP, commits, "younger than 10 minutes stay"),
    ):
        delete_leftovers(pair, left, keep, commits=known)
        assert left.removed == [] and any(note in said for said in left.notes)
    delete_leftovers(pair, left, NOW, commits=commits)
    assert left.removed == [orphan.name]


def test_uploads_on_s3_that_are_old_are_ended_and_only_below_the_prefix(server):
    pair = ObjectStore(server.uri("c"), server.objects())
    make_cache(pair, {"v": random_tokens(0, SHAPE)})
    pending = server.client.create_multipart_upload(Bucket=server.bucket, Key="c/tokens/half.parquet")
    server.client.create_multipart_upload(Bucket=server.bucket, Key="elsewhere/half.parquet")
    report = verified(pair)
    (upload,) = report.uploads
    assert (upload.uri, upload.upload_id) == (server.uri("c/tokens/half.parquet"), pending["UploadId"])
    young = Report(str(pair), uploads=report.uploads)
    delete_leftovers(pair, young, NOW, now=upload.started + UPLOAD_AGE / 2)
    assert young.removed == []
    assert datetime.now(UTC) - upload.started > timedelta(hours=1)  # by the server's clock
    (half,) = verified(pair, clean=True).removed
    after = verified(pair)
    assert "half.parquet" in half and (after.uploads, after.problems) == ([], [])
    assert len(list(ObjectStore(server.uri("elsewhere"), server.objects()).uploads())) == 1


def lose_table(store: LocalStore) -> None:
    for folder in ("videos", "runs"):
        shutil.rmtree(store.root / folder)


def cut_merged_file(store: LocalStore) -> None:
    merge_table_fully(store, read_fingerprint(store))
    (file,) = shards(store, "videos")
    cut(file, 100)


FAULTS = {  # how rows are lost, the problem, and the videos that it costs
    "the table and the runs": (lose_table, "lost", "ab"),
    "the end of a merged file": (cut_merged_file, "commit", "ab"),
    "a commit": (lambda store: shards(store, "videos")[0].unlink(), "lost", "a"),
}


@pytest.mark.parametrize(("fault", "kind", "ids"), FAULTS.values(), ids=FAULTS)
def test_a_table_that_lost_rows_is_said_and_costs_no_token(pair, fault, kind, ids):
    say_what_was_committed(pair)
    tokens = {file.name for file in shards(pair)}
    fault(pair)
    report = verified(pair, clean=True)
    assert {*kinds(report)} == {kind} and report.exit_code == 1 and report.removed == []
    assert any("may name it" in note for note in report.notes)
    said = "\n".join(report.lines())
    assert f"{kind}, " in said and Kind(kind).remedy in said
    repaired = verified(pair, repair=True)
    assert kinds(repaired) == [] and repaired.exit_code == 0
    assert not any("a run writes here" in note for note in repaired.notes)  # it is the repair itself
    assert {*TokenCache(pair.root).failed} >= {*ids}
    assert TokenCache(pair.root).video_ids == [name for name in "ab" if name not in ids]
    assert {file.name for file in shards(pair)} == tokens  # a copy of the table may turn up


def test_what_a_first_run_left_that_was_killed_is_no_loss(pair):
    """Its record is there and names no commit."""
    shutil.rmtree(pair.root / "videos")
    pair.put("runs/run.json", json.dumps({"run_id": "run", "status": "running"}).encode())
    report = verified(pair, clean=True)
    assert report.exit_code == 0 and len(report.removed) == 2


def test_every_fault_of_a_shard_is_a_class_with_a_remedy():
    assert all(Kind(fault).remedy for fault in get_args(ShardFault)) and all(kind.remedy for kind in Kind)
