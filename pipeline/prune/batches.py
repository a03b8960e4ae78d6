"""Serialization of the batches of videos that travel between the stages of a run.

Small videos share a batch, because Ray Data transports about twenty blocks per second and worker, whatever their size.
A batch is one row, because Ray Data splits blocks only between rows. Its records are one cell of JSON, since a column
per key would cost milliseconds per block.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.cache.schema import VIDEO_SCHEMA
from pipeline.cache.writer import KeptTokens, VideoItem
from pipeline.inputs.named_videos import TODO_SCHEMA
from pipeline.rows import VideoRecord, drop_nulls

BYTES = pa.large_binary()
CELLS = pa.list_(BYTES)
# The arrays of KeptTokens: a cell per video, which is null if the video has none.
_ARRAYS: Mapping[str, type[np.generic]] = {
    "tokens": np.int16,
    "index": np.int32,
    "rank": np.int32,
    "merged": np.bool_,
    "density": np.float32,
}

#: The schema of a decode task: the rows of the videos that one call decodes, in one cell.
TASK_SCHEMA = pa.schema([pa.field("videos", BYTES)])
#: The schema of a batch of videos between two stages. ``deepstack`` and ``evidence`` list the arrays of all videos one
#: after the other; ``layout`` has the result of ``_measure_widths`` for each video.
BATCH_SCHEMA = pa.schema(
    [
        pa.field("records", BYTES),
        pa.field("layout", BYTES),
        *(pa.field(name, CELLS) for name in ("frames", *_ARRAYS, "deepstack", "evidence")),
    ]
)
#: The schema of written videos: VIDEO_SCHEMA, but all columns may be null, since a commit fills some of them.
WRITTEN_SCHEMA = pa.schema([field.with_nullable(True) for field in VIDEO_SCHEMA])


def pack_task(todo: pa.Table) -> pa.Table:
    """Pack rows of videos (TODO_SCHEMA, at least one) into one row of TASK_SCHEMA."""
    (batch,) = todo.combine_chunks().to_batches()
    return pa.table([pa.array([batch.serialize().to_pybytes()], BYTES)], schema=TASK_SCHEMA)


def unpack_task(unit: pa.Table) -> pa.RecordBatch:
    """Return the rows of videos (TODO_SCHEMA) in a row of TASK_SCHEMA."""
    return pa.ipc.read_record_batch(unit["videos"][0].as_buffer(), TODO_SCHEMA)


def pack(videos: Sequence[VideoItem]) -> pa.Table:
    """Pack videos into one row of BATCH_SCHEMA.

    Args:
        videos: decoded videos with frames, encoded videos with kept tokens, and failed videos with neither.

    Raises:
        KeyError: a record has a key that is not a column of the videos table.
    """
    kept_tokens = [video.kept for video in videos]
    layout = [_measure_widths(tokens) if tokens else (0, [], {}) for tokens in kept_tokens]
    columns: list[Iterable[NDArray[Any] | None]] = [
        [video.frames for video in videos],
        *([getattr(tokens, name, None) for tokens in kept_tokens] for name in _ARRAYS),
        [level for tokens in kept_tokens if tokens for level in tokens.deepstack],
        [values for tokens in kept_tokens if tokens for values in tokens.evidence.values()],
    ]
    records = [video.record for video in videos]
    _refuse_unknown(records)
    return pa.table([_pack_json(records), _pack_json(layout), *map(_pack_cells, columns)], schema=BATCH_SCHEMA)


def unpack_batch(bundle: pa.Table) -> list[VideoItem]:
    """Return the videos in a row of BATCH_SCHEMA, in the order in which they were packed.

    Their arrays are read-only views into the row. ``frames`` is flat: ``VideoItem.reshape_frames`` restores its shape.
    ``frames`` and ``kept`` are None where the packed video had none.
    """
    columns = {
        name: bundle[name].chunk(0).flatten() for name in BATCH_SCHEMA.names if name not in ("records", "layout")
    }
    next_level = count()  # the cells of deepstack levels and evidence are consecutive over all videos
    next_label = count()
    videos = []
    records, layout = _unpack_json(bundle["records"]), _unpack_json(bundle["layout"])
    for number, (record, (width, levels, labels)) in enumerate(zip(records, layout, strict=True)):
        arrays = {name: read_cell(columns[name], number, kind) for name, kind in _ARRAYS.items()}
        kept_tokens = None
        if arrays["index"] is not None:
            arrays["tokens"] = arrays["tokens"].reshape(-1, width)
            deepstack = [read_cell(columns["deepstack"], next(next_level), np.int16).reshape(-1, n) for n in levels]
            evidence = {
                name: read_cell(columns["evidence"], next(next_label), np.int16).reshape(-1, n)
                for name, n in labels.items()
            }
            kept_tokens = KeptTokens(**arrays, deepstack=deepstack, evidence=evidence)
        videos.append(VideoItem(record, kept_tokens, read_cell(columns["frames"], number, np.uint8)))
    return videos


def pack_written(rows: Sequence[VideoRecord]) -> pa.Table:
    """Convert records to rows of WRITTEN_SCHEMA; missing keys become nulls. Raises KeyError for an unknown key."""
    _refuse_unknown(rows)
    return pa.Table.from_pylist(list(rows), schema=WRITTEN_SCHEMA)


def unpack_failed(rows: pa.Table) -> list[VideoRecord]:
    """Return the records of the rows of WRITTEN_SCHEMA whose status is not "ok", without null values."""
    return [drop_nulls(row, VideoRecord) for row in rows.filter(pc.not_equal(rows["status"], "ok")).to_pylist()]


def _measure_widths(tokens: KeptTokens) -> tuple[int, list[int], dict[str, int]]:
    """Return the row widths of a video's tokens, of each deepstack level, and of each evidence."""
    levels = [level.shape[1] for level in tokens.deepstack]
    return tokens.tokens.shape[1], levels, {name: values.shape[1] for name, values in tokens.evidence.items()}


