"""Resume: the manifest minus the live rows, and nothing that changed goes unnoticed."""

import json
import os
import zipfile

import pyarrow as pa
import pytest

from pipeline.cache.live import Ledger
from pipeline.errors import SourceChanged, UsageError, VideoFault
from pipeline.inputs.named_videos import MANIFEST_SCHEMA, TODO_SCHEMA
from pipeline.keys import ROWS_AT_ONCE
from pipeline.prune.config import PruneConfig
from pipeline.prune.resume import (
    ManifestCounts,
    check_redo,
    format_skipped,
    restore_old_ids,
    select_existing,
    select_remaining,
    select_retries,
)
from pipeline.storage.stores import LocalStore
from pipeline.video.frame_folders import read_source_state
from tests.builders.caches import encoded, encoded_failure, random_tokens, write_header, write_shard
from tests.builders.manifests import read_manifest


@pytest.fixture
def folder(tmp_path):
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        (tmp_path / name).write_bytes(b"12345")
    return tmp_path


def ok(video_id, uri, size=5):
    """A video that was pruned as a whole."""
    source = {"uri": str(uri), "source_size": size, "start_s": None, "end_s": None}
    return encoded(video_id, random_tokens(0), 0.25, "gstep", **source)


def bad(video_id, uri, kind="io", size=5, **more):
    source = {"uri": str(uri), "source_size": size, "start_s": None, "end_s": None}
    return encoded_failure(video_id, VideoFault(kind, "x"), **source, **more)


@pytest.fixture
def live(folder):
    """a is ok, b failed once, c is not there."""
    store = write_header(folder / "cache")
    write_shard(store, "run", ok("a.mp4", folder / "a.mp4"), bad("b.mp4", folder / "b.mp4", "crash"))
    return Ledger(store).refresh()


def left(folder, live, **options) -> dict[str, int]:
    todo, _ = select_remaining(read_manifest(str(folder)), live, PruneConfig(**options))
    return dict(zip(todo["video_id"].to_pylist(), todo["attempts"].to_pylist(), strict=True))


def test_done_and_failed_videos_are_left_alone_and_failed_ones_are_tried_again_on_demand(folder, live):
    assert left(folder, live) == {"c.mp4": 1}
    assert left(folder, live, retry_failed=True) == {"b.mp4": 2, "c.mp4": 1}
    assert left(folder, live, retry_failed=True, max_attempts=1) == {"c.mp4": 1}


def test_a_member_of_a_zip_keeps_the_id_with_backslashes_that_the_cache_has(folder):
    """Older versions wrote such names into ids. A row by the new name wins."""
    with zipfile.ZipFile(folder / "z.zip", "w") as file:
        for name in ("x\\old.mp4", "x\\new.mp4", "x\\both.mp4", "plain.mp4"):
            info = zipfile.ZipInfo(name)
            info.create_system = 0
            file.writestr(info, name)
    videos = read_manifest(str(folder / "z.zip"))
    stored = {"z.zip/x\\old.mp4": "x\\old.mp4", "z.zip/x\\both.mp4": "x\\both.mp4", "z.zip/x/both.mp4": "x\\both.mp4"}
    rows = [ok(video_id, f"{folder}/z.zip#{name}", len(name)) for video_id, name in stored.items()]
    store = write_header(folder / "cache")
    assert restore_old_ids(videos, Ledger(store).refresh()) is videos
    write_shard(store, "run", *rows)
    ledger = Ledger(store).refresh()
    kept = restore_old_ids(videos, ledger)
    names = ("x\\old.mp4", "x/new.mp4", "x/both.mp4", "plain.mp4")
    assert kept["video_id"].to_pylist() == [f"z.zip/{name}" for name in names]
    assert kept.drop_columns(["video_id"]).equals(videos.drop_columns(["video_id"]))
    todo, _ = select_remaining(kept, ledger, PruneConfig())
    assert todo["video_id"].to_pylist() == ["z.zip/x/new.mp4", "z.zip/plain.mp4"]


@pytest.fixture
def todo(folder, live):
    """The second attempt of b, and the first of c."""
    return select_remaining(read_manifest(str(folder)), live, PruneConfig(retry_failed=True)).todo


def test_a_second_pass_has_what_failed_and_may_be_tried_again(todo):
    again = select_retries(todo, {"b.mp4": 2, "c.mp4": 1}, 2)
    assert again.schema == TODO_SCHEMA
    assert (again["video_id"].to_pylist(), again["attempts"].to_pylist()) == (["c.mp4"], [2])
    assert len(select_retries(todo, {}, 2)) == 0


