"""The position of a process in an epoch, as it is saved and while it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

from pipeline.datasets.processes import Ranks

STATEFUL_LOADER = "torchdata's StatefulDataLoader as the loader, and its state_dict() and load_state_dict()"


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
