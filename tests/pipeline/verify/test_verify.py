"""Verify: a sound cache passes, and each kind of damage is found, named, and blamed on the right video."""

import io
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gstep import PRUNERS
from pipeline import TokenCache
from pipeline.errors import CacheLocked, NotACache, VideoFault
from pipeline.storage.lock import cache_lock
from pipeline.storage.stores import LocalStore, ObjectStore
from pipeline.verify.orphans import UPLOAD_AGE, clean, list_uploads
from pipeline.verify.report import Report, render
from pipeline.verify.verify import Request, verify
from tests.pipeline.caches import encoded, encoded_failure, make_cache, random_tokens, write_header, write_shard
from tests.pipeline.damage import flip, other_tokens, rewrite_row, rewrite_tokens, shards, with_column
from tests.pipeline.evidence import evidence_cache
from tests.pipeline.s3 import S3Server

SHAPE = (4, 9, 8)


def verified(store: LocalStore | ObjectStore, **more: object) -> Report:
    return verify(store, Request(**more), Console(file=io.StringIO()))


def kinds(report: Report) -> list[str]:
    return [problem.kind for problem in report.problems]


def two_shards(out: Path) -> LocalStore:
    """The videos a and b in a shard each, of one run, and one that failed."""
    store = write_header(out, hidden_size=8)
    write_shard(store, "run", encoded("a", random_tokens(0, SHAPE), 0.25, "gstep"))
    fault = VideoFault("corrupt", "moov atom not found")
    write_shard(store, "run", encoded("b", random_tokens(1, SHAPE), 0.25, "gstep"), encoded_failure("bad", fault))
    assert isinstance(store, LocalStore)
    return store


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return two_shards(tmp_path_factory.mktemp("sound") / "c").root


@pytest.fixture
def store(sound, tmp_path) -> LocalStore:
    return LocalStore(shutil.copytree(sound, tmp_path / "c"))


def test_a_sound_cache_passes_and_every_byte_is_read(store):
    report = verified(store, jobs=3)
    assert (report.problems, report.notes, report.orphans, report.exit_code) == ([], [], [], 0)
    assert report.bytes_read == sum(
        file.stat().st_size for folder in ("tokens", "videos") for file in shards(store, folder)
    )
    assert report.counts == {"videos_shards": 2, "videos": 2, "failed_videos": 1, "token_shards": 2, "tokens": 18}


@pytest.mark.parametrize("method", [name for name in PRUNERS if PRUNERS[name].cacheable])
def test_every_method_keeps_the_rules_of_its_rows(tmp_path, method):
    """Also where tokens are merged, out of ascending order, or near their budget."""
    ratio = 1.0 if method == "none" else 0.25
    tokens, level = random_tokens(0, (9, 25, 16)), random_tokens(1, (9, 25, 16))
    store = write_header(tmp_path, ratio, method, hidden_size=16, deepstack_levels=1)
    write_shard(store, "run", *(encoded(name, tokens, ratio, method, [level]) for name in ("v", "w")))
    assert verified(store).problems == []


DECLARED = {"nested": True, "merges": False, "exact": True, "reorders": False}


def by_an_own_method(out: Path, **pruner: object) -> LocalStore:
    """A cache of random tokens that names a method whose module is not importable here."""
    identity = {"model": {"weights": "none"}, "pruner": {"method": "not_here:Mine", **pruner}, "retention_ratio": 0.25}
    store = write_header(out, hidden_size=8, identity=identity)
    write_shard(store, "run", encoded("a", random_tokens(0, SHAPE), 0.25, "random"))
    assert isinstance(store, LocalStore)
    return store


@pytest.mark.parametrize(
    ("other", "kind"), [({}, None), ({"nested": False}, "row"), ({"merges": True}, "tokens"), ({"exact": False}, None)]
)
def test_rows_of_a_method_from_outside_are_held_against_what_it_declared(tmp_path, other, kind):
    report = verified(by_an_own_method(tmp_path, declares={**DECLARED, **other}))
    assert (kinds(report), report.notes) == ([] if kind is None else [kind], [])


def test_what_an_unknown_method_declares_is_left_out_with_a_note(tmp_path):
    report = verified(by_an_own_method(tmp_path))
    assert report.problems == [] and report.exit_code == 0
    assert len(report.notes) == 1 and "the method not_here:Mine is unknown here" in report.notes[0]


def test_evidence_is_checked_too(tmp_path):
    store = evidence_cache(tmp_path, {"v": random_tokens(0, SHAPE), "w": random_tokens(1, SHAPE)})
    assert verified(store).problems == []
    write_shard(store, "other", encoded("x", random_tokens(2, SHAPE), 0.25, "gstep"))
    assert kinds(verified(store)) == ["schema"]


