"""Resume: the manifest minus the live rows, and nothing that changed goes unnoticed."""

import json
import resource

import pytest

from pipeline.config import PruneConfig
from pipeline.errors import CacheLocked, SourceChanged, UsageError, VideoFault
from pipeline.live import read_live
from pipeline.lock import FileLock
from pipeline.manifest import read_manifest
from pipeline.resume import _sizes_on_s3, remaining
from pipeline.store import LOCK, LocalStore
from tests.pipeline.caches import encoded, encoded_failure, random_tokens, write_header, write_shard
from tests.pipeline.s3 import S3Server

TOKENS = random_tokens(0)


@pytest.fixture
def folder(tmp_path):
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        (tmp_path / name).write_bytes(b"12345")
    return tmp_path


@pytest.fixture
def live(folder):
    """a is ok, b failed once, c is not there."""
    store = write_header(folder / "cache")
    source = {"source_size": 5, "start_s": None, "end_s": None}
    good = encoded("a.mp4", TOKENS, 0.25, "gstep", **{**source, "uri": str(folder / "a.mp4")})
    bad = encoded_failure("b.mp4", VideoFault("crash", "x"), **{**source, "uri": str(folder / "b.mp4")})
    write_shard(store, "run", good, bad)
    return read_live(store)


def left(folder, live, **options) -> dict[str, int]:
    todo = remaining(read_manifest(str(folder)), live, PruneConfig(**options))
    return dict(zip(todo["video_id"].to_pylist(), todo["attempts"].to_pylist(), strict=True))


def test_done_and_failed_videos_are_left_alone(folder, live):
    assert left(folder, live) == {"c.mp4": 1}


def test_failed_videos_are_tried_again_on_demand(folder, live):
    assert left(folder, live, retry_failed=True) == {"b.mp4": 2, "c.mp4": 1}
    assert left(folder, live, retry_failed=True, max_attempts=1) == {"c.mp4": 1}


def test_a_changed_file_is_refused_skipped_or_redone(folder, live):
    (folder / "a.mp4").write_bytes(b"1234567")
    with pytest.raises(SourceChanged, match=r"a\.mp4: the file had 5 bytes, has 7"):
        left(folder, live)
    assert left(folder, live, on_changed="skip") == {"c.mp4": 1}
    assert left(folder, live, on_changed="redo") == {"a.mp4": 2, "c.mp4": 1}


def test_a_changed_clip_is_noticed(folder, live):
    (folder / "m.csv").write_text("video_id,uri,start_s\na.mp4,a.mp4,1.5\n")
    with pytest.raises(SourceChanged, match=r"start_s was None, is 1\.5"):
        remaining(read_manifest(str(folder / "m.csv")), live, PruneConfig())


def test_a_cached_video_outlives_its_file(folder, live):
    (folder / "m.csv").write_text("video_id,uri\na.mp4,a.mp4\n")
    (folder / "a.mp4").unlink()
    assert len(remaining(read_manifest(str(folder / "m.csv")), live, PruneConfig())) == 0


def test_one_writer_a_cache(tmp_path):
    with FileLock(LocalStore(tmp_path), "first"), pytest.raises(CacheLocked, match='"run_id": "first"'):
        FileLock(LocalStore(tmp_path), "second").__enter__()
    with FileLock(LocalStore(tmp_path), "third"):
        pass


