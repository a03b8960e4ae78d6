"""Bundling of what the last stage of a graph gives into shards, by number and by age, and their writers.

Ray Data would bundle by number alone and hold the last items until enough others have come, and a job that is stopped
would lose them. Only references wait here. Their bytes stay in the object stores, where Ray Data counts them against
the limit of the graph, which holds back the earlier stages.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import ray
from ray.actor import ActorHandle

# A shard that is due is written at most this much later.
TICK_S = 0.5
# While batches come, the driver looks for written shards this often: those that are written meanwhile are one commit.
LOOK_S = 0.1
# So many shards are committed together at most: their rows are in the driver's memory.
MOST_TOGETHER = 64


class GraphOutput(NamedTuple):
    """The output of a graph: tables or references to tables, and how many items they hold."""

    tables: Sequence[ray.ObjectRef] | Sequence[pa.Table]
    n_items: int


class Shard(NamedTuple):
    """A written shard, or several: the last one's number, and the rows to commit."""

    number: int
    rows: pa.Table


def _unchanged(rows: pa.Table) -> pa.Table:
    """Return the rows as they are."""
    return rows


@dataclass(frozen=True)
class RunGraph:
    """A Ray Data graph that is ready to run, with the way its output is written.

    Attributes:
        dataset: the graph of Ray Data, which runs once it is iterated.
        items_per_shard: how many items make a shard.
        writers: starts the actors whose ``write`` makes a shard of blocks and returns the rows to commit. None: the
            blocks hold those rows, which are as small as answers and wait here themselves.
        rows: makes the rows to commit of a block, where there are no writers.
        items_per_row: how many items share a row of the output for writers; the last rows may have fewer.
    """

    dataset: ray.data.Dataset
    items_per_shard: int
    writers: Callable[[], Sequence[ActorHandle]] | None = None
    rows: Callable[[pa.Table], pa.Table] = _unchanged
    items_per_row: int = 1

    def batches(self) -> Iterator[GraphOutput]:
        """Run the graph, and yield each batch of its last stage as soon as it is there."""
        # Not iter_batches: its threads wait in a way that nothing can interrupt, and it fetches ahead.
        bundles = self.dataset.iter_internal_ref_bundles()
        try:
            for bundle in bundles:
                if not bundle.num_rows():  # of a call that had no item; such a block may lack columns
                    continue
                if self.writers is not None:
                    yield GraphOutput(bundle.block_refs, bundle.num_rows() * self.items_per_row)
                else:
                    tables = [self.rows(block) for block in ray.get(bundle.block_refs)]
                    yield GraphOutput(tables, sum(map(len, tables)))
        finally:
            # Deleting the iterator ends the execution of a graph that is stopped half-way. Left to the garbage
            # collector it might end after this process has left the cluster, and would start another Ray.
            del bundles