def swap(store: LocalStore) -> None:
    one, two = shards(store)
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)


def add_bytes(store: LocalStore) -> None:
    """Behind the pages and before the footer, which stays as it was."""
    data = shards(store)[0].read_bytes()
    at = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    shards(store)[0].write_bytes(data[:at] + b"?" + data[at:])


def of_another_cache(store: LocalStore) -> None:
    other = write_header(store.root.parent / "other", 0.25, "topk", hidden_size=8)
    write_shard(other, "elsewhere", encoded("x", random_tokens(2, SHAPE), 0.25, "topk"))
    for folder in ("tokens", "videos"):
        shutil.copy(shards(other, folder)[0], store.root / folder)


def same_attempt(store: LocalStore) -> None:
    write_shard(store, "run2", encoded("a", random_tokens(2, SHAPE), 0.25, "gstep"))


def replace_video(store: LocalStore) -> None:
    """b's row names a's tokens, rightly hashed."""
    a = TokenCache(store.root).metadata("a")
    names = ("token_shard", "footer_hash", "checksum", "row_counts", "kept_per_frame")
    rewrite_row(store, "b", lambda row: row.update({name: a[name] for name in names}))
    shards(store)[1].unlink()


DAMAGE = {
    "a shard deleted": (lambda s: shards(s)[0].unlink(), {"missing"}),
    "a shard cut off": (lambda s: shards(s)[0].write_bytes(shards(s)[0].read_bytes()[:-100]), {"footer"}),
    "a shard emptied": (lambda s: shards(s)[0].write_bytes(b""), {"footer"}),
    "shards swapped": (swap, {"footer"}),
    "bytes put in": (add_bytes, {"rows"}),
    "a flipped bit": (lambda s: flip(shards(s)[0], 600), {"damaged"}),
    "a flipped bit in a commit": (lambda s: flip(shards(s, "videos")[0], 600), {"commit"}),
    "a commit that is no Parquet": (lambda s: shards(s, "videos")[0].write_bytes(b"PAR1"), {"commit"}),
    "a commit deleted": (lambda s: shards(s, "videos")[0].unlink(), {"lost"}),
    "a flipped bit in the header": (lambda s: flip(s.root / "cache.json", 100), {"header"}),
    "a shard of other settings": (of_another_cache, {"fingerprint"}),
    "an id twice": (same_attempt, {"duplicate"}),
    "another checksum": (lambda s: rewrite_row(s, "a", lambda r: r.update(checksum="blake2b:00")), {"checksum"}),
    "tokens of another video": (replace_video, {"rows"}),
    "fewer tokens": (lambda s: rewrite_row(s, "a", lambda r: r.update(n_tokens=5)), {"row"}),
    "another ratio": (lambda s: rewrite_row(s, "a", lambda r: r.update(retention_ratio=0.5)), {"row"}),
    "another size": (lambda s: rewrite_row(s, "a", lambda r: r.update(hidden_size=4)), {"row"}),
    "frames backwards": (lambda s: rewrite_row(s, "a", lambda r: r["frame_indices"].reverse()), {"row"}),
    "times backwards": (lambda s: rewrite_row(s, "a", lambda r: r["timestamps"].reverse()), {"row"}),
    "a row group too far": (lambda s: rewrite_row(s, "a", lambda r: r.update(first_row_group=1)), {"rows"}),
    "an ok row without tokens": (lambda s: rewrite_row(s, "a", lambda r: r.update(token_shard=None)), {"row"}),
    "a failed row without a class": (lambda s: rewrite_row(s, "bad", lambda r: r.update(error_class=None)), {"row"}),
    "no JSON": (lambda s: rewrite_row(s, "a", lambda r: r.update(runtime="{")), {"row"}),
    "ranks": (lambda s: rewrite_tokens(s, "a", with_column("rank", lambda v: v[::-1])), {"tokens"}),
    "a position twice": (lambda s: rewrite_tokens(s, "a", with_column("index", np.sort)), {"tokens"}),
    "a position outside": (lambda s: rewrite_tokens(s, "a", with_column("index", lambda v: v + 30)), {"tokens"}),
    "frames of tokens": (lambda s: rewrite_tokens(s, "a", with_column("frame", lambda v: v[::-1])), {"tokens"}),
    "a density": (lambda s: rewrite_tokens(s, "a", with_column("density", lambda v: v * np.inf)), {"tokens"}),
    "a column less": (lambda s: rewrite_tokens(s, "a", lambda t: t.drop_columns(["density"])), {"schema"}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_named(store, damage):
    act, expected = DAMAGE[damage]
    act(store)
    report = verified(store)
    assert set(kinds(report)) == expected and report.exit_code == 1, report.problems
    for problem in report.problems:
        record = problem.as_record()
        assert record["class"] == problem.kind and record["what"] and record["shard"] and record["remedy"]
        # Nothing but what was damaged is blamed.
        assert problem.video_id in (None, "a", "b" if damage == "tokens of another video" else "a", "bad")


def test_what_nobody_could_see_in_the_bytes_needs_the_source(store):
    """Tokens that were changed with every checksum made anew: only --live can tell (tests/jobs/test_verify.py)."""
    rewrite_tokens(store, "a", other_tokens)
    assert verified(store).problems == []


def test_what_lies_about_is_listed_and_no_problem(store):
    (one, two) = shards(store)
    shutil.copy(one, store.root / "tokens" / "run0-orphan.parquet")
    for folder in ("tokens", "videos", "runs", "."):
        (store.root / folder).mkdir(exist_ok=True)
        (store.root / folder / ".tmp-x-1").write_bytes(b"PAR1")
    (store.root / "answers").mkdir()
    (store.root / "answers" / "run-000000-aa.parquet").write_bytes(b"not ours")
    write_shard(store, "run2", encoded("a", random_tokens(2, SHAPE), 0.25, "gstep", attempts=2))
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
    cleaned = verified(store, clean=True)
    gone = before - {file for file in store.root.rglob("*") if file.is_file()}
    assert sorted(cleaned.removed) == sorted(file.relative_to(store.root).as_posix() for file in gone)
    assert {*report.orphans, *report.leftovers} == {(n, s) for n, s in (*cleaned.orphans, *cleaned.leftovers)}
    assert len(gone) == 5 and verified(store).orphans == []
    assert TokenCache(store.root).get("a").metadata["run_id"] == "run2"


@pytest.mark.parametrize("damage", ["a commit deleted", "a flipped bit in a commit"])
def test_what_a_damaged_commit_may_name_is_not_removed(store, damage):
    DAMAGE[damage][0](store)
    report = verified(store, clean=True)
    assert len(report.orphans) == 1 and report.removed == []
    assert any("may name it" in note for note in report.notes)
    assert len(shards(store)) == 2


def test_a_run_that_holds_the_cache_keeps_it_from_being_cleaned(store):
    with cache_lock(store, "run9", print):
        with pytest.raises(CacheLocked, match="run9"):
            verified(store, clean=True)
        report = verified(store)
    assert report.exit_code == 0 and any("run9 writes here" in note for note in report.notes)


def test_no_cache_is_refused_and_left_alone(tmp_path):
    with pytest.raises(NotACache, match=r"no cache\.json"):
        verified(LocalStore(tmp_path), clean=True)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_cache_is_sound(tmp_path):
    report = verified(write_header(tmp_path))
    assert report.problems == [] and report.counts["videos"] == 0


def test_the_report_counts_by_class(store):
    for file in shards(store):
        file.unlink()
    output = io.StringIO()
    Console(file=output, width=200).print(render(verified(store)))
    said = " ".join(output.getvalue().replace("│", " ").split())
    assert f"missing 2 {store}" in said  # the class, how many, and one of them
    assert "the shard is missing" in said and "run jobs.prune" in said and said.endswith("2 problems")


@pytest.fixture(scope="module")
def server():
    with S3Server("verify") as server:
        yield server


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
    with cache_lock(store, "r", print) as lock:
        clean(store, young, lock, now=report.uploads[0].started + UPLOAD_AGE / 2)
    assert young.removed == []
    assert datetime.now(UTC) - report.uploads[0].started > timedelta(hours=1)  # by the server's clock
    cleaned = verified(store, clean=True)
    assert cleaned.removed[0] == "tokens/run-orphan.parquet" and "half.parquet" in cleaned.removed[1]
    after = verified(store)
    assert (after.orphans, after.uploads, after.problems) == ([], [], [])
    store.put(name, store.read(name)[:-50])
    assert kinds(verified(store)) == ["footer"]
    left = Report(str(store))
    list_uploads(ObjectStore(server.uri("elsewhere"), server.objects()), left)
    assert len(left.uploads) == 1  # not below the cache's prefix


def test_a_shard_that_may_not_be_read_is_no_end(server):
    store = ObjectStore(server.uri("d"), server.objects())
    write_header(store)
    for i in range(2):
        write_shard(store, "run", encoded(f"v{i}", random_tokens(i, SHAPE), 0.25, "gstep"))
    server.fail("GET", f"d/{store.names('tokens', '.parquet')[0]}", 403)
    report = verified(store)
    assert kinds(report) == ["unreadable"] and "AccessDenied" in report.problems[0].what
    assert report.counts["token_shards"] == 2 and report.counts["tokens"] == 9