def test_an_id_of_redo_that_only_looks_like_a_stored_id_is_refused_with_the_stored_id(folder):
    store = write_header(folder / "cache")
    write_shard(store, "run", ok("cafe\u0301.mp4", "/a"))
    ledger = Ledger(store).refresh()
    for wrong in ("caf\u00e9.mp4", "cafe\u0301.mp4 "):
        with pytest.raises(UsageError, match=r"have no row in .*; did you mean cafe\u0301\.mp4 \(it differs only by"):
            check_redo(pa.array([wrong]), None, ledger, PruneConfig(redo="ids.txt"))


def test_a_changed_file_is_refused_skipped_or_redone(folder, live):
    (folder / "a.mp4").write_bytes(b"1234567")
    with pytest.raises(SourceChanged, match=r"a\.mp4: the file had 5 bytes, has 7"):
        left(folder, live)
    assert left(folder, live, on_changed="skip") == {"c.mp4": 1}
    assert left(folder, live, on_changed="redo") == {"a.mp4": 2, "c.mp4": 1}


@pytest.fixture
def s3_left(server, tmp_path):
    """The ids that are left of a place on S3: a, b and c are ok with 5 bytes, d failed, e is not there."""
    for name in "abcde":
        server.upload(f"v/{name}.mp4", b"12345")
    store, uris = write_header(tmp_path / "cache"), {f"{name}.mp4": server.uri(f"v/{name}.mp4") for name in "abcd"}
    *good, failed = uris.items()
    write_shard(store, "run", *(ok(*one) for one in good), bad(*failed))
    live, objects = Ledger(store).refresh(), server.objects()

    def select(videos, **options):
        manifest = read_manifest(videos, (), objects)
        server.requests.clear()
        return select_remaining(manifest, live, PruneConfig(**options), objects).todo["video_id"].to_pylist()

    return select


def s3_manifest(server, **columns):
    lines = [json.dumps({"video_id": f"{name}.mp4", "uri": f"{name}.mp4", **columns}) for name in "abcde"]
    return server.upload("v/m.jsonl", "\n".join(lines).encode())


def test_a_listing_or_a_manifest_that_brings_sizes_costs_no_request(server, s3_left):
    folder = server.uri("v/")
    assert s3_left(folder) == ["e.mp4"]
    assert s3_left(s3_manifest(server, size_bytes=5), retry_failed=True) == ["d.mp4", "e.mp4"]
    with pytest.raises(SourceChanged, match=r"a\.mp4: the file had 5 bytes, has 7"):
        s3_left(s3_manifest(server, size_bytes=7))
    assert server.requests == []
    server.upload("v/a.mp4", b"1234567")
    with pytest.raises(SourceChanged, match=r"a\.mp4: the file had 5 bytes, has 7"):
        s3_left(folder)
    assert s3_left(folder, on_changed="redo") == ["a.mp4", "e.mp4"]
    assert s3_left(folder, on_changed="skip") == ["e.mp4"]
    assert server.requests == []


def test_of_a_manifest_s_rows_only_those_that_are_done_are_asked_about(server, s3_left):
    videos = s3_manifest(server)
    assert s3_left(videos) == ["e.mp4"]
    assert server.counts() == {"HEAD": 3}
    server.upload("v/a.mp4", b"1234567")
    server.client.delete_object(Bucket=server.bucket, Key="v/b.mp4")  # gone: no difference
    server.fail("HEAD", "v/c.mp4", 403)  # nor one that cannot be asked about, as long as others can
    with pytest.raises(SourceChanged, match=r"1 videos of .*\n  a\.mp4: the file had 5 bytes, has 7"):
        s3_left(videos)
    assert s3_left(videos, on_changed="redo", retry_failed=True) == ["a.mp4", "d.mp4", "e.mp4"]
    assert s3_left(videos, on_changed="skip") == ["e.mp4"]
    assert server.requests == []
    for name in "ab":
        server.fail("HEAD", f"v/{name}.mp4", 403)  # a store that never answers is no proof that nothing changed
    with pytest.raises(UsageError, match=r"s3://.*v/.\.mp4: .*cannot check .*: 403: Forbidden.*--on-changed skip"):
        s3_left(videos)
    assert s3_left(videos, on_changed="skip") == ["e.mp4"]


def fail(folder, attempts, **more):
    """One more failed row of b, with the size that its file has."""
    path = folder / "b.mp4"
    size = path.stat().st_size if path.is_file() else None
    row = bad("b.mp4", path, size=size, attempts=attempts, **more)
    write_shard(LocalStore(folder / "cache"), f"run{attempts}", row)