def _pack_json(value: object) -> pa.Array:
    """Serialize a value as JSON into an array with one cell."""
    return pa.array([json.dumps(value).encode()], BYTES)


def _unpack_json(column: pa.ChunkedArray) -> list[Any]:
    """Parse the JSON list in the first cell of a column."""
    values: list[Any] = json.loads(column[0].as_buffer().to_pybytes())
    return values


def _refuse_unknown(rows: Sequence[VideoRecord]) -> None:
    """Raise KeyError if a record has a key that is not a column of the videos table."""
    if unknown := {name for row in rows for name in row} - set(WRITTEN_SCHEMA.names):
        raise KeyError(f"not columns of the videos table: {', '.join(sorted(unknown))}")


def _pack_cells(arrays: Iterable[NDArray[Any] | None]) -> pa.Array:
    """Pack arrays into one row: a list with a cell of bytes per array, which is null for None.

    If only one array has content, and it is contiguous, its bytes are not copied.
    """
    arrays, empty = list(arrays), np.empty(0, np.uint8)
    pieces = [empty if array is None else np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    filled_pieces = [piece for piece in pieces if len(piece)]
    data = filled_pieces[0] if len(filled_pieces) == 1 else np.concatenate([empty, *filled_pieces])
    _, present = pa.array(
        [array is not None for array in arrays], pa.bool_()
    ).buffers()  # the validity bits in Arrow's layout
    cells = pa.Array.from_buffers(BYTES, len(pieces), [present, pa.py_buffer(offsets), pa.py_buffer(data)])
    return pa.ListArray.from_arrays(pa.array([0, len(cells)], pa.int32()), cells)


def read_cell(cells: pa.Array, index: int, dtype: Any) -> Any:
    """Return the bytes of cell ``index`` as a flat read-only array without a copy; None for a null cell."""
    if cells.slice(index, 1).null_count:
        return None
    _, offsets, data = cells.buffers()
    start, end = np.frombuffer(offsets, np.int64)[cells.offset + index : cells.offset + index + 2].tolist()
    return np.frombuffer(data.slice(start, end - start), dtype)
