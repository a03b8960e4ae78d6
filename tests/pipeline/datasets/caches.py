"""A cache of several token shards with unlike numbers of videos."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline import CachedVideo
from pipeline.storage.stores import LocalStore
from tests.builders.caches import encoded, random_tokens, write_header, write_shard

SIZES = (5, 3, 4, 1, 6)  # videos of each shard
N_VIDEOS = sum(SIZES)
IDS = [f"v{i:02d}" for i in range(N_VIDEOS)]


def make_shards(folder: Path) -> LocalStore:
    store, ids = write_header(folder), iter(IDS)
    for number, size in enumerate(SIZES):
        names = [next(ids) for _ in range(size)]
        shard = [encoded(name, random_tokens(int(name[1:]), (4, 25, 16)), 0.25, "gstep") for name in names]
        write_shard(store, f"run{number}", *shard)
    assert isinstance(store, LocalStore)
    return store


def ids_of(videos: Iterable[CachedVideo]) -> list[str]:
    return [video.video_id for video in videos]
