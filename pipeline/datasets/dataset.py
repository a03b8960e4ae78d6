"""A cache as datasets of torch: by index, or shard by shard in an order that can be resumed."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.reader import TokenCache, TokenOrder, check_list
from pipeline.cache.schema import digest
from pipeline.datasets.shares import (
    STATEFUL_LOADER,
    DatasetState,
    EpochPass,
    ParentRanks,
    Ranks,
    ShardShare,
    divide_by_videos,
    divide_evenly,
    find_caller,
    loader_ahead,
    ranks_of_process,
    worker_of_loader,
)
from pipeline.errors import RemovedVideo
from pipeline.rows import VideoRow

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_READ_AHEAD = 8  # videos that are read together: neighbours of a shard, where nothing is shuffled
# Numbers that a dataset shares with its workers: the epoch, whether workers read it, and the epochs of which a worker
# loaded the end, and the middle.
_EPOCH, _BY_WORKERS, _ENDED, _LEFT = range(4)


class TokenDataset(Dataset[CachedVideo]):
    """The videos of a cache by their indices, for torch's DataLoader and its samplers.

    All their ids are in memory: of many millions take IterableTokenDataset, which reads none.

    An item is a CachedVideo. ``DataLoader(..., collate_fn=pipeline.pack)`` makes batches of them; a batch's videos are
    read together, shard by shard. It pickles, and workers may be forked or spawned.

    Raises as ``TokenCache.get``, also for a video that was removed meanwhile.
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
        check_list(() if ids is None else ids, "ids")
        check_list(evidence, "evidence")
        self.cache = cache if isinstance(cache, TokenCache) else TokenCache(cache)
        self.ids = self.cache.video_ids if ids is None else list(ids)
        self._options: tuple[float | None, TokenOrder, tuple[str, ...]] = retention_ratio, order, tuple(evidence)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> CachedVideo:
        return self.cache.get(self.ids[index], *self._options)

    def __getitems__(self, indices: Sequence[int]) -> list[CachedVideo]:
        """Read a batch of videos at once, as DataLoader asks for it."""
        return self.cache.get_many([self.ids[index] for index in indices], *self._options)