class Shards:
    """The bundler of batches into shards of ``flow.items_per_shard`` items, or fewer after ``age_s`` seconds.

    Each writer has one shard in hand and one that is next. Once one more shard is complete, no more batches are taken.
    Ray makes a lost block again, as it does for the arguments of any call. Use it in a ``with`` block, which ends the
    writers.

    A job that makes less than a shard in ``age_s`` seconds writes a small one, which is two files: 2,880 files a day at
    a minute. Nothing joins token shards later.
    """

    def __init__(self, flow: RunGraph, age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._flow = flow
        self._age_s = age_s
        self._clock = clock
        self._writers: Sequence[ActorHandle] = ()
        self._waiting: list[ray.ObjectRef | pa.Table] = []
        self._n_waiting = 0
        self._since = 0.0  # when the first waiting batch came
        self._n_shards = 0
        self._looked = -math.inf  # when the driver last looked for written shards
        self._writing: dict[ray.ObjectRef, tuple[int, ActorHandle]] = {}  # the answer to come -> shard number, writer
        self._written: deque[Shard] = deque()  # shards of a graph without writers
        self._ended = False

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers:
            with suppress(Exception):  # a cluster that is gone has no writers either
                ray.kill(writer)
        self._writers = ()

    @property
    def unwritten(self) -> bool:
        """Return whether any batch was taken whose shard was not yet yielded and committed."""
        return bool(self._waiting or self._writing or self._written)

    def has_room(self) -> bool:
        """Return whether another batch may be taken."""
        return self._n_waiting < self._flow.items_per_shard

    def take(self, batch: GraphOutput) -> None:
        """Add a batch to the shard that is collected, and write the shards that are due."""
        if self._n_waiting + batch.n_items > self._flow.items_per_shard:
            self._write()  # the shard would be too large with this batch
        if self._flow.writers is not None and not self._writers:
            self._writers = self._flow.writers()  # not earlier, as the workers of earlier stages take longer to start
        if not self._waiting:
            self._since = self._clock()
        self._waiting += batch.tables
        self._n_waiting += batch.n_items
        self._write_due()

    def finish(self) -> bool:
        """End the input: the batches that wait become a shard. Return whether anything is left to write or commit."""
        self._ended = True
        self._write_due()
        return self.unwritten

    def written(self, wait_s: float = TICK_S) -> Iterator[Shard]:
        """Yield the shards that are written and to be committed; wait for one only while no batch can be taken.

        Those that writers have finished meanwhile come as one, by the last one's number: a commit takes about as long
        whatever it holds, so that a driver which falls behind catches up. A shard is yielded again if the next one was
        not asked for: an interrupted driver cannot know whether it is committed.
        """
        self._write_due()
        while self._written:
            yield self._written[0]
            self._written.popleft()
        if self._writing:
            free = self.has_room() and not self._ended
            if free and self._clock() - self._looked < LOOK_S:
                return  # a look costs Ray a look at every answer that is to come
            self._looked = self._clock()
            answers = list(self._writing)
            if not free:
                ray.wait(answers, timeout=wait_s)
            done, _ = ray.wait(answers, num_returns=len(answers), timeout=0)
            tables: dict[ray.ObjectRef, pa.Table] = {}
            for answer in done[:MOST_TOGETHER]:
                try:
                    tables[answer] = ray.get(answer)
                except ray.exceptions.RayError:
                    del self._writing[answer]
                    raise
            if tables:
                yield Shard(max(self._writing[answer][0] for answer in tables), pa.concat_tables(tables.values()))
                for answer in tables:
                    del self._writing[answer]

    def rest(self, within_s: float) -> Iterator[Shard]:
        """Yield the shards of all batches taken that are written within ``within_s`` seconds, as ``written`` does."""
        deadline = time.monotonic() + within_s
        while self.finish() and (left_s := deadline - time.monotonic()) > 0:
            with suppress(ray.exceptions.RayError):  # the other shards may still be written
                yield from self.written(min(TICK_S, left_s))

    def _write_due(self) -> None:
        """Write the collected batches as a shard if they are old enough, the last ones, or a whole shard."""
        old = self._clock() - self._since >= self._age_s
        if old or self._ended or not self.has_room():
            self._write()

    def _write(self) -> None:
        """Give the collected batches to a writer as a shard; they go on waiting while every writer has two."""
        if not self._waiting:
            return
        number = self._n_shards
        if self._flow.writers is None:
            self._written.append(Shard(number, pa.concat_tables(self._waiting)))
        else:
            in_hand = Counter(writer for _, writer in self._writing.values())
            writer = min(self._writers, key=lambda one: in_hand[one])
            if in_hand[writer] >= 2:
                return
            # If an interrupt hits here, the same shard is written again, and the first result is never committed.
            answer = writer.write.remote(*self._waiting)
            self._writing[answer] = (number, writer)
        self._waiting, self._n_waiting, self._n_shards = [], 0, number + 1
