"""A cache as a source of Ray Data: a row per video."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.live import LiveShards
from pipeline.cache.reader import TokenCache, TokenOrder, count_tokens
from pipeline.cache.writer import Bits, KeptTokens

_MAX_VIDEOS_PER_READ = 4  # videos in the memory of a read task
_MAX_SAMPLED_SHARDS = 4  # shards whose rows estimate the size of all videos


class ReadOptions(NamedTuple):
    """The options of reading a video, as of ``TokenCache.get``."""

    retention_ratio: float | None = None
    order: TokenOrder = "index"
    evidence: tuple[str, ...] = ()


def ray_dataset(
    cache: TokenCache | str | Path,
    ids: Sequence[str] | None = None,
    *,
    retention_ratio: float | None = None,
    order: TokenOrder = "index",
    evidence: Sequence[str] = (),
    blocks: int | None = None,
) -> ray.data.Dataset:
    """Read the videos of a cache as a Ray Dataset: a row a video, in the order of the shards.

    Columns: ``video_id``; ``tokens``, the bytes of [K, ``hidden_size``] little-endian bfloat16, which Arrow and numpy
    do not have; ``index``, ``rank``, ``frame`` [K] int32, ``merged`` and ``density`` [K], null where a method has none;
    ``deepstack_0`` and so on like ``tokens``; ``evidence_<name>`` likewise; ``metadata``, the videos row as JSON::

        tokens = torch.frombuffer(bytearray(row["tokens"]), dtype=torch.bfloat16).view(-1, row["hidden_size"])

    Args:
        cache: opened here; it travels to the nodes, with its store's credentials.
        ids: each id is read once; None for all videos that have tokens.
        blocks: read tasks; by default Ray's own choice. A task has a shard or more.

    Raises as ``TokenCache.get`` where the rows are read.
    """
    token_cache = cache if isinstance(cache, TokenCache) else TokenCache(cache)
    source = TokenSource(token_cache, ids, ReadOptions(retention_ratio, order, tuple(evidence)))
    return ray.data.read_datasource(source, override_num_blocks=blocks)


class TokenSource(Datasource):  # type: ignore[misc]  # Ray has no types
    """A Ray Data source that reads the videos of a cache, a row each."""

    def __init__(self, cache: TokenCache, ids: Sequence[str] | None, options: ReadOptions) -> None:
        super().__init__()
        self._cache, self._options = cache, options
        self._shards = cache.shards(ids)
        self._video_bytes = _estimate_video_bytes(cache, self._shards, options)

    def get_name(self) -> str:
        return "CachedTokens"

    def estimate_inmemory_data_size(self) -> int:
        return self._video_bytes * int(self._shards.counts.sum())

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Make a task for each of ``parallelism`` groups of shards, or for each shard where there are fewer.

        Puts the cache into Ray's object store. ``data_context`` is not used.
        """
        cache = ray.put((self._cache, self._shards))
        n_tasks = max(1, min(parallelism, len(self._shards)))
        tasks = []
        for numbers in np.array_split(np.arange(len(self._shards)), n_tasks):
            n_videos = int(self._shards.counts[numbers].sum())
            metadata = BlockMetadata(
                num_rows=n_videos, size_bytes=self._video_bytes * n_videos, input_files=None, exec_stats=None
            )
            read = partial(_read_shards, cache, numbers.tolist(), self._options)
            tasks.append(ReadTask(read, metadata, per_task_row_limit=per_task_row_limit))
        return tasks


def _read_shards(cache_ref: ray.ObjectRef, numbers: Sequence[int], options: ReadOptions) -> Iterator[pa.Table]:
    """Read the videos of some shards, and yield a one-row table for each; runs in a read task."""
    cached: tuple[TokenCache, LiveShards] = ray.get(cache_ref)
    cache, shards = cached
    for number in numbers:
        rows = cache.rows_of(shards, number)
        for start in range(0, len(rows), _MAX_VIDEOS_PER_READ):
            for video in cache.get_rows(rows[start : start + _MAX_VIDEOS_PER_READ], *options):
                yield as_row(video)


def as_row(video: CachedVideo) -> pa.Table:
    """Return a video as one row with the columns that ``ray_dataset`` describes."""
    kept = KeptTokens.of(video, video.deepstack, video.evidence)
    levels = {f"deepstack_{i}": level for i, level in enumerate(kept.deepstack)}
    vectors = {"tokens": kept.tokens, **levels, **{f"evidence_{name}": v for name, v in kept.evidence.items()}}
    return pa.table(
        {
            "video_id": pa.array([video.video_id]),
            "hidden_size": pa.array([kept.tokens.shape[1]], pa.int32()),
            "index": pa.array([kept.index], pa.list_(pa.int32())),
            "rank": pa.array([kept.rank], pa.list_(pa.int32())),
            "frame": pa.array([video.frame.numpy()], pa.list_(pa.int32())),
            "merged": pa.array([kept.merged], pa.list_(pa.bool_())),
            "density": pa.array([kept.density], pa.list_(pa.float32())),
            "metadata": pa.array([json.dumps(video.metadata)]),
            **{name: _to_binary(values) for name, values in vectors.items()},
        }
    )


def _to_binary(values: Bits) -> pa.Array:
    """Return the bits of bfloat16 numbers as a column of one binary value, without a copy."""
    data = pa.py_buffer(values)
    ends = pa.py_buffer(np.array([0, data.size], np.int64))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, ends, data])


def _estimate_video_bytes(cache: TokenCache, shards: LiveShards, options: ReadOptions) -> int:
    """Estimate the mean bytes of a video's row in memory, without evidence, from a few shards; 0 without a row."""
    numbers = range(0, len(shards), max(1, len(shards) // _MAX_SAMPLED_SHARDS))
    sample = [row for number in numbers[:_MAX_SAMPLED_SHARDS] for row in cache.rows_of(shards, number)]
    sizes = [
        count_tokens(row, options.retention_ratio) * (2 * row["hidden_size"] * (1 + cache.deepstack_levels) + 12)
        for row in sample
        if row["status"] == "ok"
    ]
    return int(np.mean(sizes)) if sizes else 0
