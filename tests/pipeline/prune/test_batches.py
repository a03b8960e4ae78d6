"""How videos travel between stages: what goes into a batch comes out of it, without a copy where that is possible."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cache.writer import KeptTokens, PrunedVideo
from pipeline.errors import VideoFault
from pipeline.prune.batches import (
    DECODED,
    ENCODED,
    WRITTEN,
    decoded_batch,
    decoded_frames,
    encoded_batch,
    encoded_videos,
    records,
    written_batch,
    written_records,
)
from pipeline.rows import VideoRecord, failed_video
from tests.pipeline.caches import encoded, random_tokens, source_record

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


def assert_same(ours: PrunedVideo, expected: PrunedVideo) -> None:
    assert ours.record == expected.record
    if expected.kept is None:
        assert ours.kept is None
        return
    assert ours.kept is not None
    for name in ("tokens", "index", "rank", "merged", "density"):
        same_array(getattr(ours.kept, name), getattr(expected.kept, name))
    assert len(ours.kept.deepstack) == len(expected.kept.deepstack)
    for one, other in zip(ours.kept.deepstack, expected.kept.deepstack, strict=True):
        same_array(one, other)
    assert list(ours.kept.evidence) == list(expected.kept.evidence)
    for name, values in expected.kept.evidence.items():
        same_array(ours.kept.evidence[name], values)


def same_array(ours: np.ndarray | None, expected: np.ndarray | None) -> None:
    assert (ours is None) == (expected is None)
    if ours is not None and expected is not None:
        assert ours.dtype == expected.dtype and np.array_equal(ours, expected)


def buffers(array: Any) -> set[int]:
    return {buffer.address for chunk in array.chunks for buffer in chunk.buffers() if buffer is not None}


def test_frames_are_wrapped_without_a_copy_and_come_back():
    batch = decoded_batch(record(), FRAMES)
    assert batch.schema.equals(DECODED) and records(batch) == [record()]
    assert FRAMES.ctypes.data in buffers(batch["frames"])
    assert np.array_equal(decoded_frames(batch, 0, record()), FRAMES)


def test_frames_are_views_into_the_batch():
    frames = decoded_frames(decoded_batch(record(), FRAMES), 0, record())
    assert frames.ctypes.data == FRAMES.ctypes.data and not frames.flags.writeable


def test_frames_that_do_not_lie_in_a_row_are_laid_out():
    turned = FRAMES[:, :, ::-1]
    assert np.array_equal(decoded_frames(decoded_batch(record(), turned), 0, record()), turned)


def test_a_video_that_failed_has_no_frames():
    failed = failed_video(record("bad"), VideoFault("corrupt", "torn"))
    both = pa.concat_tables([decoded_batch(failed), decoded_batch(record(), FRAMES)])
    assert both["frames"].is_valid().to_pylist() == [False, True]
    assert records(both) == [failed, record()] and np.array_equal(decoded_frames(both, 1, record()), FRAMES)


def test_frames_that_are_not_as_many_as_the_record_says_are_refused():
    with pytest.raises(ValueError, match="reshape"):
        decoded_frames(decoded_batch(record(), FRAMES[:2]), 0, record())


FULL = {
    "rank": np.array([0, 1], np.int32),
    "merged": np.array([True, False]),
    "density": np.array([0.5, np.nan], np.float32),
}


@pytest.mark.parametrize(
    "tokens",
    [
        kept(),
        kept(levels=3),
        kept(evidence={"token_key": 3, "token_attention": 1}),
        kept(levels=2, evidence={"image_embedding": 7}, rank=FULL["rank"], merged=FULL["merged"]),
        kept(1, 1, levels=1, evidence={"token_attention": 1}),
    ],
)
def test_kept_tokens_come_back(tokens):
    video = PrunedVideo(record(), tokens)
    batch = encoded_batch(video)
    assert batch.schema.equals(ENCODED)
    (again,) = encoded_videos(batch)
    assert_same(again, video)


def test_numbers_come_back_bit_for_bit_nan_included():
    video = PrunedVideo(record(), kept(**FULL))
    (again,) = encoded_videos(encoded_batch(video))
    assert again.kept is not None and again.kept.density is not None
    assert again.kept.density.tobytes() == FULL["density"].tobytes()
    assert again.kept.merged.tolist() == [True, False] and again.kept.rank.tolist() == [0, 1]


NAMES = ("tokens", "index", "rank", "merged", "density")
FIVE = PrunedVideo(record(), kept(5, 8, **{name: np.resize(values, 5) for name, values in FULL.items()}))


def test_tokens_are_wrapped_without_a_copy():
    batch = encoded_batch(FIVE)
    for name in NAMES:
        assert getattr(FIVE.kept, name).ctypes.data in buffers(batch[name]), name


def test_tokens_are_views_into_the_batch():
    (again,) = encoded_videos(encoded_batch(FIVE))
    for name in NAMES:
        assert getattr(again.kept, name).ctypes.data == getattr(FIVE.kept, name).ctypes.data, name


def test_videos_of_many_shapes_and_failures_share_a_table():
    """Also behind a slice, as Ray cuts them, and after the way through a file."""
    videos = [
        PrunedVideo(record("a"), kept(2, 4)),
        PrunedVideo(failed_video(record("bad"), VideoFault("crash", "gone", exit_signal=11))),
        PrunedVideo(record("b"), kept(5, 3, levels=2, evidence={"token_key": 2})),
        encoded("c", random_tokens(0), 0.25, "gstep"),
    ]
    table = pa.concat_tables([encoded_batch(video) for video in videos])
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    for batch in (table, table.combine_chunks(), pq.read_table(pa.BufferReader(sink.getvalue()))):
        for ours, expected in zip(encoded_videos(batch), videos, strict=True):
            assert_same(ours, expected)
        for ours, expected in zip(encoded_videos(batch.slice(1, 2)), videos[1:3], strict=True):
            assert_same(ours, expected)


@settings(deadline=None, max_examples=50)
@given(
    n=st.integers(1, 6),
    width=st.integers(1, 5),
    levels=st.integers(0, 3),
    evidence=st.dictionaries(st.sampled_from(["token_key", "image_embedding", "ä"]), st.integers(1, 4)),
)
def test_any_shape_comes_back(n, width, levels, evidence):
    video = PrunedVideo(record(), kept(n, width, levels, evidence=evidence))
    (again,) = encoded_videos(encoded_batch(video))
    assert_same(again, video)


def test_written_records_come_back_without_the_keys_that_were_absent():
    rows = [
        {**record("a"), "n_tokens": 0, "backend_note": "", "row_counts": [1, 2]},
        failed_video(record("bad"), VideoFault("corrupt", "torn")),
    ]
    batch = written_batch(rows)
    assert batch.schema.equals(WRITTEN) and batch["status"].to_pylist() == ["ok", "failed"]
    assert written_records(batch) == rows
    assert "start_s" not in written_records(batch)[0]  # a null is an absent key
    assert written_records(written_batch([])) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda row: decoded_batch(row, FRAMES),
        lambda row: encoded_batch(PrunedVideo(row, kept())),
        lambda row: encoded_batch(PrunedVideo(row)),
        lambda row: written_batch([record(), row]),
    ],
)
def test_a_key_that_is_no_column_is_refused(make):
    with pytest.raises(KeyError, match="no columns of the videos table: colour, shape"):
        make({**record(), "shape": 1, "colour": "red"})
