"""A cache as datasets of torch: by place, or shard by shard in an order that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.reader import TokenCache, TokenOrder, check_list
from pipeline.cache.schema import digest

T = TypeVar("T")
_READ_AHEAD = 8  # videos that are read together: neighbours of a shard, where nothing is shuffled


class TokenDataset(Dataset[CachedVideo]):
    """The videos of a cache by their places, for torch's DataLoader and its samplers.

    All their ids are in memory: of many millions take IterableTokenDataset, which reads none.

    An item is a CachedVideo. ``DataLoader(..., collate_fn=pipeline.pack)`` makes batches of them; a batch's videos are
    read together, shard by shard. It pickles, and workers may be forked or spawned.

    Raises as ``TokenCache.get``.
    """

    def __init__(
        self,
        cache: TokenCache | str | Path,
        ids: Sequence[str] | None = None,
        *,
        retention_ratio: float | None = None,
        order: TokenOrder = "index",
        evidence: Sequence[str] = (),
    ) -> None:
        """Take the videos ``ids`` in their order, or all that have tokens; the rest is as in TokenCache.get."""
        check_list(ids or (), "ids")
        self.cache = cache if isinstance(cache, TokenCache) else TokenCache(cache)
        self.ids = self.cache.video_ids if ids is None else list(ids)
        self._options: tuple[float | None, TokenOrder, tuple[str, ...]] = retention_ratio, order, tuple(evidence)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> CachedVideo:
        return self.cache.get(self.ids[place], *self._options)

    def __getitems__(self, places: Sequence[int]) -> list[CachedVideo]:
        """Read a batch of videos at once, as DataLoader asks for it."""
        return self.cache.get_many([self.ids[place] for place in places], *self._options)


class IterableTokenDataset(IterableDataset[CachedVideo]):
    """The videos of a cache shard by shard, as a torch dataset; shards are divided among ranks, then among workers.

    With ``shuffle`` the shards come in an order of ``seed`` and the epoch, and the videos of ``mix`` shards at a time
    among each other. That order is the same on every rank, and for a number of ranks and workers the same each time.

    Ranks get unlike numbers of videos, as shards hold unlike numbers; ``even`` gives each as many as the one that has
    least, and leaves out the rest for this epoch. Distributed training that synchronises each step wants that.

    ``state_dict`` and ``load_state_dict`` resume at the next video. They are what torchdata's StatefulDataLoader asks
    its workers' datasets for; with DataLoader, use them where ``num_workers`` is 0. A state holds for the same ids,
    seed, and numbers of ranks and workers.

    Items, and what is raised, are as of TokenDataset.
    """

    def __init__(
        self,
        cache: TokenCache | str | Path,
        ids: Sequence[str] | None = None,
        *,
        retention_ratio: float | None = None,
        order: TokenOrder = "index",
        evidence: Sequence[str] = (),
        shuffle: bool = False,
        mix: int = 4,
        seed: int = 0,
        even: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Take ``rank`` of ``world_size``, by default torch.distributed's, else all videos; each of ``ids`` once.

        Raises ValueError where ``even`` would leave no rank a video.
        """
        super().__init__()
        self.cache = cache if isinstance(cache, TokenCache) else TokenCache(cache)
        self._shards = self.cache.shards(ids)
        self._options: tuple[float | None, TokenOrder, tuple[str, ...]] = retention_ratio, order, tuple(evidence)
        self._shuffle, self._mix, self._seed, self._even = shuffle, max(1, mix), seed, even
        self.rank, self.world_size = _rank_of(rank, world_size)
        if even and 0 < len(self._shards) < self.world_size:
            raise ValueError(
                f"even: {len(self._shards)} token shards cannot be divided among {self.world_size} ranks, and none "
                "would get a video: take TokenDataset with torch's DistributedSampler"
            )
        # In memory that workers share, so that those that persist see set_epoch too.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        named = "".join(f"{video_id}\0" for video_id in ids or ())
        shards = (f"{name}\0".encode() for name in self._shards.names.to_pylist())
        self._ids = digest(named.encode(), self._shards.counts, *shards)
        self._done = 0
        self._start: DatasetState | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and with it another order from the next iteration on."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Count the videos of this rank in this epoch."""
        return sum(shard.n_videos for shard in self._of_rank())

    def __iter__(self) -> Iterator[CachedVideo]:
        state, self._start = self._start, None
        if state is not None:
            self._check(state)
            self.set_epoch(state["epoch"])
        self._done = 0 if state is None else int(state["done"])
        return self._read(self._done)

    def state_dict(self) -> DatasetState:
        """Return this process's position in the epoch."""
        return self._start or self._position()

    def load_state_dict(self, state: DatasetState) -> None:
        """Set the position that the next iteration starts from; it raises ValueError if the state is of other data.

        The state must be of the same ids, seed, and numbers of ranks and workers.
        """
        self._start = state.copy()

    def _read(self, done: int) -> Iterator[CachedVideo]:
        """Yield the videos of this process in order, without the first ``done``."""
        worker, n_workers = _worker()
        shards = self._of_rank()[worker::n_workers]
        for start in range(0, len(shards), self._mix):
            mixed = shards[start : start + self._mix]
            n_videos = sum(shard.n_videos for shard in mixed)
            if done >= n_videos:  # whole shards are skipped without reading them
                done -= n_videos
                continue
            rows = [row for shard in mixed for row in self.cache.rows_of(self._shards, shard.number)[: shard.n_videos]]
            left, done = self._shuffled(rows, 1, worker, start)[done:], 0
            for first in range(0, len(left), _READ_AHEAD):
                for video in self.cache.get_rows(left[first : first + _READ_AHEAD], *self._options):
                    self._done += 1
                    yield video

    def _of_rank(self) -> list[_Share]:
        """Return this rank's shards of the epoch in order, each with the number of its videos that are read."""
        counts = self._shards.counts
        numbers = self._shuffled(range(len(counts)), 0)
        ranks = [numbers[rank :: self.world_size] for rank in range(self.world_size)]
        mine = [_Share(number, int(counts[number])) for number in ranks[self.rank]]
        if not self._even:
            return mine
        left = min(int(counts[list(of_rank)].sum()) for of_rank in ranks)
        taken = []
        for share in mine:
            taken.append(_Share(share.number, min(share.n_videos, left)))
            left -= taken[-1].n_videos
        return [share for share in taken if share.n_videos]

    def _shuffled(self, items: Sequence[T], *salt: int) -> Sequence[T]:
        """Return items in a random order that depends on seed, epoch and ``salt``; unchanged without ``shuffle``."""
        if not self._shuffle:
            return items
        order = np.random.default_rng([self._seed, int(self._epoch), self.rank if salt[0] else 0, *salt])
        return [items[i] for i in order.permutation(len(items))]

    def _position(self) -> DatasetState:
        """Return where the present iteration is."""
        return {
            "ids": self._ids,
            "order": [self._seed, self._shuffle, self._mix, self._even],
            "rank": [self.rank, self.world_size],
            "worker": [*_worker()],
            "epoch": int(self._epoch),
            "done": self._done,
        }

    def _check(self, state: DatasetState) -> None:
        """Raise ValueError if a state was saved for other ids, seed, ranks or workers."""
        here = {name: value for name, value in self._position().items() if name not in ("epoch", "done")}
        if other := [(name, value) for name, value in here.items() if state.get(name) != value]:
            told = "; ".join(f"{name} {state.get(name)}, not {value}" for name, value in other)
            raise ValueError(f"the state is of other data: {told}")


class DatasetState(TypedDict):
    """A process's position in an epoch, and the settings that it depends on.

    Attributes:
        ids: hash of the videos' ids and of the cache's token shards.
        order: seed, shuffle, mix and even.
        rank: the rank, and how many there are.
        worker: the DataLoader's worker, and how many there are.
        done: how many of the epoch's videos were read.
    """

    ids: str
    order: list[int]
    rank: list[int]
    worker: list[int]
    epoch: int
    done: int


class _Share(NamedTuple):
    """A shard's number, and how many of its first videos a rank reads."""

    number: int
    n_videos: int


def _worker() -> tuple[int, int]:
    """Return this DataLoader worker's number and the number of workers, or (0, 1) in the main process."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank and world size: as given, else torch.distributed's, else (0, 1). Raises ValueError."""
    if (rank is None) != (world_size is None):
        raise ValueError("rank and world_size go together")
    if rank is None or world_size is None:
        here = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if here else (0, 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    return rank, world_size