def test_a_lock_on_a_full_disk_names_the_place_and_is_not_kept(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(UsageError, match=f"{tmp_path}: nothing can be written here: File too large"):
            FileLock(LocalStore(tmp_path), "first").__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with FileLock(LocalStore(tmp_path), "second"):
        pass


def test_a_place_that_takes_no_file_is_refused(tmp_path):
    (tmp_path / LOCK).mkdir()  # for whoever may write anywhere, a folder in its place does what a read-only one does
    with pytest.raises(UsageError, match="nothing can be written here"):
        FileLock(LocalStore(tmp_path), "run").__enter__()


def test_skipping_what_changed_looks_at_no_file(folder, live):
    (folder / "m.csv").write_text("video_id,uri\na.mp4,a.mp4\nb.mp4,b.mp4\n")
    manifest = read_manifest(str(folder / "m.csv"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.resume.Path", None)
        assert len(remaining(manifest, live, PruneConfig(on_changed="skip"))) == 0


@pytest.fixture
def server():
    with S3Server() as opened:
        yield opened


@pytest.fixture
def s3_live(server, tmp_path):
    """On S3: a, b and c are ok with 5 bytes, d failed, e is not there."""
    for name in "abcde":
        server.upload(f"v/{name}.mp4", b"12345")
    rows = [encoded(f"{name}.mp4", TOKENS, 0.25, "gstep", **source(server, name)) for name in "abc"]
    bad = encoded_failure("d.mp4", VideoFault("io", "x"), **source(server, "d"))
    store = write_header(tmp_path / "cache")
    write_shard(store, "run", *rows, bad)
    return read_live(store)


def source(server, name):
    return {"uri": server.uri(f"v/{name}.mp4"), "source_size": 5, "start_s": None, "end_s": None}


def s3_manifest(server):
    lines = [json.dumps({"video_id": f"{name}.mp4", "uri": f"{name}.mp4"}) for name in "abcde"]
    return server.upload("v/m.jsonl", "\n".join(lines).encode())


def s3_left(server, live, videos, **options):
    manifest = read_manifest(videos, (), server.objects())
    server.requests.clear()
    return remaining(manifest, live, PruneConfig(**options), server.objects())["video_id"].to_pylist()


def test_a_listing_tells_sizes_for_nothing(server, s3_live):
    assert s3_left(server, s3_live, server.uri("v/")) == ["e.mp4"]
    server.upload("v/a.mp4", b"1234567")
    with pytest.raises(SourceChanged, match=r"a\.mp4: the file had 5 bytes, has 7"):
        s3_left(server, s3_live, server.uri("v/"))
    assert s3_left(server, s3_live, server.uri("v/"), on_changed="redo") == ["a.mp4", "e.mp4"]
    assert s3_left(server, s3_live, server.uri("v/"), on_changed="skip") == ["e.mp4"]
    assert server.requests == []


def test_of_a_manifest_s_rows_only_those_that_are_done_are_asked_about(server, s3_live):
    assert s3_left(server, s3_live, s3_manifest(server)) == ["e.mp4"]
    assert server.counts() == {"HEAD": 3}
    server.upload("v/a.mp4", b"1234567")
    server.client.delete_object(Bucket=server.bucket, Key="v/b.mp4")  # gone: no difference
    server.fail("HEAD", "v/c.mp4", 403)  # nor one that cannot be asked about, as long as others can
    with pytest.raises(SourceChanged, match=r"1 videos of .*\n  a\.mp4: the file had 5 bytes, has 7"):
        s3_left(server, s3_live, s3_manifest(server))
    assert s3_left(server, s3_live, s3_manifest(server), on_changed="redo", retry_failed=True) == [
        "a.mp4", "d.mp4", "e.mp4",
    ]  # fmt: skip
    assert s3_left(server, s3_live, s3_manifest(server), on_changed="skip") == ["e.mp4"]
    assert server.requests == []


def test_a_store_that_never_answers_is_no_proof_that_nothing_changed(server, s3_live):
    for name in "abc":
        server.fail("HEAD", f"v/{name}.mp4", 403)
    with pytest.raises(UsageError, match=r"s3://.*v/.\.mp4: .*cannot be asked: 403: Forbidden.*--on-changed skip"):
        s3_left(server, s3_live, s3_manifest(server))
    assert s3_left(server, s3_live, s3_manifest(server), on_changed="skip") == ["e.mp4"]


def test_an_outage_amid_many_questions_ends_them(server):
    uris = [server.uri(f"{number}.mp4") for number in range(300)]
    for number in range(40, 300):
        server.fail("HEAD", f"{number}.mp4", 403)
    with pytest.raises(UsageError, match=r"/71\.mp4: .*403"):
        list(_sizes_on_s3(uris, server.objects()))
    assert len(server.requests) < 300