def retried(folder, videos="", **options):
    ledger, options = Ledger(LocalStore(folder / "cache")).refresh(), {"max_attempts": 2, **options}
    return left(folder / videos, ledger, retry_failed=True, **options).get("b.mp4")


def test_a_mended_file_gets_its_attempts_anew(folder, live):
    fail(folder, 2)
    assert retried(folder) is None
    (folder / "b.mp4").write_bytes(b"mended")
    assert retried(folder) == 3
    fail(folder, 3)
    assert retried(folder) == 4 and retried(folder, max_attempts=1) is None
    fail(folder, 4)
    assert retried(folder) is None and retried(folder, max_attempts=3) == 5


def test_a_file_that_was_mended_at_its_old_size_gets_another_attempt(folder, live):
    path = folder / "b.mp4"
    for attempts in (2, 3):
        fail(folder, attempts, source_mark=read_source_state(str(path)).mark)
        assert retried(folder) is None
    path.write_bytes(b"abcde")
    os.utime(path, (1e9, 1e9))
    assert retried(folder) == 4


def test_a_file_that_was_missing_is_mended_by_being_there(folder):
    write_header(folder / "cache")
    (folder / "m.csv").write_text("video_id,uri\nb.mp4,b.mp4\n")
    (folder / "b.mp4").unlink()
    for attempts in (1, 2):
        fail(folder, attempts)
    assert retried(folder, "m.csv") is None
    (folder / "b.mp4").write_bytes(b"there")
    assert retried(folder, "m.csv") == 3


def test_videos_that_could_not_be_read_in_earlier_runs_are_named_with_the_remedy(folder, live):
    """Not those that failed by what they are (b), or have had all their attempts."""
    write_shard(LocalStore(folder / "cache"), "later", bad("c.mp4", folder / "c.mp4"))

    def lines(**options) -> str:
        config = PruneConfig(**options)
        return "\n".join(format_skipped(select_remaining(read_manifest(str(folder)), live, config).tally, config))

    live.refresh()
    named = "note: 1 video failed for infrastructure reasons (I/O) in earlier runs: --retry-failed tries again"
    assert named in lines()
    assert "infrastructure" not in lines(retry_failed=True) + lines(max_attempts=1)


def test_what_can_be_tried_again_is_there_now(server, folder):
    rows = [
        {"video_id": "a", "uri": str(folder / "a.mp4")},
        {"video_id": "b", "uri": str(folder / "none.mp4")},
        {"video_id": "c", "uri": server.upload("c.mp4")},
        {"video_id": "d", "uri": server.uri("none.mp4")},
        *({"video_id": name, "uri": f"{server.uri('x.tar')}#{name}.mp4", "source_offset": 512} for name in "ef"),
    ]
    server.upload("x.tar")
    again = select_existing(pa.Table.from_pylist(rows, TODO_SCHEMA), server.objects())
    assert again["video_id"].to_pylist() == ["a", "c", "e", "f"] and server.counts() == {"HEAD": 3}


def test_only_failed_objects_without_attempts_left_cost_a_request_more(server, s3_left):
    videos, options = s3_manifest(server), {"retry_failed": True, "max_attempts": 1}
    assert s3_left(videos, retry_failed=True) == ["d.mp4", "e.mp4"]
    assert server.counts() == {"HEAD": 3}
    assert s3_left(videos, **options) == ["e.mp4"]
    assert server.counts() == {"HEAD": 4}
    server.upload("v/d.mp4", b"mended")
    assert s3_left(videos, **options) == ["d.mp4", "e.mp4"]


@pytest.mark.parametrize("in_the_first_part", [1, 2, 3])
def test_parts_of_a_manifest_add_up(folder, live, in_the_first_part):
    others = [{"video_id": f"x{i}", "uri": f"/x{i}"} for i in range(ROWS_AT_ONCE - in_the_first_part)]
    manifest = pa.concat_tables([pa.Table.from_pylist(others, MANIFEST_SCHEMA), read_manifest(str(folder))])
    todo, tally = select_remaining(manifest.combine_chunks(), live, PruneConfig(retry_failed=True))
    rows = todo.select(["video_id", "attempts"]).to_pylist()
    assert rows[len(others) :] == [{"video_id": "b.mp4", "attempts": 2}, {"video_id": "c.mp4", "attempts": 1}]
    assert tally == ManifestCounts(new=len(others) + 1, retried=1, done=1)
