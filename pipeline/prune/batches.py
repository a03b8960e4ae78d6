"""How videos travel between the stages of a graph: Arrow rows whose record has the types of the videos table.

Arrays are wrapped, not copied, as flat bytes beside the record that says their shapes: ragged tensors as Arrow's own
tensor columns would fail where two shapes meet in a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gstep.evidence import is_per_frame
from pipeline.cache.schema import VIDEO_SCHEMA
from pipeline.cache.writer import Bits, KeptTokens, PrunedVideo
from pipeline.rows import VideoRecord, without_nulls

RECORD = pa.field("record", pa.struct([field.with_nullable(True) for field in VIDEO_SCHEMA]))
BYTES = pa.large_binary()

DECODED = pa.schema([RECORD, pa.field("frames", BYTES)])  # [t,h,w,3] uint8; null for a video that failed
ENCODED = pa.schema(
    [
        RECORD,
        pa.field("tokens", BYTES),  # null for a video that failed
        *(pa.field(name, BYTES) for name in ("index", "rank", "merged", "density")),
        pa.field("deepstack", pa.list_(BYTES)),
        pa.field("evidence", pa.map_(pa.string(), BYTES)),
    ]
)
WRITTEN = pa.schema(list(RECORD.type))


def decoded_batch(record: VideoRecord, frames: NDArray[np.uint8] | None = None) -> pa.Table:
    """One video as DECODED."""
    return pa.table([_records([record]), _wrapped([frames])], schema=DECODED)


def decoded_frames(batch: pa.Table, row: int, record: VideoRecord) -> NDArray[np.uint8]:
    """The frames of a video that was decoded, whose record is ``record``, [t,h,w,3]."""
    frames = _unwrapped(batch["frames"], row, np.uint8)
    assert frames is not None
    return frames.reshape(len(record["frame_indices"]), record["height"], record["width"], 3)


def encoded_batch(video: PrunedVideo) -> pa.Table:
    """One video as ENCODED."""
    kept = video.kept
    if kept is None:
        columns = [pa.nulls(1, field.type) for field in list(ENCODED)[1:]]
        return pa.table([_records([video.record]), *columns], schema=ENCODED)
    flat = [_wrapped([values]) for values in (kept.tokens, kept.index, kept.rank, kept.merged, kept.density)]
    levels = pa.ListArray.from_arrays([0, len(kept.deepstack)], _wrapped(kept.deepstack))
    names = pa.array(list(kept.evidence), pa.string())
    evidence = pa.MapArray.from_arrays([0, len(names)], names, _wrapped(kept.evidence.values()))
    return pa.table([_records([video.record]), *flat, levels, evidence], schema=ENCODED)


def encoded_videos(batch: pa.Table) -> list[PrunedVideo]:
    """The videos of rows of ENCODED, their arrays views into the batch."""
    return [PrunedVideo(record, _kept(batch, row, record)) for row, record in enumerate(records(batch))]


def written_batch(rows: Sequence[VideoRecord]) -> pa.Table:
    """Videos as WRITTEN."""
    return pa.Table.from_struct_array(_records(rows)).cast(WRITTEN)


def written_records(batch: pa.Table) -> list[VideoRecord]:
    """The records of rows of WRITTEN."""
    return [without_nulls(row, VideoRecord) for row in batch.to_pylist()]


def records(batch: pa.Table) -> list[VideoRecord]:
    """The records of rows of DECODED or ENCODED."""
    return [without_nulls(row, VideoRecord) for row in batch["record"].to_pylist()]


def _kept(batch: pa.Table, row: int, record: VideoRecord) -> KeptTokens | None:
    def numbers(name: str, dtype: Any) -> Any:
        return _unwrapped(batch[name], row, dtype)

    index = numbers("index", np.int32)
    if index is None:
        return None

    def vectors(column: pa.ChunkedArray | pa.Array, place: int, rows: int) -> Bits:
        values = _unwrapped(column, place, np.int16)
        assert values is not None
        return values.reshape(rows, -1)

    levels = batch["deepstack"][row].values
    names, cells = batch["evidence"][row].values.flatten()
    return KeptTokens(
        tokens=vectors(batch["tokens"], row, len(index)),
        index=index,
        rank=numbers("rank", np.int32),
        merged=numbers("merged", np.bool_),
        density=numbers("density", np.float32),
        deepstack=[vectors(levels, place, len(index)) for place in range(len(levels))],
        evidence={
            name: vectors(cells, place, record["n_frames"] if is_per_frame(name) else len(index))
            for place, name in enumerate(names.to_pylist())
        },
    )


def _records(rows: Sequence[VideoRecord]) -> pa.Array:
    if unknown := {name for row in rows for name in row} - {field.name for field in RECORD.type}:
        raise KeyError(f"no columns of the videos table: {', '.join(sorted(unknown))}")  # Arrow would drop them
    return pa.array(rows, RECORD.type)


def _wrapped(arrays: Iterable[NDArray[Any] | None]) -> pa.Array:
    """Each array as one cell of bytes, null for None; a single one without a copy."""
    parts = [None if array is None else np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    present = [part for part in parts if part is not None]
    if len(present) != len(parts):
        return pa.array([None if part is None else part.tobytes() for part in parts], BYTES)
    offsets = np.cumsum([0, *map(len, present)], dtype=np.int64)
    data = present[0] if len(present) == 1 else np.concatenate([np.empty(0, np.uint8), *present])
    return pa.Array.from_buffers(BYTES, len(present), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _unwrapped(column: pa.ChunkedArray | pa.Array, row: int, dtype: Any) -> NDArray[Any] | None:
    """What ``_wrapped`` put into a cell, as a flat read-only view. (A scalar of it would be a copy.)"""
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        if row < len(chunk):
            break
        row -= len(chunk)
    if chunk.slice(row, 1).null_count:
        return None
    _, offsets, data = chunk.buffers()
    start, end = np.frombuffer(offsets, np.int64)[chunk.offset + row : chunk.offset + row + 2].tolist()
    return np.frombuffer(data.slice(start, end - start), dtype)
