"""The bfloat16 rows of a random sample of videos, kept beside a cache of coded tokens until a gate has passed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pipeline.cache.writer import PrunedVideo, commit, write_token_shard
from pipeline.keys import column_keys, keys_of
from pipeline.storage.stores import Store, store_below

SAMPLE = "gate-sample"  # the folder below the cache, a cache itself


def sample_store(cache: Store) -> Store:
    """Return the store, below the cache's own, of the sample that a gate compares coded tokens with."""
    return store_below(cache, SAMPLE)


def sample_limit(ids: pa.ChunkedArray, count: int) -> int:
    """Return the largest hash of an id in the sample, which has the ``count`` ids of smallest hash; -1 for none."""
    if not count or not len(ids):
        return -1
    hashes = column_keys(ids)[:, 0]
    return int(np.sort(hashes)[min(count, len(hashes)) - 1])


def sample_share(count: int, n_videos: int) -> int:
    """Return the largest hash in a sample of about ``count`` of ``n_videos`` whose ids are not known; -1 for none."""
    return min(count, n_videos) * 2**64 // max(1, n_videos) - 1


def keep_sample(videos: Sequence[PrunedVideo], limit: int, cache: Store, run_id: str) -> None:
    """Write the bfloat16 rows of those of the videos that are in the sample, and commit them. Raises OSError."""
    hashes = keys_of(pa.array([video.record["video_id"] for video in videos], pa.string()))[:, 0]
    kept = [v for v, key in zip(videos, hashes.tolist(), strict=True) if v.kept is not None and key <= limit]
    if kept:
        store = sample_store(cache)
        commit(store, run_id, 0, write_token_shard(kept, store=store, run_id=run_id))


def drop_sample(cache: Store) -> None:
    """Delete the sample of a cache. Raises OSError."""
    store = sample_store(cache)
    for folder in ("videos", "tokens", "runs", ""):
        for file in store.listed(folder):
            store.delete(file.name)
