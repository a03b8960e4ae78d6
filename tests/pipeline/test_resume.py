"""Resume: the manifest minus the live rows, and nothing that changed goes unnoticed."""

import pytest

from pipeline.config import PruneConfig
from pipeline.errors import CacheLocked, SourceChanged, VideoFault
from pipeline.live import read_live
from pipeline.lock import FileLock
from pipeline.manifest import read_manifest
from pipeline.resume import remaining
from pipeline.store import LocalStore
from tests.pipeline.caches import encoded, encoded_failure, random_tokens, write_header, write_shard

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
