"""PyTorch datasets over a cache: one indexed by video, and one that streams shards in a resumable order."""

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
from pipeline.cache.reader import TokenCache, TokenOrder, check_not_string
from pipeline.cache.schema import hash_bytes
from pipeline.datasets.shares import (
    STATEFUL_LOADER,
    DatasetState,
    EpochPass,
    ParentRanks,
    Ranks,
    ShardShare,
    divide_evenly,
    find_caller,
    find_prefetching_loader,
    get_loader_worker,
    get_ranks,
    set_video_slicing,
)
from pipeline.errors import RemovedVideo
from pipeline.rows import VideoRow

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_READ_AHEAD = 8  # videos that are read together; without shuffling they are neighbors in a shard
# Indices of the numbers that a dataset shares with its workers: the epoch, whether workers read it, and the last epochs
# whose end, or middle, a worker loaded.
_EPOCH, _BY_WORKERS, _ENDED, _LEFT = range(4)


class TokenDataset(Dataset[CachedVideo]):
    """A map-style dataset of the videos of a cache, for PyTorch's DataLoader and its samplers.

    It keeps all ids in memory. For many millions of videos, use IterableTokenDataset.

    An item is a CachedVideo; ``DataLoader(..., collate_fn=pipeline.pack)`` makes batches. The videos of a batch are
    read together. The dataset pickles, and workers may be forked or spawned.

    Reading an item raises what ``TokenCache.get`` raises, for example RemovedVideo for a video removed meanwhile.
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
        """Open the cache, and select the videos.

        The other arguments are those of TokenCache.get. They, and the ids, are checked when an item is read.

        Args:
            ids: the videos in index order; None selects all videos that have tokens.

        Raises:
            ValueError: ``ids`` or ``evidence`` is a string.
            NotACache, CorruptShard, OSError: the cache cannot be opened.
        """
        check_not_string(() if ids is None else ids, "ids")
        check_not_string(evidence, "evidence")
        self.cache = cache if isinstance(cache, TokenCache) else TokenCache(cache)
        self.ids = self.cache.video_ids if ids is None else list(ids)
        self._options: tuple[float | None, TokenOrder, tuple[str, ...]] = retention_ratio, order, tuple(evidence)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> CachedVideo:
        return self.cache.get(self.ids[index], *self._options)

    def __getitems__(self, indices: Sequence[int]) -> list[CachedVideo]:
        """Read a batch of videos in one call, in the order of ``indices``; DataLoader calls this for a batch."""
        return self.cache.get_many([self.ids[index] for index in indices], *self._options)


class IterableTokenDataset(IterableDataset[CachedVideo]):
    """An iterable dataset that streams a cache shard by shard; shards are divided among ranks, then among workers.

    Items are CachedVideo objects. With ``shuffle``, ``seed`` and the epoch determine the order of the shards, and the
    videos of ``mix`` consecutive shards are shuffled together. The order repeats for equal numbers of ranks and
    workers.

    Ranks may get different numbers of videos; ``even`` truncates every rank to the shortest, also with workers.

    Ranks divide the shards that the cache had when each of them made its dataset. If a run or a compaction writes in
    between, some videos are read twice or not at all, and ``even`` does not hold. ``state_dict()["ids"]`` is equal on
    all ranks whose datasets have the same shards.

    The ranks are those of torch.distributed at the time of reading. A loader prepared by Accelerate or the HF Trainer
    divides batches among processes itself, so the dataset then does not divide its shards.

    ``state_dict`` and ``load_state_dict`` resume at the next video. With workers, use those of torchdata's
    StatefulDataLoader. In mid-epoch, a state is valid for the same ids, shards, options of the order, rank and worker.

    The cache may be merged and compacted meanwhile. A video that is removed meanwhile is skipped, logged, and counted
    in the state; with ``even``, the last video is repeated once for each removed video, so that ranks stay in step.

    Iterating raises what ``TokenCache.get`` raises.
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
        """Open the cache, and find the token shards of the videos.

        ``retention_ratio``, ``order`` and ``evidence`` are the arguments of TokenCache.get.

        Args:
            ids: the videos, each read once per epoch; None selects all videos that have tokens.
            mix: values below 1 count as 1.
            rank, world_size: the share of this process; None uses torch.distributed when the dataset is read, or reads
                all videos without it.

        Raises:
            ValueError: only one of ``rank`` and ``world_size`` is given, ``rank`` is out of range, ``ids`` or
                ``evidence`` is a string, or ``even`` is set and there are fewer token shards than ranks (raised on
                reading if ``rank`` is None).
            UnknownVideo: the cache has no row for one of ``ids``.
            NotACache, CorruptShard, OSError: the cache cannot be opened.
        """
        super().__init__()
        check_not_string(() if ids is None else ids, "ids")
        check_not_string(evidence, "evidence")
        self.cache = cache if isinstance(cache, TokenCache) else TokenCache(cache)
        self._shards = self.cache.shards(ids)
        self._options: tuple[float | None, TokenOrder, tuple[str, ...]] = retention_ratio, order, tuple(evidence)
        self._shuffle = shuffle
        self._mix = max(1, mix)
        self._seed = seed
        self._even = even
        if (rank is None) != (world_size is None):
            raise ValueError("give both rank and world_size, or neither")
        self._given_ranks = None if rank is None or world_size is None else (rank, world_size)
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be at least 0 and below world_size {world_size}")
        self._parent: ParentRanks | None = None
        # Shared: persistent workers see set_epoch; this process sees whether workers read, and where they resumed.
        self._shared = torch.tensor([0, 0, -1, -1]).share_memory_()  # type: ignore[no-untyped-call]
        id_text = "".join(f"{video_id}\0" for video_id in (() if ids is None else ids))
        shards = (f"{name}\0".encode() for name in self._shards.names.to_pylist())
        self._ids = hash_bytes(id_text.encode(), self._shards.counts, *shards)
        self._pass: EpochPass | None = None
        self._start: DatasetState | None = None
        self._start_of_worker = False
        if self._given_ranks is not None:
            len(self)  # raises ValueError if there are fewer shards than ranks

    @property
    def rank(self) -> int:
        """The current rank of this process; 0 if the loader divides batches itself."""
        return self._get_current_ranks().rank

    @property
    def world_size(self) -> int:
        """The current number of ranks that divide the shards."""
        return self._get_current_ranks().world_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order from the next iteration on, and drop a loaded state.

        Setting the current epoch keeps a loaded state. A loader of Accelerate that calls this and dispatches batches is
        modified to divide packed batches by videos.

        Raises:
            ValueError: a loader of Accelerate starts an epoch other than the one in which a loaded state continues.
        """
        loader = find_prefetching_loader("__iter__")
        set_video_slicing(loader)  # it calls set_epoch on every process at the start of an epoch
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
        """Return the number of videos of this rank in the current epoch, for all workers together.

        Raises:
            ValueError: ranks were given but the loader divides batches too, or ``even`` has fewer shards than ranks.
        """
        return sum(
            shard.n_videos for shard in self._divide_shards(self._get_current_ranks(), int(self._shared[_EPOCH]))
        )

    def __iter__(self) -> Iterator[CachedVideo]:
        """Start a pass over this process's videos of the epoch, at the loaded position if there is one.

        The pass consumes a loaded state. If that is the end of an epoch, the pass covers the next epoch; in a worker
        that loaded it, this pass is empty, and the following one covers the next epoch.

        Raises:
            ValueError: the loaded state belongs to other ids or settings (in mid-epoch: or other ranks or workers),
                ranks were given but the loader divides batches too, or ``even`` has fewer shards than ranks.
        """
        state, self._start = self._start, None
        worker = get_loader_worker()
        ranks = self._get_current_ranks()
        epoch = int(self._shared[_EPOCH])
        n_done = 0
        n_removed = 0
        if state is not None and state["finished"] and not self._start_of_worker:
            self._check(state, ranks, goes_on=False)
            epoch = state["epoch"] + 1
        elif state is not None:
            self._check(state, ranks, goes_on=state["done"] > 0)
            epoch = state["epoch"]
            n_done = state["done"]
            n_removed = state["removed"]
            self._shared[_ENDED if state["finished"] else _LEFT] = epoch
        elif epoch == int(self._shared[_ENDED]) != int(self._shared[_LEFT]):
            epoch += 1  # every worker loaded the end of the epoch, so StatefulDataLoader now iterates once more
        self._shared[_EPOCH] = epoch
        self._shared[_BY_WORKERS] = worker is not None
        number, n_workers = worker or (0, 1)
        shares = self._divide_shards(ranks, epoch)
        shares = divide_evenly(shares, number, n_workers) if self._even else shares[number::n_workers]
        n_videos = sum(share.n_videos for share in shares)
        loader = find_prefetching_loader() if worker is None else None
        self._pass = EpochPass(ranks, epoch, shares, n_videos, n_done, n_removed, loader)
        return self._read(self._pass)

    def state_dict(self) -> DatasetState:
        """Return the position of this process in the epoch, for ``load_state_dict``.

        A loaded state that no iteration has consumed is returned as it is. Before the first iteration, the result is
        the start of the epoch.

        The position is the number of videos read if a StatefulDataLoader is on the call stack. For other callers, the
        batch that a loader of Accelerate reads ahead is not counted.

        Raises:
            ValueError: the position is unknown: workers read the dataset, a loader that divides batches is in
                mid-epoch, or videos were removed while a loader of Accelerate read ahead.
        """
        if get_loader_worker() is None and int(self._shared[_BY_WORKERS]):
            raise ValueError(
                f"worker processes read this dataset, so its position is not known here: take {STATEFUL_LOADER}"
            )
        if self._start is not None:
            return self._start
        now = self._pass
        if now is None:
            return self._state(self._get_current_ranks(), int(self._shared[_EPOCH]), 0, False, 0)
        # StatefulDataLoader calls this before a loader of Accelerate reads ahead; other callers call it after that.
        asks_early = find_caller("StatefulDataLoader") is not None
        n_done = now.done if asks_early else now.count_yielded()
        if now.ranks.divided and n_done < now.n_videos:
            raise ValueError(
                "a loader that divides batches among processes reads ahead, so how many videos it gave is not known: "
                "make the dataset with rank=accelerator.process_index and world_size=accelerator.num_processes, do not "
                f"prepare its loader, and take {STATEFUL_LOADER}"
            )
        return self._state(now.ranks, now.epoch, n_done, n_done >= now.n_videos, now.n_removed)

    def load_state_dict(self, state: DatasetState) -> None:
        """Set the epoch, and the position at which the next iteration starts; the next iteration checks the state.

        The state of a finished epoch starts the next epoch.
        """
        self._start = state.copy()
        self._start_of_worker = get_loader_worker() is not None
        self._pass = None
        self._shared[_EPOCH], self._shared[_BY_WORKERS] = state["epoch"], self._start_of_worker

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parent": ParentRanks(os.getpid(), get_ranks(self._parent)), "_pass": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()  # for the workers of this process

    def _read(self, now: EpochPass) -> Iterator[CachedVideo]:
        """Yield the remaining videos of a pass in order, and count each in ``now`` before it is yielded.

        Removed videos are counted and skipped, with one warning at the end. With ``even``, the last video that was
        yielded, if any, is then repeated once for each of them.
        """
        worker, _ = get_loader_worker() or (0, 1)
        to_skip = now.done
        last = None
        for start in range(0, len(now.shares), self._mix):
            mixed = now.shares[start : start + self._mix]
            n_videos = sum(share.n_videos for share in mixed)
            if to_skip >= n_videos:  # whole shards are skipped without reading them
                to_skip -= n_videos
                continue
            rows = [row for share in mixed for row in self._rows(share)]
            remaining_rows = self._shuffle_items(rows, now.epoch, now.ranks.rank, 1, worker, start)[to_skip:]
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
        """Return the current rows of the videos of a share.

        Raises:
            FailedVideo, RemovedVideo: the videos had no tokens when the dataset was made, and have none now.
            CorruptShard: the videos no longer have rows.
        """
        rows = self.cache.rows_of(self._shards, share.number)[share.first : share.first + share.n_videos]
        if not self._shards.name(share.number):
            self.cache.get_rows(rows, *self._options)
        return rows

    def _videos(self, rows: Sequence[VideoRow]) -> list[CachedVideo | None]:
        """Read videos together, or one by one if one was removed meanwhile; None stands for a removed video."""
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

    def _divide_shards(self, ranks: Ranks, epoch: int) -> list[ShardShare]:
        """Return a rank's shards in an epoch, in reading order, each with the number of its videos to read.

        With ``even``, all ranks read the same number of videos: a rank may stop in the middle of a shard and drop later
        shards.

        Raises:
            ValueError: ``even`` is set, and there are fewer shards than ranks, but not none.
        """
        counts = self._shards.counts
        world_size = ranks.world_size
        if self._even and 0 < len(counts) < world_size:
            raise ValueError(
                f"even: {len(counts)} token shards cannot be divided among {world_size} ranks, and none would get a "
                "video: take TokenDataset with torch's DistributedSampler"
            )
        numbers = self._shuffle_items(range(len(counts)), epoch, 0, 0)
        numbers_by_rank = [numbers[rank::world_size] for rank in range(world_size)]
        shares = [ShardShare(number, int(counts[number])) for number in numbers_by_rank[ranks.rank]]
        if not self._even:
            return shares
        n_left = min(int(counts[list(rank_numbers)].sum()) for rank_numbers in numbers_by_rank)
        even_shares = []
        for share in shares:
            even_shares.append(ShardShare(share.number, min(share.n_videos, n_left)))
            n_left -= even_shares[-1].n_videos
        return [share for share in even_shares if share.n_videos]

    def _shuffle_items(self, items: Sequence[T], epoch: int, *salt: int) -> Sequence[T]:
        """Return items in a random order that depends on seed, epoch and ``salt``; unchanged without ``shuffle``."""
        if not self._shuffle:
            return items
        order = np.random.default_rng([self._seed, epoch, *salt])
        return [items[i] for i in order.permutation(len(items))]

    def _get_current_ranks(self) -> Ranks:
        """Return the given rank and world size of this process, or the current ones of torch.distributed.

        Raises:
            ValueError: a world size above 1 was given, but the loader divides batches too.
        """
        ranks = get_ranks(self._parent)
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
        """Return a position as a state, with the settings for which it is valid."""
        return {
            "ids": self._ids,
            "order": [self._seed, self._shuffle, self._mix, self._even],
            "rank": [ranks.rank, ranks.world_size],
            "worker": [*(get_loader_worker() or (0, 1))],
            "epoch": epoch,
            "done": n_done,
            "finished": finished,
            "removed": n_removed,
        }

    def _check(self, state: DatasetState, ranks: Ranks, goes_on: bool) -> None:
        """Raise ValueError if a state belongs to other ids or settings.

        If it continues in mid-epoch (``goes_on``), rank and worker must match too, and in a worker, a worker must have
        loaded it.
        """
        if goes_on and get_loader_worker() is not None and not self._start_of_worker:
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
                f"the state belongs to other data: {'; '.join(changes)}. Make the dataset from the same cache and "
                "options, or begin an epoch by set_epoch()"
            )
