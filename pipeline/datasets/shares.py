"""The share of an epoch that one process reads, and its position in it.

Ranks divide an epoch, then the workers of a DataLoader, and some loaders divide its batches.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any, NamedTuple, TypedDict

import torch.distributed as dist
from torch.utils.data import get_worker_info

from pipeline.datasets.packing import select_videos

STATEFUL_LOADER = "torchdata's StatefulDataLoader as the loader, and its state_dict() and load_state_dict()"
_DIVIDING_LOADERS = ("DataLoaderDispatcher", "IterableDatasetShard")  # of Accelerate; the second of transformers too
_LOADERS_AHEAD = ("DataLoaderDispatcher", "DataLoaderShard")  # of Accelerate: they read a batch before they give one


class Ranks(NamedTuple):
    """The share of a process among the ranks.

    Attributes:
        rank: of this process; 0 where the loader divides batches by itself, as each rank then reads all.
        world_size: how many ranks divide the shards.
        divided: whether the loader divides batches among processes by itself.
    """

    rank: int
    world_size: int
    divided: bool


class ParentRanks(NamedTuple):
    """The ranks of the process that pickled a dataset, for the workers that it spawns."""

    pid: int
    ranks: Ranks


def ranks_of_process(parent: ParentRanks | None) -> Ranks:
    """Return the share of this process: by torch.distributed, or all where the loader that asks divides by itself.

    A worker that was spawned, in which torch.distributed does not run, has the share of its ``parent``.
    """
    ranks = Ranks(0, 1, False)
    if dist.is_available() and dist.is_initialized():
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), False)
    elif parent is not None:
        spawned_by = multiprocessing.parent_process()
        ranks = parent.ranks if spawned_by is not None and spawned_by.pid == parent.pid else ranks
    divides = ranks.world_size > 1 and find_caller(*_DIVIDING_LOADERS) is not None
    return Ranks(0, 1, True) if divides else ranks


def worker_of_loader() -> tuple[int, int] | None:
    """Return this DataLoader worker's number and the number of workers, or None in a process that is no worker."""
    info = get_worker_info()
    return None if info is None else (info.id, info.num_workers)


def loader_ahead(method: str | None = None) -> Any:
    """Return the loader of Accelerate that calls, by ``method``: it reads a batch before it gives one. None if none."""
    return find_caller(*_LOADERS_AHEAD, method=method)


def divide_by_videos(loader: Any) -> None:
    """Let a loader of Accelerate that sends each batch to all processes divide packed batches by their videos.

    Its own function cuts every tensor at the same row. A function that its user chose stays, and so do loaders of other
    kinds, and None.
    """
    divide = getattr(loader, "slice_fn", None)
    if getattr(divide, "__module__", "").partition(".")[0] == "accelerate":
        loader.slice_fn = select_videos


def find_caller(*class_names: str, method: str | None = None) -> Any:
    """Return the nearest object on the call stack whose class has one of these names, or None.

    ``method`` is the name of its method on the stack; None takes any. Loaders tell a dataset nothing about themselves.
    A forked worker has the calls of its parent on its stack.
    """
    for frame, _ in walk_stack(None):
        if frame.f_code.co_varnames[:1] == ("self",) and method in (None, frame.f_code.co_name):
            owner = frame.f_locals.get("self")
            # Not isinstance: Accelerate's loaders claim another __class__.
            if any(base.__name__ in class_names for base in type(owner).__mro__):
                return owner
    return None


class DatasetState(TypedDict):
    """A process's position in an epoch, and the settings that it depends on.

    Attributes:
        ids: hash of the videos' ids and of the cache's token shards.
        order: seed, shuffle, mix and even.
        rank: the rank, and how many there are.
        worker: the DataLoader's worker, and how many there are.
        done: how many of the epoch's videos were read or left out.
        finished: whether these are all of the epoch.
        removed: how many were left out, as they were removed since the dataset was made.
    """

    ids: str
    order: list[int]
    rank: list[int]
    worker: list[int]
    epoch: int
    done: int
    finished: bool
    removed: int


class ShardShare(NamedTuple):
    """The videos of a shard that a rank or a worker reads: the shard's number, how many, and the first one's index."""

    number: int
    n_videos: int
    first: int = 0


def divide_evenly(shares: Sequence[ShardShare], part: int, n_parts: int) -> list[ShardShare]:
    """Return one of ``n_parts`` parts of the shares' videos in their order; equal totals give parts of equal sizes."""
    total = sum(share.n_videos for share in shares)
    begin, end = total * part // n_parts, total * (part + 1) // n_parts
    of_part, start = list[ShardShare](), 0
    for number, n_videos, first in shares:
        low, high = max(begin, start), min(end, start + n_videos)
        if low < high:
            of_part.append(ShardShare(number, high - low, first + low - start))
        start += n_videos
    return of_part


@dataclass
class EpochPass:
    """One iteration of a process over its share of an epoch.

    Attributes:
        n_videos: of the shares.
        done: how many were read or left out.
        n_removed: how many were left out.
        loader: of Accelerate, which reads a batch ahead; None for others.
    """

    ranks: Ranks
    epoch: int
    shares: list[ShardShare]
    n_videos: int
    done: int
    n_removed: int
    loader: Any = None

    def __post_init__(self) -> None:
        self._start = self.done

    def given_by_loader(self) -> int:
        """Return the number of videos that the loader gave; a loader of Accelerate has read one batch more.

        Raises ValueError where the size of this batch is not known.
        """
        n_read = self.done - self._start
        if self.loader is not None and self.loader.end_of_dataloader:
            return self.n_videos
        if self.loader is None or n_read == 0:
            return self.done
        if self.n_removed:
            raise ValueError(
                "a loader of Accelerate reads a batch ahead, and videos were removed meanwhile, so how many it gave is "
                f"not known: do not prepare the loader, and take {STATEFUL_LOADER}"
            )
        size = self.loader.batch_size or 1
        return self._start + (n_read - 1) // size * size
