"""Bundling of a graph's output into shards, by number of items and by age, and the writers of the shards.

Only references wait here; their bytes stay in the object stores.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import ray
from ray.actor import ActorHandle

# A shard that is due is written at most this much later.
TICK_S = 0.5
# While batches arrive, the driver looks for written shards at this interval, and commits them together.
LOOK_S = 0.1
# The driver holds the rows of one commit in memory.
MAX_SHARDS_PER_COMMIT = 64


class GraphBatch(NamedTuple):
    """A batch of a graph's output: tables or references to tables, and how many items they hold."""

    tables: Sequence[ray.ObjectRef] | Sequence[pa.Table]
    n_items: int


class WrittenShard(NamedTuple):
    """One written shard, or several that are committed together.

    Attributes:
        number: the largest number of these shards.
        n_taken: the number of items in their batches, an upper bound of the number of rows.
    """

    number: int
    rows: pa.Table
    n_taken: int


@dataclass(frozen=True)
class RunGraph:
    """A Ray Data graph that is ready to run, and the way in which its output is written.

    Attributes:
        items_per_shard: the number of items that completes a shard.
        start_writers: starts the actors whose ``write`` turns blocks into a shard and returns the rows to commit; None
            if the blocks themselves hold the rows.
        unpack_block: converts a block to rows to commit if there are no writers.
        items_per_row: with writers, the number of items that share a row of the output; the last rows may have fewer.
    """

    dataset: ray.data.Dataset
    items_per_shard: int
    start_writers: Callable[[], Sequence[ActorHandle]] | None = None
    unpack_block: Callable[[pa.Table], pa.Table] = lambda rows: rows
    items_per_row: int = 1

    def batches(self) -> Iterator[GraphBatch]:
        """Run the graph, and yield each batch of its last stage as soon as it is computed; empty batches are skipped.

        Closing the generator stops the graph. With writers, a batch has references, and its number of items is an upper
        bound.
        """
        # Not iter_batches: its threads wait in a way that cannot be interrupted, and it fetches ahead.
        bundles = self.dataset.iter_internal_ref_bundles()
        try:
            for bundle in bundles:
                if not bundle.num_rows():  # the output of a call without items may lack columns
                    continue
                if self.start_writers is not None:
                    yield GraphBatch(bundle.block_refs, bundle.num_rows() * self.items_per_row)
                else:
                    tables = [self.unpack_block(block) for block in ray.get(bundle.block_refs)]
                    yield GraphBatch(tables, sum(map(len, tables)))
        finally:
            # Deleting the iterator ends the execution of a graph that is stopped half-way. Left to the garbage
            # collector it might end after this process has left the cluster, and would start another Ray.
            del bundles


class _Writing(NamedTuple):
    """A shard that a writer is writing: the pending answer, the writer, and the number of items taken for it."""

    answer: ray.ObjectRef
    writer: ActorHandle
    n_taken: int


