"""The share of an epoch that one process reads, and its position in that share."""

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
_DIVIDING_LOADERS = (
    "DataLoaderDispatcher",
    "IterableDatasetShard",
)  # of Accelerate; the second is also in transformers
_LOADERS_AHEAD = ("DataLoaderDispatcher", "DataLoaderShard")  # of Accelerate; they read one batch ahead


class Ranks(NamedTuple):
    """The rank of a process, and the number of ranks that divide the shards.

    Attributes:
        rank: 0 if the loader divides batches itself, since each process then reads all shards.
        divided: True if the loader divides batches among processes itself.
    """

    rank: int
    world_size: int
    divided: bool


class ParentRanks(NamedTuple):
    """The process id and ranks of the process that pickled a dataset, for the workers that it spawns."""

    pid: int
    ranks: Ranks


def get_ranks(parent: ParentRanks | None) -> Ranks:
    """Return the rank of this process by torch.distributed, or else by ``parent`` if that process spawned this one.

    Without either it is rank 0 of 1. It is also rank 0 of 1, with ``divided`` set, if there are several ranks and a
    loader that divides batches itself is on the call stack.
    """
    ranks = Ranks(0, 1, False)
    if dist.is_available() and dist.is_initialized():
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), False)
    elif parent is not None:
        spawned_by = multiprocessing.parent_process()
        ranks = parent.ranks if spawned_by is not None and spawned_by.pid == parent.pid else ranks
    divides = ranks.world_size > 1 and find_caller(*_DIVIDING_LOADERS) is not None
    return Ranks(0, 1, True) if divides else ranks


def get_loader_worker() -> tuple[int, int] | None:
    """Return the id of this DataLoader worker and the number of workers; None outside a worker."""
    info = get_worker_info()
    return None if info is None else (info.id, info.num_workers)


def find_prefetching_loader(method: str | None = None) -> Any:
    """Return the loader of Accelerate on the call stack, which reads one batch ahead; None if there is none.

    ``method`` is the method of the loader that must be on the stack; None accepts any.
    """
    return find_caller(*_LOADERS_AHEAD, method=method)


def set_video_slicing(loader: Any) -> None:
    """Make a loader of Accelerate that dispatches batches divide packed batches by their videos.

    Other loaders, None, and loaders whose function to divide batches is the user's are left unchanged.
    """
    divide = getattr(loader, "slice_fn", None)
    if getattr(divide, "__module__", "").partition(".")[0] == "accelerate":
        loader.slice_fn = select_videos


def find_caller(*class_names: str, method: str | None = None) -> Any:
    """Return the nearest ``self`` on the call stack whose class, or a base class, has one of these names; None if none.

    ``method`` is the name of its method on the stack; None accepts any. A forked worker also has its parent's calls on
    its stack.
    """
    for frame, _ in walk_stack(None):
        if frame.f_code.co_varnames[:1] == ("self",) and method in (None, frame.f_code.co_name):
            owner = frame.f_locals.get("self")
            # Not isinstance: Accelerate's loaders claim another __class__.
            if any(base.__name__ in class_names for base in type(owner).__mro__):
                return owner
    return None


class DatasetState(TypedDict):
    """The position of a process in an epoch, and the settings for which it is valid.

    Attributes:
        ids: a hash of the requested ids and of the cache's token shards.
        order: seed, shuffle, mix and even.
        rank: the rank, and the number of ranks.
        worker: the id of the DataLoader worker, and the number of workers.
        done: the number of the epoch's videos that were read or skipped.
        removed: the number of videos skipped because they were removed.
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
    """The videos of a shard that a rank or worker reads: shard number, number of videos, and index of the first."""

    number: int
    n_videos: int
    first: int = 0


def divide_evenly(shares: Sequence[ShardShare], part: int, n_parts: int) -> list[ShardShare]:
    """Return slice ``part`` of ``n_parts`` consecutive slices of the shares' videos, in their order.

    Slices differ by one video at most; equal totals give equal sizes. A share at a border is split.
    """
    total = sum(share.n_videos for share in shares)
    begin, end = total * part // n_parts, total * (part + 1) // n_parts
    part_shares = list[ShardShare]()
    start = 0
    for number, n_videos, first in shares:
        low, high = max(begin, start), min(end, start + n_videos)
        if low < high:
            part_shares.append(ShardShare(number, high - low, first + low - start))
        start += n_videos
    return part_shares


@dataclass
class EpochPass:
    """One iteration of a process over its share of an epoch.

    Attributes:
        done: the number of videos read or skipped, including those before a resume.
        n_removed: the number of videos skipped because they were removed.
        loader: the loader of Accelerate that iterates; None for other loaders.
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

    def count_yielded(self) -> int:
        """Return the number of videos that the loader has yielded, without the batch that Accelerate reads ahead.

        Raises:
            ValueError: the size of that batch is unknown, because videos were removed.
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
