"""The videos table as index and commit log: which row of a video counts.

A video's live row is the one with (ok before failed, most attempts, smallest shard name). Every reader of the cache
(TokenCache, resume, inspect, verify) asks this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.cache.loaded_once import LoadedOnce
from pipeline.cache.schema import READ_THREADS, VIDEO_SCHEMA, digest, open_parquet
from pipeline.errors import CorruptShard
from pipeline.rows import VideoRow
from pipeline.storage.stores import Store

TOKENS, VIDEOS = "tokens", "videos"  # folders of a cache
_PLACE = (pa.field("shard", pa.string()), pa.field("row", pa.int32()))
_SHARDS_AT_ONCE = 256
_MOST_TEXT = 2**31  # bytes that offsets of 32 bits reach
# What stays in memory for each video; the rest of a row is read from its shard when asked for.
INDEX_COLUMNS = ("video_id", "status", "attempts", "error_class", "uri", "source_size", "start_s", "end_s")


def shard_name(folder: str, run_id: str, number: int, data: bytes | pa.Buffer, suffix: str = ".parquet") -> str:
    """A committed shard carries the hash of its content in its name, so that no flipped bit goes unseen."""
    return f"{folder}/{run_id}-{number:06d}-{digest(data).partition(':')[2]}{suffix}"


def check_content(store: Store, name: str, data: bytes) -> None:
    """Raises CorruptShard where a committed shard does not have the hash in its name."""
    if digest(data).partition(":")[2] != PurePosixPath(name).stem.rpartition("-")[2]:
        message = f"{store}/{name}: its content does not have the hash in its name; restore the file"
        raise CorruptShard(message, "commit")


def read_videos_shard(store: Store, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """One videos shard, its content checked. Raises CorruptShard."""
    return parse_videos_shard(store, name, store.read(name), columns)


def parse_videos_shard(store: Store, name: str, data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """The shard from its bytes. Raises CorruptShard."""
    check_content(store, name, data)
    return open_parquet(pa.BufferReader(data)).read(
        columns=None if columns is None else list(columns), use_threads=READ_THREADS
    )


def read_live(store: Store, columns: Sequence[str] = INDEX_COLUMNS, names: Sequence[str] | None = None) -> pa.Table:
    """The live row of every video: ``columns`` plus ``shard`` (its videos shard) and ``row`` in it, by video_id.

    All of it is in memory: what serves many videos asks ``pipeline.cache.index.live_videos``, and a run keeps a
    ``pipeline.cache.ledger.Ledger``. ``names`` are the shards to read, all by default.
    """
    tables: list[pa.Table] = []
    names = store.names(VIDEOS, ".parquet") if names is None else names
    if not names:
        return pa.schema([*(VIDEO_SCHEMA.field(name) for name in columns), *_PLACE]).empty_table()
    for number, (name, data) in enumerate(zip(names, store.read_all(names), strict=True), 1):
        table = parse_videos_shard(store, name, data, columns)
        table = table.append_column(_PLACE[0], pa.repeat(name, len(table)).cast(pa.string()))
        tables.append(table.append_column(_PLACE[1], pa.array(np.arange(len(table)), pa.int32())))
        if number % _SHARDS_AT_ONCE == 0:  # a table of few rows takes more than they do
            tables = [*tables[:-_SHARDS_AT_ONCE], pa.concat_tables(tables[-_SHARDS_AT_ONCE:]).combine_chunks()]
    return live_rows(pa.concat_tables(tables))


def best_first(
    ids: Sequence[NDArray[Any]], failed: NDArray[np.bool_], attempts: NDArray[Any], shards: NDArray[Any]
) -> NDArray[np.int64]:
    """Return the order of rows, [n], in which those of an id stand together, its live one first. The rule is here.

    Args:
        ids: one array [n] or several that make up an id, the most significant first.
        failed: [n]: the row is an error.
        attempts: [n].
        shards: [n] numbers of the shards, in the order of their names.
    """
    return np.lexsort((shards, -attempts.astype(np.int64), failed, *reversed(ids)))


def live_rows(rows: pa.Table, keys: Sequence[str] = ("video_id",)) -> pa.Table:
    """Of rows with ``keys``, status, attempts and shard: each video's (question's) live one, sorted by ``keys``."""
    if len(rows) == 0:
        return rows
    *ids, shards = (pc.rank(rows[name], tiebreaker="dense").to_numpy() for name in (*keys, "shard"))
    failed = pc.not_equal(rows["status"], "ok").to_numpy()
    order = best_first(ids, failed, rows["attempts"].to_numpy(), shards)
    others = [column[order][1:] != column[order][:-1] for column in ids]
    first = np.append(True, np.logical_or.reduce(others))
    return _roomy(rows).take(pa.array(order[first]))


def _roomy(rows: pa.Table) -> pa.Table:
    """Texts of more than 2 GB need offsets of 64 bits."""
    if rows.nbytes < _MOST_TEXT:
        return rows
    wide = [field.with_type(pa.large_string()) if field.type == pa.string() else field for field in rows.schema]
    return rows.cast(pa.schema(wide, rows.schema.metadata))


class VideoRows:
    """Full rows of the videos table, those of a few shards kept in memory. Threads may share it."""

    def __init__(self, store: Store, keep: int = 8) -> None:
        self._shard = LoadedOnce(partial(_rows_of, store), keep)

    def __call__(self, shard: str, row: int) -> VideoRow:
        return _copy(self._shard(shard)[row])

    def of(self, shard: str) -> list[VideoRow]:
        """All rows of a shard."""
        return list(map(_copy, self._shard(shard)))


def _copy(row: VideoRow) -> VideoRow:
    copied = {name: list(value) if isinstance(value, list) else value for name, value in row.items()}
    return cast(VideoRow, copied)


def _rows_of(store: Store, shard: str) -> list[VideoRow]:
    """All at once: one row of twenty takes Arrow half as long as all of them."""
    rows: list[VideoRow] = read_videos_shard(store, shard).to_pylist()
    return rows
