"""The written shards of a run, one after the other, and their commits: the loop that every run on Ray has.

``commit_all`` is the loop. ``Stream`` yields the shards. It runs the items through a graph
(``pipeline.runner.execution``). When the nodes change, it runs the items without a committed row through another one.

However a run ends, finished work is written first, unless the store itself fails or the driver has a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

import pyarrow as pa

from pipeline.errors import RunFailed
from pipeline.runner.cluster.connection import describe_cause
from pipeline.runner.cluster.head import HeadLost
from pipeline.runner.execution import FREE_SPACE, GraphExecution
from pipeline.runner.job import Items, Job, Watch
from pipeline.runner.run_record import LAST_WRITES_S, NO_ANSWER, seconds_left, write_last
from pipeline.runner.shards import Shard
from pipeline.runner.stages import end_workers
from pipeline.runner.watchdog import ClusterChanged, DiskFull, is_still_running

T = TypeVar("T", bound=Items)
# The part of the time for last writes that is kept for the record and the note of the run.
_RECORD_S = 3.0
_END_S = 60.0  # for the thread of an interrupted graph, where this process or Ray stood still


def commit_all(stream: Stream[T], commit: Callable[[int, pa.Table], object]) -> None:
    """Commit every shard of a stream; on an error or an interrupt, first write and commit what is finished.

    Args:
        stream: the shards of a run.
        commit: makes the rows of a shard visible, under the shard's number. After an interrupt it may get the same
            rows again, together with others; that must change nothing.

    Raises RunFailed if the graph or the store fails, if nothing moves, or if rows are missing.
    """
    with stream:
        try:
            for shard in stream:
                commit(shard.number, shard.rows)
            stream.check_complete()
        except (OSError, RunFailed, KeyboardInterrupt) as error:
            ending = stream.explain(error)
            failure = ""
            # A store that failed would fail again. Ray raises a worker's OSError as a RayTaskError that is one, too.
            if not isinstance(ending.__cause__, OSError):
                for shard in stream.drain(ending):
                    if failure := write_last(ending, partial(commit, shard.number, shard.rows), _RECORD_S):
                        break
            stream.describe_end(ending, failure)
            if ending is error:
                raise
            raise ending from error


class Stream(Generic[T]):
    """The shards that a job's workers have written, over as many graphs as it takes. Iterate it in a ``with`` block.

    A shard counts as committed when the next one is asked for. The block ends with the last report of the workers.

    Iterating raises RunFailed if the graph fails, or if nothing moves for ``options.stall_timeout`` seconds. An
    interrupt does not end the iterator, as it would a generator: ``drain`` yields the shards that are not committed.
    """

    def __init__(self, job: Job[T], items: T, watch: Watch) -> None:
        """Set up a stream; nothing starts before the first shard is asked for."""
        self._job = job
        self._items = items
        self._watch = watch
        self._execution: GraphExecution[T] | None = None
        self._resources = ExitStack()  # of the execution; not its own, as an interrupt may lose it while it starts
        self._change: ClusterChanged | None = None  # why the graph ends before its last item
        self._shard: Shard | None = None  # yielded, and not known to be committed
        self._committed: list[pa.Table] = []  # columns of the rows that items are found by
        self._n_done = 0  # items with rows by earlier graphs
        self._n_left_out = 0  # those of them that ``_items`` does not hold any more
        self._had_unwritten = False

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the graph and its workers, and take their last report."""
        self._close(error if isinstance(error, KeyboardInterrupt) else None)
        # The workers of a lost head end with their nodes, and nobody could be asked for them.
        if isinstance(error, RunFailed) and not isinstance(error, HeadLost):
            end_workers()  # they would keep resources from the next run of this process

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> Shard:
        """Return the next written shard, under the run's number for it."""
        self._acknowledge()
        while len(self._items):
            if self._execution is None:
                self._execution = GraphExecution(self._job, self._items, self._watch, self._resources)
            try:
                shard = self._execution.next_shard()
            except ClusterChanged as change:
                self._change = change
                self._flush(self._execution, change)
                continue
            if shard is not None:
                return self._number(shard)
            if self._change is None:
                break
            self._reschedule(self._change)
        raise StopIteration

    def check_complete(self) -> None:
        """Raise RunFailed if items have no row after the last shard."""
        if self._execution is not None:
            self._execution.check_complete()

    def explain(self, error: BaseException) -> BaseException:
        """Return what ends the run because of ``error``: an OSError, which is the store's, becomes a RunFailed."""
        if not isinstance(error, OSError):
            return error
        ending = RunFailed(describe_cause(error))
        ending.__cause__ = error
        return ending

    def drain(self, ending: BaseException) -> Iterator[Shard]:
        """End the graph's input, and yield the shards written in the time for the last writes of ``ending``.

        The shard that was yielded last comes again, unless it is known to be committed.
        """
        if self._execution is None:
            return
        self._flush(self._execution, ending)
        self._had_unwritten = self._execution.shards.has_unwritten
        while (shard := self._execution.next_shard()) is not None:
            yield self._number(shard)
            self._acknowledge()

    def describe_end(self, ending: BaseException, failure: str) -> None:
        """Add to ``ending`` how many items have a row, and how many finished items were not written.

        The first is added for an interrupt, a lost head and an error of Ray or the store. ``failure`` is the error of
        the last write, "" if there was none.
        """
        execution = self._execution
        item = self._job.wording.item
        n_done = self._n_done + (0 if execution is None else execution.shards.n_committed)
        if execution is None and not n_done:  # nothing has started
            return
        if execution is not None and self._had_unwritten and (n_left := execution.shards.n_unwritten) > 0:
            reason = failure or NO_ANSWER
            ending.add_note(
                f"{n_left} finished {item}s were not written: {reason}. Rerun the command to process them again"
            )
        count = f"{n_done} of {self._n_left_out + len(self._items)} {item}s"
        if isinstance(ending, KeyboardInterrupt):
            ending.add_note(f"this run has written rows for {count}")
        elif isinstance(ending, HeadLost) or ending.__cause__ is not None:
            ending.args = (f"the run stopped after {count}: {ending}",)

    def _flush(self, execution: GraphExecution[T], ending: BaseException) -> None:
        """End the graph's input; what came out of it is written in the time for the last writes of ``ending``."""
        execution.end_input()
        if execution.shards.has_unwritten:  # else the time begins with the record of the run
            self._job.say(f"stopping: flushing finished work (up to {LAST_WRITES_S:g} s)")
            execution.end_input(seconds_left(ending) - _RECORD_S)

    def _number(self, shard: Shard) -> Shard:
        """Remember a shard until it is committed, and return it under its number in the run."""
        self._shard = shard
        return shard._replace(number=self._job.n_shards + shard.number)

    def _acknowledge(self) -> None:
        """Count the shard that was yielded last as committed."""
        shard = self._shard
        execution = self._execution
        if shard is not None and execution is not None:
            # A copy: a slice would keep the whole shard in Ray's object store.
            self._committed.append(shard.rows.select(self._items.KEY).take(pa.array(range(len(shard.rows)))))
            execution.acknowledge(shard)
        self._shard = None

    def _reschedule(self, change: ClusterChanged) -> None:
        """Leave the graph, and go on with the items that have no row; nodes with full disks are excluded from then on.

        Raises RunFailed if the graph does not end.
        """
        wording = self._job.wording
        self._close()
        self._change = None
        if self._committed:
            remaining = self._items.without(pa.concat_tables(self._committed))
            self._items, self._n_left_out = remaining, self._n_done
        if is_still_running(_END_S):
            raise RunFailed(f"{change}, but the previous workers do not end. Rerun the command")
        end_workers()
        reschedule = f"Rescheduling {len(self._items)} {wording.item}s on the"
        if isinstance(change, DiskFull):
            self._job.excluded_nodes |= change.nodes
            self._job.say(f"note: {change}. {reschedule} other nodes. {FREE_SPACE}")
        else:
            self._job.say(f"note: {change}. {reschedule} current nodes")

    def _close(self, interrupt: KeyboardInterrupt | None = None) -> None:
        """Leave the graph, if one runs; ``interrupt`` ends the run, and a part of its time for last writes is kept."""
        execution = self._execution
        try:
            with self._resources:
                if execution is not None:
                    execution.close(None if interrupt is None else max(0.0, seconds_left(interrupt) - _RECORD_S))
        finally:
            if execution is not None:
                self._job.n_shards += execution.n_shards
                self._execution, self._n_done = None, self._n_done + execution.shards.n_committed
