"""A pruned-token cache as a data source of Ray Data, with one row per video."""

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

_MAX_VIDEOS_PER_READ = 4  # videos that a read task has in memory at a time
_MAX_SAMPLED_SHARDS = 4  # shards from which the size of all videos is estimated


class ReadOptions(NamedTuple):
    """The options with which a video is read, with the meaning that they have in ``TokenCache.get``."""

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
    """Return a Ray Dataset with one row for each video of a cache, in the order of the token shards.

    The columns are ``video_id``; ``hidden_size``; ``tokens``, the bytes of [K, ``hidden_size``] little-endian bfloat16,
    which Arrow and numpy lack; ``index``, ``rank`` and ``frame`` [K] int32, ``merged`` and ``density`` [K] (null if the
    method has none); ``deepstack_0`` and so on, and ``evidence_<name>``, encoded like ``tokens``; ``metadata``, the
    videos row as JSON::

        tokens = torch.frombuffer(bytearray(row["tokens"]), dtype=torch.bfloat16).view(-1, row["hidden_size"])

    Args:
        cache: a path is opened here. The cache travels to the nodes, with the credentials of its store.
        ids: the videos to read, each once; None for all videos that have tokens.
        retention_ratio: the share of all T*N tokens to read; None for all stored tokens.
        order: "index" for ascending index, "selection" for the stored order.
        evidence: the names of stored evidence to read too.
        blocks: the number of read tasks, at most one per token shard; None leaves it to Ray.

    Raises:
        UnknownVideo: an id has no row.
        RatioNotCached: a sampled video is not stored at this ratio. For the others, and for FailedVideo,
            EvidenceNotCached and damaged shards, the error appears when the dataset is executed.
        NotACache, CorruptShard, OSError: the cache cannot be opened.
    """
    token_cache = cache if isinstance(cache, TokenCache) else TokenCache(cache)
    source = TokenSource(token_cache, ids, ReadOptions(retention_ratio, order, tuple(evidence)))
    return ray.data.read_datasource(source, override_num_blocks=blocks)


class TokenSource(Datasource):  # type: ignore[misc]  # Ray has no types
    """A Ray Data source that reads the videos of a cache, one row per video."""

    def __init__(self, cache: TokenCache, ids: Sequence[str] | None, options: ReadOptions) -> None:
        """Look up the token shards of the videos (None: all with tokens), and estimate the size of a row.

        Raises:
            UnknownVideo: an id has no row.
            RatioNotCached: a sampled video is not stored at this ratio.
        """
        super().__init__()
        self._cache = cache
        self._options = options
        self._shards = cache.shards(ids)
        self._video_bytes = _estimate_video_bytes(cache, self._shards, options)

    def get_name(self) -> str:
        return "CachedTokens"

    def estimate_inmemory_data_size(self) -> int:
        return self._video_bytes * int(self._shards.counts.sum())

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Return a read task for each group of consecutive token shards, at most ``parallelism`` and at least one.

        The cache is put into Ray's object store once for all tasks. ``data_context`` is ignored.
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
    """Yield a one-row table for each video of the token shards with these numbers. Runs in a read task.

    Raises:
        FailedVideo, RatioNotCached, EvidenceNotCached: a video cannot be read with these options.
    """
    cached: tuple[TokenCache, LiveShards] = ray.get(cache_ref)
    cache, shards = cached
    for number in numbers:
        rows = cache.rows_of(shards, number)
        for start in range(0, len(rows), _MAX_VIDEOS_PER_READ):
            for video in cache.get_rows(rows[start : start + _MAX_VIDEOS_PER_READ], *options):
                yield make_video_row(video)


def make_video_row(video: CachedVideo) -> pa.Table:
    """Return a video as a one-row table with the columns that ``ray_dataset`` lists."""
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
    """Return an array of one binary value, which shares the memory of ``values``."""
    data = pa.py_buffer(values)
    ends = pa.py_buffer(np.array([0, data.size], np.int64))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, ends, data])


def _estimate_video_bytes(cache: TokenCache, shards: LiveShards, options: ReadOptions) -> int:
    """Return the mean bytes of a video's row in memory, without evidence, over up to four evenly spread shards.

    It is 0 if these have no videos with tokens.

    Raises:
        RatioNotCached: a video there is not stored at this ratio.
    """
    numbers = range(0, len(shards), max(1, len(shards) // _MAX_SAMPLED_SHARDS))
    sample = [row for number in numbers[:_MAX_SAMPLED_SHARDS] for row in cache.rows_of(shards, number)]
    sizes = [
        count_tokens(row, options.retention_ratio) * (2 * row["hidden_size"] * (1 + cache.deepstack_levels) + 12)
        for row in sample
        if row["status"] == "ok"
    ]
    return int(np.mean(sizes)) if sizes else 0