class ShardBundler:
    """The bundler of batches into shards of about ``graph.items_per_shard`` items, or fewer after ``age_s`` seconds.

    Batches are not divided. A shard has more items if a single batch has, or if a batch comes while all writers are
    busy, each with one shard in hand and one queued. An interrupt (KeyboardInterrupt) at any statement loses no shard
    and counts none twice.

    Attributes:
        n_taken: the number of items that were taken; for shards that are not acknowledged it is an upper bound.
        n_committed: the number of rows of acknowledged shards.
    """

    def __init__(self, graph: RunGraph, age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without batches. A shard that is not full is written after ``age_s`` seconds."""
        self._graph = graph
        self._age_s = age_s
        self._clock = clock
        self._writers: Sequence[ActorHandle] = ()
        self._waiting: list[ray.ObjectRef | pa.Table] = []
        self._n_waiting = 0
        self._since = 0.0  # when the first waiting batch came
        self._n_shards = 0
        self._looked_at = -math.inf  # when the driver last looked for written shards
        self._writing: dict[int, _Writing] = {}  # by shard number
        self._ready: dict[int, WrittenShard] = {}  # shards of a graph without writers, by number
        self._offered: tuple[WrittenShard, Collection[int]] | None = None  # by next_written: the shard, and its numbers
        self._input_ended = False
        self.n_taken = self.n_committed = 0

    def __enter__(self) -> ShardBundler:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill the writers; shards that they still have in hand are lost."""
        for writer in self._writers:
            with suppress(Exception):  # a cluster that is gone has no writers either
                ray.kill(writer)
        self._writers = ()

    @property
    def has_unwritten(self) -> bool:
        """True if a batch was taken whose shard is not acknowledged yet."""
        return bool(self._waiting or self._writing or self._ready)

    @property
    def n_unwritten(self) -> int:
        """The number of items that were taken and are not committed; an upper bound before the end."""
        return self.n_taken - self.n_committed

    def has_room(self) -> bool:
        """Return True if another batch may be taken: the waiting batches are less than a shard."""
        return self._n_waiting < self._graph.items_per_shard

    def take(self, batch: GraphBatch) -> None:
        """Add a batch to the current shard, and pass shards that are due to a writer. Call it only if ``has_room``.

        If the batch would make the shard too large, the waiting batches become a shard first, unless all writers are
        busy. The first batch starts the writers.
        """
        self.n_taken += batch.n_items  # first, as an interrupt may lose the batch
        if self._n_waiting + batch.n_items > self._graph.items_per_shard:
            self._write()  # the shard would be too large with this batch
        if self._graph.start_writers is not None and not self._writers:
            self._writers = (
                self._graph.start_writers()
            )  # not earlier, as the workers of earlier stages take longer to start
        if not self._waiting:
            self._since = self._clock()
        self._waiting, self._n_waiting = [*self._waiting, *batch.tables], self._n_waiting + batch.n_items
        self._write_due()

    def finish(self) -> bool:
        """End the input, so that waiting batches become a shard. Return True until all shards are acknowledged.

        Call it until then, since the writers may be too busy for the last shard.
        """
        self._input_ended = True
        self._write_due()
        return self.has_unwritten

    def next_written(self, wait_s: float = TICK_S) -> WrittenShard | None:
        """Return the shards written by now, as one ``WrittenShard``, or None; the same again until ``acknowledge``.

        With writers, up to MAX_SHARDS_PER_COMMIT shards come together. While batches can be taken, this looks for
        written shards only every LOOK_S seconds and does not wait; otherwise it waits up to ``wait_s`` seconds for one.
        It also passes waiting batches that are due to a writer.

        Raises:
            RayError: a writer failed. Its shard is given up.
        """
        self._write_due()
        if self._ready:
            number, shard = next(iter(self._ready.items()))
            self._offered = shard, (number,)
            return shard
        if not self._writing:
            return None
        free = self.has_room() and not self._input_ended
        if free and self._clock() - self._looked_at < LOOK_S:
            return None  # each look makes Ray check every pending answer
        self._looked_at = self._clock()
        numbers = {writing.answer: number for number, writing in self._writing.items()}
        if not free:
            ray.wait(list(numbers), timeout=wait_s)
        ready_answers, _ = ray.wait(list(numbers), num_returns=len(numbers), timeout=0)
        tables: dict[int, pa.Table] = {}
        for answer in ready_answers[:MAX_SHARDS_PER_COMMIT]:
            try:
                tables[numbers[answer]] = ray.get(answer)
            except ray.exceptions.RayError:
                del self._writing[numbers[answer]]
                raise
        if not tables:
            return None
        n_taken = sum(self._writing[number].n_taken for number in tables)
        shard = WrittenShard(max(tables), pa.concat_tables(tables.values()), n_taken)
        self._offered = shard, tuple(tables)
        return shard

    def acknowledge(self) -> None:
        """Count the shard that ``next_written`` returned last as committed, and forget it."""
        assert self._offered is not None
        shard, numbers = self._offered
        # In one statement, which an interrupt cannot divide.
        self._ready, self._writing, self.n_taken, self.n_committed, self._offered = (
            {number: ready for number, ready in self._ready.items() if number not in numbers},
            {number: writing for number, writing in self._writing.items() if number not in numbers},
            self.n_taken - (shard.n_taken - len(shard.rows)),
            self.n_committed + len(shard.rows),
            None,
        )

    def _write_due(self) -> None:
        """Write the waiting batches if they are a whole shard, older than ``age_s``, or the last ones."""
        old = self._clock() - self._since >= self._age_s
        if old or self._input_ended or not self.has_room():
            self._write()

    def _write(self) -> None:
        """Pass the waiting batches to the writer with the fewest shards; do nothing while every writer has two.

        Without writers, the waiting batches become a written shard at once.
        """
        if not self._waiting:
            return
        number = self._n_shards
        if self._graph.start_writers is None:
            self._ready[number] = WrittenShard(number, pa.concat_tables(self._waiting), self._n_waiting)
        else:
            in_hand = Counter(writing.writer for writing in self._writing.values())
            writer = min(self._writers, key=lambda writer: in_hand[writer])
            if in_hand[writer] >= 2:
                return
            # If an interrupt hits here, the same shard is written again, and the first result is never committed.
            self._writing[number] = _Writing(writer.write.remote(*self._waiting), writer, self._n_waiting)
        self._waiting, self._n_waiting, self._n_shards = [], 0, number + 1
