"""Caches as sources of Ray Data: a row a video, read shard by shard on the nodes."""

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
import torch
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from torch import Tensor

from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.live import LiveShards
from pipeline.cache.reader import TokenCache, TokenOrder, count_tokens

_VIDEOS_AT_ONCE = 4  # videos in the memory of a read task
_SAMPLED_SHARDS = 4  # shards from whose rows the size of the others is estimated


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
        cache: opened here; it travels to the nodes, with what its store needs to be reached.
        ids: each is read once; None for all videos that have tokens.
        blocks: read tasks; by default Ray's own choice. No task has less than a shard.

    Raises as ``TokenCache.get`` where the rows are read.
    """
    opened = cache if isinstance(cache, TokenCache) else TokenCache(cache)
    source = TokenSource(opened, ids, ReadOptions(retention_ratio, order, tuple(evidence)))
    return ray.data.read_datasource(source, override_num_blocks=blocks)


class TokenSource(Datasource):  # type: ignore[misc]  # Ray has no types
    """A Ray Data source that reads the videos of a cache, a row each."""

    def __init__(self, cache: TokenCache, ids: Sequence[str] | None, options: ReadOptions) -> None:
        super().__init__()
        self._cache, self._options = cache, options
        self._shards = cache.shards(ids)
        self._video_bytes = _bytes_of_a_video(cache, self._shards, options)

    def get_name(self) -> str:
        return "CachedTokens"

    def estimate_inmemory_data_size(self) -> int:
        return self._video_bytes * int(self._shards.counts.sum())

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Make a task for each of ``parallelism`` groups of shards, or for each shard where there are fewer."""
        cache = ray.put((self._cache, self._shards))
        n_tasks = max(1, min(parallelism, len(self._shards)))
        tasks = []
        for numbers in np.array_split(np.arange(len(self._shards)), n_tasks):
            n_videos = int(self._shards.counts[numbers].sum())
            metadata = BlockMetadata(
                num_rows=n_videos, size_bytes=self._video_bytes * n_videos, input_files=None, exec_stats=None
            )
            read = partial(_read, cache, numbers.tolist(), self._options)
            tasks.append(ReadTask(read, metadata, per_task_row_limit=per_task_row_limit))
        return tasks


def _read(held: ray.ObjectRef, numbers: Sequence[int], options: ReadOptions) -> Iterator[pa.Table]:
    """Read the videos of some shards in a read task, and yield a one-row table each."""
    opened: tuple[TokenCache, LiveShards] = ray.get(held)
    cache, shards = opened
    for number in numbers:
        rows = cache.rows_of(shards, number)
        for start in range(0, len(rows), _VIDEOS_AT_ONCE):
            for video in cache.get_rows(rows[start : start + _VIDEOS_AT_ONCE], *options):
                yield as_row(video)


def as_row(video: CachedVideo) -> pa.Table:
    """Return a video as one row with the columns that ``ray_dataset`` describes."""
    levels = {f"deepstack_{i}": level for i, level in enumerate(video.deepstack)}
    vectors = {"tokens": video.tokens, **levels, **{f"evidence_{name}": v for name, v in video.evidence.items()}}
    return pa.table(
        {
            "video_id": pa.array([video.video_id]),
            "hidden_size": pa.array([video.tokens.shape[1]], pa.int32()),
            "index": _numbers(video.index, pa.int32()),
            "rank": _numbers(video.rank, pa.int32()),
            "frame": _numbers(video.frame, pa.int32()),
            "merged": _numbers(video.merged, pa.bool_()),
            "density": _numbers(video.density, pa.float32()),
            "metadata": pa.array([json.dumps(video.metadata)]),
            **{name: _bytes(values) for name, values in vectors.items()},
        }
    )


def _numbers(values: Tensor | None, kind: pa.DataType) -> pa.Array:
    """Return numbers as a column of one list, null for None."""
    return pa.array([None if values is None else values.numpy()], pa.list_(kind))


def _bytes(values: Tensor) -> pa.Array:
    """Return the bits of bfloat16 numbers as a column of one binary value, without a copy."""
    data = pa.py_buffer(values.contiguous().view(torch.int16).numpy())
    ends = pa.py_buffer(np.array([0, data.size], np.int64))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, ends, data])


def _bytes_of_a_video(cache: TokenCache, shards: LiveShards, options: ReadOptions) -> int:
    """Estimate the bytes of a video's row in memory, without evidence, from the rows of a few shards."""
    numbers = range(0, len(shards), max(1, len(shards) // _SAMPLED_SHARDS))
    sample = [row for number in numbers[:_SAMPLED_SHARDS] for row in cache.rows_of(shards, number)]
    sizes = [
        count_tokens(row, options.retention_ratio) * (2 * row["hidden_size"] * (1 + cache.deepstack_levels) + 12)
        for row in sample
        if row["status"] == "ok"
    ]
    return int(np.mean(sizes)) if sizes else 0
