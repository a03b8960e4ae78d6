"""How videos travel between stages, and the write actor, which makes one token shard of them."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import TokenCache
from pipeline.cache.header import read_fingerprint
from pipeline.cache.writer import KeptTokens, VideoItem, commit_records, commit_rows
from pipeline.errors import VideoFault
from pipeline.inputs.named_videos import TODO_SCHEMA
from pipeline.prune.batches import (
    BATCH_SCHEMA,
    WRITTEN_SCHEMA,
    pack,
    pack_task,
    pack_written,
    unpack_batch,
    unpack_failed,
    unpack_task,
)
from pipeline.prune.resources import PRUNING
from pipeline.prune.write_stage import Writer
from pipeline.rows import VideoRecord, make_failed_video
from pipeline.runner.worker_reports import Worker
from pipeline.storage.stores import LocalStore
from tests.builders.caches import encoded, encoded_failure, random_tokens, source_record, write_header
from tests.builders.clusters import heartbeats_here

FRAMES = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 3), dtype=np.uint8)


def record(video_id: str = "v", **more: Any) -> VideoRecord:
    return source_record(video_id, (3, 2, 4), height=4, width=6, **more)


def kept(n: int = 2, width: int = 4, levels: int = 0, **more: Any) -> KeptTokens:
    draw = np.random.default_rng(n)

    def vectors(numbers: int) -> np.ndarray:
        return draw.integers(-(2**15), 2**15, (n, numbers)).astype(np.int16)

    evidence = {name: vectors(numbers) for name, numbers in more.pop("evidence", {}).items()}
    deepstack = [vectors(width) for _ in range(levels)]
    return KeptTokens(vectors(width), np.arange(n, dtype=np.int32), deepstack=deepstack, evidence=evidence, **more)


def assert_same(ours: VideoItem, expected: VideoItem) -> None:
    assert ours.record == expected.record and (ours.kept is None) == (expected.kept is None)
    assert_same_array(ours.frames, None if expected.frames is None else expected.frames.reshape(-1))
    if ours.kept is not None and expected.kept is not None:
        for name in NAMES:
            assert_same_array(getattr(ours.kept, name), getattr(expected.kept, name))
        assert list(ours.kept.evidence) == list(expected.kept.evidence)
        arrays = [[*tokens.deepstack, *tokens.evidence.values()] for tokens in (ours.kept, expected.kept)]
        for array, expected_array in zip(*arrays, strict=True):
            assert_same_array(array, expected_array)


def assert_same_array(ours: np.ndarray | None, expected: np.ndarray | None) -> None:
    assert (ours is None) == (expected is None)
    if ours is not None and expected is not None:
        assert (ours.dtype, ours.shape, ours.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def buffers(array: Any) -> set[int]:
    return {buffer.address for chunk in array.chunks for buffer in chunk.flatten().buffers() if buffer is not None}


NAMES = ("tokens", "index", "rank", "merged", "density")
FULL = {
    "rank": np.arange(5, dtype=np.int32),
    "merged": np.resize([True, False], 5),
    "density": np.resize(np.array([0.5, np.nan], np.float32), 5),
}
FIVE = VideoItem(record(), kept(5, 8, **FULL))
FAILED = VideoItem(make_failed_video(record("bad"), VideoFault("crash", "gone", exit_signal=11)))


def test_arrays_of_a_video_that_is_alone_are_wrapped_without_a_copy_and_frames_come_back_as_views():
    bundle = pack([VideoItem(record(), frames=FRAMES)])
    assert bundle.schema.equals(BATCH_SCHEMA) and len(bundle) == 1
    assert FRAMES.ctypes.data in buffers(bundle["frames"])
    (video,) = unpack_batch(bundle)
    assert_same(video, VideoItem(record(), frames=FRAMES))
    assert video.frames.ctypes.data == FRAMES.ctypes.data and not video.frames.flags.writeable
    bundle = pack([FIVE, VideoItem(record("bad"))])
    for name in NAMES:
        assert getattr(FIVE.kept, name).ctypes.data in buffers(bundle[name]), name


def test_videos_of_many_shapes_and_failures_share_a_bundle_of_one_row():
    """Ray Data cuts blocks between rows, and would make two of what one call gave. Also after the way through a file.

    Records come back exactly."""
    odd = record("\udcff", timestamps=[0.1 + 0.2, 1e-320, 3.0], manifest='{"a": "ü\\n"}', fps=30000 / 1001)
    videos = [
        FAILED,
        VideoItem(record("a"), frames=FRAMES),
        VideoItem(odd, frames=FRAMES[:1]),
        VideoItem(record("b"), kept(2, 4)),
        FAILED,
        VideoItem(record("c"), kept(5, 3, levels=2, evidence={"token_key": 2})),
        encoded("d", random_tokens(0), 0.25, "gstep"),
        VideoItem(record("e"), kept(3, 2, levels=1, evidence={"token_key": 1, "ä": 4})),
        VideoItem(record("f"), kept(1, 1, levels=3)),
        VideoItem(record("g"), kept(0, 4, levels=1, evidence={"token_key": 2})),
        FIVE,
    ]
    bundle = pack(videos)
    sink = pa.BufferOutputStream()
    pq.write_table(bundle, sink)
    for table in (bundle, pq.read_table(pa.BufferReader(sink.getvalue()))):
        assert len(table) == 1
        for ours, expected in zip(unpack_batch(table), videos, strict=True):
            assert_same(ours, expected)


def test_failed_records_come_back_without_the_keys_that_were_absent():
    rows = [{**record("a"), "n_tokens": 0, "backend_note": "", "row_counts": [1, 2]}, FAILED.record]
    batch = pack_written(rows)
    assert batch.schema.equals(WRITTEN_SCHEMA) and batch["status"].to_pylist() == ["ok", "failed"]
    assert unpack_failed(batch) == [FAILED.record]
    assert "start_s" not in unpack_failed(batch)[0]  # a null is an absent key
    assert unpack_failed(pack_written([])) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda row: pack([VideoItem(record()), VideoItem(row, frames=FRAMES)]),
        lambda row: pack([VideoItem(row, kept())]),
        lambda row: pack([VideoItem(row)]),
        lambda row: pack_written([record(), row]),
    ],
)
def test_a_key_that_is_no_column_is_refused(make):
    with pytest.raises(KeyError, match="not columns of the videos table: colour, shape"):
        make({**record(), "shape": 1, "colour": "red"})


def test_a_unit_holds_its_rows_and_no_others():
    rows = [{"video_id": f"v{number}", "uri": "/v.mp4", "attempts": number, "size": number} for number in range(9)]
    todo = pa.Table.from_pylist(rows, TODO_SCHEMA)
    parts = pa.concat_tables([todo.slice(0, 4), todo.slice(4)])
    assert unpack_task(pack_task(parts.slice(2, 5))).to_pylist() == todo.slice(2, 5).to_pylist()
    assert len(pack_task(todo)) == 1 and len(pack_task(todo.slice(0, 1))["videos"][0].as_py()) < 2000


def test_videos_become_one_shard_whoever_writes_them_that_can_be_committed_and_read(tmp_path):
    store = write_header(tmp_path)
    good = [encoded(name, random_tokens(i), 0.25, "gstep") for i, name in enumerate("ab")]
    failure = encoded_failure("bad", VideoFault("corrupt", "torn"))
    written = Writer(store, "run").write(pack([good[0], failure]), pack([good[1]]))
    assert written.schema.equals(WRITTEN_SCHEMA)
    rows = written.to_pylist()
    assert [(row["video_id"], row["status"]) for row in rows] == [("a", "ok"), ("bad", "failed"), ("b", "ok")]
    again = Writer(store, "run").write(pack([good[0], failure]), pack([good[1]]))
    assert again["footer_hash"] == written["footer_hash"]  # the same file
    assert len(store.names("tokens", ".parquet")) == 1 and rows[1]["token_shard"] is None
    commit_rows(
        store, "run", 0, pa.concat_tables([written.slice(0, 1), written.slice(1)]), made_with=read_fingerprint(store)
    )
    commit_records(store, "run", 0, rows, made_with=read_fingerprint(store))
    assert len(store.names("videos", ".parquet")) == 1  # to the byte the same file, whose name has a hash of it
    cache = TokenCache(tmp_path)
    assert cache.failed == {"bad": "corrupt"}
    for video in good:
        found = cache.get(video.record["video_id"], order="selection")
        assert found.index.tolist() == video.kept.index.tolist()


def test_a_disk_that_fails_ends_the_run_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "tokens").write_text("in the way")
    actor, handle = heartbeats_here(monkeypatch, tuple(PRUNING.stages), Worker("w1", "h1", "n1"))
    video = encoded("a", random_tokens(0), 0.25, "gstep")
    with pytest.raises(OSError, match=r"exists|directory"):
        Writer(LocalStore(tmp_path), "run", handle).write(pack([video]))
    assert actor.read().failure.partition(":")[0] in {"FileExistsError", "NotADirectoryError"}
