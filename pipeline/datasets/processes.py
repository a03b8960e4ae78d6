"""The processes that read a dataset together: ranks, a DataLoader's workers, and loaders that divide batches."""

from __future__ import annotations

import multiprocessing
from traceback import walk_stack
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import get_worker_info

from pipeline.datasets.packing import select_videos

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
