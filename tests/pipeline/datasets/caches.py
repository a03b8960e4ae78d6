"""A cache of several token shards with unlike numbers of videos."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline import CachedVideo, IterableTokenDataset
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


def dataset(folder: Path, state: dict[str, Any] | None = None, **more: Any) -> IterableTokenDataset:
    """Return a shuffled dataset, which goes on from a state."""
    data = IterableTokenDataset(folder, **{"shuffle": True, "seed": 5, **more})
    if state is not None:
        data.load_state_dict(state)
    return data


def ids_of(videos: Iterable[CachedVideo]) -> list[str]:
    return [video.video_id for video in videos]
