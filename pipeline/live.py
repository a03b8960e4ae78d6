"""The videos table as index and commit log: which row of a video counts.

A video's live row is the one with (ok before failed, most attempts, smallest shard name). Every reader of the cache
(TokenCache, resume, inspect, verify) asks this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import CorruptShard
from pipeline.schema import READ_THREADS, digest, open_parquet
from pipeline.store import Store

TOKENS, VIDEOS = "tokens", "videos"  # folders of a cache
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


class VideosTable:
    """Some columns of the videos table, kept in memory. Shards never change, so each is read once."""

    def __init__(self, store: Store, columns: Sequence[str] = INDEX_COLUMNS) -> None:
        self._store = store
        self._columns = columns
        self._tables: dict[str, pa.Table] = {}

    def rows(self) -> pa.Table:
        """Every row that is committed by now: the columns plus ``shard`` (its videos shard) and ``row`` in it."""
        names = self._store.names(VIDEOS, ".parquet")
        new = [name for name in names if name not in self._tables]
        for name, data in zip(new, self._store.read_all(new), strict=True):
            table = parse_videos_shard(self._store, name, data, self._columns)
            table = table.append_column("shard", pa.repeat(name, len(table)).cast(pa.string()))
            self._tables[name] = table.append_column("row", pa.array(np.arange(len(table)), pa.int32()))
        if not names:
            return pa.table({**{c: [] for c in self._columns}, "shard": [], "row": []})
        return pa.concat_tables([self._tables[name] for name in names])

    def live(self) -> pa.Table:
        """The live row of every video, by video_id."""
        return live_rows(self.rows())


def read_live(store: Store, columns: Sequence[str] = INDEX_COLUMNS) -> pa.Table:
    """The live row of every video: ``columns`` plus ``shard`` and ``row``, by video_id."""
    return VideosTable(store, columns).live()


def live_rows(rows: pa.Table, key: str = "video_id") -> pa.Table:
    """Of rows with ``key``, status, attempts and shard: each video's (question's) live one, sorted by ``key``."""
    failed = pc.not_equal(rows["status"], "ok").cast(pa.int8())
    keys = [(key, "ascending"), ("_failed", "ascending"), ("attempts", "descending"), ("shard", "ascending")]
    order = pc.sort_indices(rows.append_column("_failed", failed), sort_keys=keys)
    ordered = rows.take(order)
    ids = ordered[key].combine_chunks()
    if len(ids) < 2:
        return ordered
    first = np.concatenate([[True], pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)])
    return ordered.filter(pa.array(first))


class VideoRows:
    """Full rows of the videos table, a few shards kept in memory."""

    def __init__(self, store: Store, keep: int = 8) -> None:
        self._shard = lru_cache(maxsize=keep)(lambda name: read_videos_shard(store, name))

    def __call__(self, shard: str, row: int) -> dict[str, Any]:
        return dict(self._shard(shard).slice(row, 1).to_pylist()[0])