class IterableTokenDataset(IterableDataset[CachedVideo]):
    """The videos of a cache shard by shard, as a torch dataset; shards are divided among ranks, then among workers.

    With ``shuffle`` the shards come in an order of ``seed`` and the epoch, and the videos of ``mix`` shards at a time
    among each other. That order is the same on every rank, and for a number of ranks and workers the same each time.

    Ranks get unlike numbers of videos, as shards hold unlike numbers; ``even`` gives each as many as the one that has
    least, and leaves out the rest for this epoch. Batches are as many on each rank then, with workers too. Distributed
    training that synchronises each step wants that.

    Ranks divide the shards that the cache had when each of them made its dataset. If a run or a compaction wrote in
    between, some videos are read twice or not at all, and ``even`` is not. ``state_dict()["ids"]`` is equal on all
    ranks whose datasets are of the same shards.

    Ranks are those of torch.distributed when the dataset is read. A loader that Accelerate or the HF Trainer prepared
    divides the batches among the processes by itself, so the dataset does not divide its shards then. By default the
    loader reads all videos on process 0 and sends batches to the other processes; with ``dispatch_batches=False`` every
    process reads all videos and keeps its own batches.

    ``state_dict`` and ``load_state_dict`` resume at the next video. With workers, take those of torchdata's
    StatefulDataLoader, which asks each worker's dataset. A state holds for the same ids, seed, and numbers of ranks and
    workers. The state of a finished epoch begins the next one; ``set_epoch`` with another epoch discards a state.

    A cache may be merged and compacted meanwhile. A video that is removed meanwhile is left out, and a log line and
    the state count it; with ``even`` the last video comes again for it at the end, so that ranks keep step.

    Items, and what else is raised, are as of TokenDataset.
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
        """Take the videos ``ids``, each once, or all that have tokens, for ``rank`` of ``world_size``.

        Without ``rank`` the rank of torch.distributed counts, when the dataset is read; without torch.distributed this
        process has all videos. ``retention_ratio``, ``order`` and ``evidence`` are the arguments of TokenCache.get.

        Raises ValueError for one of ``rank`` and ``world_size`` without the other or outside of it, and if ``even`` is
        set and there are fewer token shards than ranks: here with ``rank``, else when the dataset is read.
        """
        super().__init__()
        check_list(() if ids is None else ids, "ids")
        check_list(evidence, "evidence")
        self.cache = cache if isinstance(cache, TokenCache) else TokenCache(cache)
        self._shards = self.cache.shards(ids)
        self._options: tuple[float | None, TokenOrder, tuple[str, ...]] = retention_ratio, order, tuple(evidence)
        self._shuffle, self._mix, self._seed, self._even = shuffle, max(1, mix), seed, even
        if (rank is None) != (world_size is None):
            raise ValueError("rank and world_size go together")
        self._given_ranks = None if rank is None or world_size is None else (rank, world_size)
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self._parent: ParentRanks | None = None
        # So persistent workers see set_epoch, and this process sees whether workers read and where they resumed.
        self._shared = torch.tensor([0, 0, -1, -1]).share_memory_()  # type: ignore[no-untyped-call]
        id_text = "".join(f"{video_id}\0" for video_id in (() if ids is None else ids))
        shards = (f"{name}\0".encode() for name in self._shards.names.to_pylist())
        self._ids = digest(id_text.encode(), self._shards.counts, *shards)
        self._pass: EpochPass | None = None
        self._start: DatasetState | None = None
        self._start_of_worker = False
        if self._given_ranks is not None:
            len(self)  # raises where even leaves no rank a video

    @property
    def rank(self) -> int:
        """The rank of this process now."""
        return self._ranks().rank

    @property
    def world_size(self) -> int:
        """The number of ranks now."""
        return self._ranks().world_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and with it another order from the next iteration on.

        Another epoch begins at its start, and a loaded state is dropped; the same epoch changes nothing.

        Raises ValueError where a loader of Accelerate begins with its own count of epochs after a state was loaded.
        """
        loader = loader_ahead("__iter__")
        divide_by_videos(loader)  # it begins an epoch on every process here
        if self._start is not None and not int(self._shared[_BY_WORKERS]) and loader is not None:
            next_epoch = self._start["epoch"] + int(self._start["finished"])
            if epoch != next_epoch:
                raise ValueError(
                    f"the loader of Accelerate begins epoch {epoch}, but the loaded state continues in epoch "
                    f"{next_epoch}: call set_epoch({next_epoch}) of the loader first"
                )
        if epoch == int(self._shared[_EPOCH]):
            return
        self._shared[:] = torch.tensor([epoch, 0, -1, -1])
        self._pass = self._start = None

    def __len__(self) -> int:
        """Count the videos of this rank in this epoch."""
        return sum(shard.n_videos for shard in self._shares(self._ranks(), int(self._shared[_EPOCH])))

    def __iter__(self) -> Iterator[CachedVideo]:
        """Begin a pass over this process's videos of the epoch, at the loaded position if there is one.

        The loaded end of an epoch begins the next epoch. Raises ValueError if the loaded state is of other data.
        """
        state, self._start = self._start, None
        worker, ranks = worker_of_loader(), self._ranks()
        epoch, n_done, n_removed = int(self._shared[_EPOCH]), 0, 0
        if state is not None and state["finished"] and not self._start_of_worker:
            self._check(state, ranks, goes_on=False)
            epoch = state["epoch"] + 1
        elif state is not None:
            self._check(state, ranks, goes_on=state["done"] > 0)
            epoch, n_done, n_removed = state["epoch"], state["done"], state["removed"]
            self._shared[_ENDED if state["finished"] else _LEFT] = epoch
        elif epoch == int(self._shared[_ENDED]) != int(self._shared[_LEFT]):
            epoch += 1  # each worker loaded the end of the epoch, so StatefulDataLoader now iterates once more
        self._shared[_EPOCH], self._shared[_BY_WORKERS] = epoch, worker is not None
        number, n_workers = worker or (0, 1)
        shares = self._shares(ranks, epoch)
        shares = divide_evenly(shares, number, n_workers) if self._even else shares[number::n_workers]
        n_videos = sum(share.n_videos for share in shares)
        loader = loader_ahead() if worker is None else None
        self._pass = EpochPass(ranks, epoch, shares, n_videos, n_done, n_removed, loader)
        return self._read(self._pass)

    def state_dict(self) -> DatasetState:
        """Return this process's position in the epoch.

        Raises ValueError where it is not known: where workers read, and in mid-epoch where a loader of Accelerate
        divides batches among processes.
        """
        if worker_of_loader() is None and int(self._shared[_BY_WORKERS]):
            raise ValueError(
                f"worker processes read this dataset, so its position is not known here: take {STATEFUL_LOADER}"
            )
        if self._start is not None:
            return self._start
        now = self._pass
        if now is None:
            return self._state(self._ranks(), int(self._shared[_EPOCH]), 0, False, 0)
        # StatefulDataLoader asks before a loader of Accelerate reads ahead, other callers ask after that.
        asks_early = find_caller("StatefulDataLoader") is not None
        n_done = now.done if asks_early else now.given_by_loader()
        if now.ranks.divided and n_done < now.n_videos:
            raise ValueError(
                "a loader that divides batches among processes reads ahead, so how many videos it gave is not known: "
                "make the dataset with rank=accelerator.process_index and world_size=accelerator.num_processes, do not "
                f"prepare its loader, and take {STATEFUL_LOADER}"
            )
        return self._state(now.ranks, now.epoch, n_done, n_done >= now.n_videos, now.n_removed)

    def load_state_dict(self, state: DatasetState) -> None:
        """Set the position that the next iteration starts from.

        That iteration raises ValueError if the state is of other data: other ids, another seed, or other numbers of
        ranks and workers in mid-epoch. The state of a finished epoch begins the next epoch.
        """
        self._start, self._start_of_worker, self._pass = state.copy(), worker_of_loader() is not None, None
        self._shared[_EPOCH], self._shared[_BY_WORKERS] = state["epoch"], self._start_of_worker

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parent": ParentRanks(os.getpid(), ranks_of_process(self._parent)), "_pass": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()  # with workers of this process

    def _read(self, now: EpochPass) -> Iterator[CachedVideo]:
        """Yield the videos of a pass in order, without videos that are done, and count them in ``now``.

        Removed videos are left out, with a warning at the end. With ``even`` the last video is yielded again for each.
        """
        worker, _ = worker_of_loader() or (0, 1)
        to_skip, last = now.done, None
        for start in range(0, len(now.shares), self._mix):
            mixed = now.shares[start : start + self._mix]
            n_videos = sum(share.n_videos for share in mixed)
            if to_skip >= n_videos:  # whole shards are skipped without reading them
                to_skip -= n_videos
                continue
            rows = [row for share in mixed for row in self._rows(share)]
            remaining_rows = self._shuffled(rows, now.epoch, now.ranks.rank, 1, worker, start)[to_skip:]
            to_skip = 0
            for first in range(0, len(remaining_rows), _READ_AHEAD):
                videos = deque(self._videos(remaining_rows[first : first + _READ_AHEAD]))
                while videos:
                    video = videos.popleft()
                    now.done += 1
                    while videos and videos[0] is None:  # counted before the yield: the last video ends the epoch
                        now.done, now.n_removed = now.done + 1, now.n_removed + 1
                        videos.popleft()
                    if video is None:
                        now.n_removed += 1
                    else:
                        last = video
                        yield video
        if now.n_removed:
            _LOG.warning(
                "%s: %d videos were removed since this dataset was made. This epoch left them out. A new dataset does "
                "not count them.",
                self.cache.store,
                now.n_removed,
            )
            if self._even and last is not None:
                yield from [last] * now.n_removed

    def _rows(self, share: ShardShare) -> list[VideoRow]:
        """Return the rows of the videos of a shard that are read; raise where they never had tokens."""
        rows = self.cache.rows_of(self._shards, share.number)[share.first : share.first + share.n_videos]
        if not self._shards.name(share.number):
            self.cache.get_rows(rows, *self._options)
        return rows

    def _videos(self, rows: Sequence[VideoRow]) -> list[CachedVideo | None]:
        """Read videos together; None stands for one that was removed since the dataset was made."""
        try:
            return [*self.cache.get_rows(rows, *self._options)]
        except RemovedVideo:
            pass
        videos: list[CachedVideo | None] = []
        for row in rows:
            try:
                videos += self.cache.get_rows([row], *self._options)
            except RemovedVideo:
                videos.append(None)
        return videos

    def _shares(self, ranks: Ranks, epoch: int) -> list[ShardShare]:
        """Return the shards of a rank in an epoch in order, each with the number of its videos to read.

        With ``even`` all ranks read equally many videos: a rank stops in the middle of a shard, or leaves out shards.
        Raises ValueError if ``even`` is set and there are fewer shards than ranks.
        """
        counts, world_size = self._shards.counts, ranks.world_size
        if self._even and 0 < len(counts) < world_size:
            raise ValueError(
                f"even: {len(counts)} token shards cannot be divided among {world_size} ranks, and none would get a "
                "video: take TokenDataset with torch's DistributedSampler"
            )
        numbers = self._shuffled(range(len(counts)), epoch, 0, 0)
        numbers_of = [numbers[rank::world_size] for rank in range(world_size)]
        shares = [ShardShare(number, int(counts[number])) for number in numbers_of[ranks.rank]]
        if not self._even:
            return shares
        n_left = min(int(counts[list(of_rank)].sum()) for of_rank in numbers_of)
        even_shares = []
        for share in shares:
            even_shares.append(ShardShare(share.number, min(share.n_videos, n_left)))
            n_left -= even_shares[-1].n_videos
        return [share for share in even_shares if share.n_videos]

    def _shuffled(self, items: Sequence[T], epoch: int, *salt: int) -> Sequence[T]:
        """Return items in a random order that depends on seed, epoch and ``salt``; unchanged without ``shuffle``."""
        if not self._shuffle:
            return items
        order = np.random.default_rng([self._seed, epoch, *salt])
        return [items[i] for i in order.permutation(len(items))]

    def _ranks(self) -> Ranks:
        """Return the share of this process among the ranks, as given or as it is now.

        Raises ValueError if ranks were given and the loader divides batches, too.
        """
        ranks = ranks_of_process(self._parent)
        if self._given_ranks is None:
            return ranks
        rank, world_size = self._given_ranks
        if ranks.divided and world_size > 1:
            raise ValueError(
                f"rank {rank} of {world_size} was given, but the loader divides batches among processes too, and "
                "videos would be left out: leave out rank and world_size, or do not prepare the loader by Accelerate"
            )
        return Ranks(rank, world_size, ranks.divided)

    def _state(self, ranks: Ranks, epoch: int, n_done: int, finished: bool, n_removed: int) -> DatasetState:
        """Return a position with the settings that it depends on."""
        return {
            "ids": self._ids,
            "order": [self._seed, self._shuffle, self._mix, self._even],
            "rank": [ranks.rank, ranks.world_size],
            "worker": [*(worker_of_loader() or (0, 1))],
            "epoch": epoch,
            "done": n_done,
            "finished": finished,
            "removed": n_removed,
        }

    def _check(self, state: DatasetState, ranks: Ranks, goes_on: bool) -> None:
        """Raise ValueError if a state is of other ids or seed, or ``goes_on`` in an epoch of other ranks or workers.

        With ``goes_on`` a worker also refuses a state that it did not load itself.
        """
        if goes_on and worker_of_loader() is not None and not self._start_of_worker:
            raise ValueError(
                "the state is of a dataset that no worker process read: resume without workers, or save and load the "
                f"state by {STATEFUL_LOADER}"
            )
        here: dict[str, object] = {**self._state(ranks, 0, 0, False, 0)}
        names = ("ids", "order", "rank", "worker") if goes_on else ("ids", "order")
        if changes := [
            f"{name} {state.get(name)}, not {here[name]}" for name in names if state.get(name) != here[name]
        ]:
            raise ValueError(
                f"the state is of other data: {'; '.join(changes)}. Make the dataset from the same cache and "
                "options, or begin an epoch by set_epoch()"
            )
