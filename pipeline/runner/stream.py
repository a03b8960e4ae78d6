"""The loop of every run on Ray: it takes the written shards of a run one after the other, and commits them."""

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
from pipeline.runner.run_record import LAST_WRITES_S, NO_ANSWER, compute_seconds_left, write_last
from pipeline.runner.shards import WrittenShard
from pipeline.runner.stages import end_workers
from pipeline.runner.watchdog import ClusterChanged, DiskFull, is_still_running

T = TypeVar("T", bound=Items)
# The share of the time for last writes that is kept for the run's record and note, in seconds.
_RECORD_S = 3.0
_END_S = 60.0  # the limit for the end of an interrupted graph's thread, as this process or Ray may be suspended


def commit_all(stream: Stream[T], commit: Callable[[int, pa.Table], object]) -> None:
    """Commit every shard of a stream. On an error or an interrupt, write and commit finished work before raising it.

    If the store failed, nothing more is written. The first error of these last writes ends them, and is only noted on
    the raised error. Exceptions that are not listed here (bugs) pass through at once.

    Args:
        commit: called with the number and the rows of a shard; makes the rows visible. After an interrupt it may get
            the same rows again, together with others; that must change nothing.

    Raises:
        RunFailed: the graph or the store (OSError) failed, nothing moved for too long, or rows are missing.
        KeyboardInterrupt: the run was interrupted. Notes tell how many items have rows or were not written.
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

    A shard counts as committed when the next one is asked for. After an interrupt, ``drain`` yields the others.
    """

    def __init__(self, job: Job[T], items: T, watch: Watch) -> None:
        """Set up a stream. Nothing starts before the first shard is asked for."""
        self._job = job
        self._items = items
        self._watch = watch
        self._execution: GraphExecution[T] | None = None
        self._resources = (
            ExitStack()
        )  # of the execution; kept here, since an interrupt may lose an execution that is starting
        self._change: ClusterChanged | None = None  # why the graph ends before its last item
        self._shard: WrittenShard | None = None  # returned, and not known to be committed
        self._committed: list[pa.Table] = []  # the key columns of committed rows
        self._n_done = 0  # items with rows from earlier graphs
        self._n_left_out = 0  # those of them that are no longer in ``_items``
        self._had_unwritten = False

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop the graph and take the last report of its workers. After a RunFailed, also end the workers."""
        self._close(error if isinstance(error, KeyboardInterrupt) else None)
        # The workers of a lost head end with their nodes, and there is no head that could end them.
        if isinstance(error, RunFailed) and not isinstance(error, HeadLost):
            end_workers()  # they would keep resources from the next run of this process

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> WrittenShard:
        """Count the previous shard as committed, and return the next written shard, numbered across the run's graphs.

        If nodes change, finished work of the graph is returned first; then the remaining items get a new graph.

        Raises:
            StopIteration: all shards were returned, or there are no items.
            RunFailed: the cluster is too small, the graph failed, nothing moved for ``options.stall_timeout`` seconds,
                the watch ended the run, or an interrupted graph does not end.
        """
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
                return self._number_in_run(shard)
            if self._change is None:
                break
            self._reschedule(self._change)
        raise StopIteration

    def check_complete(self) -> None:
        """Raise RunFailed if items have no row after the last shard."""
        if self._execution is not None:
            self._execution.check_complete()

    def explain(self, error: BaseException) -> BaseException:
        """Return the error that ends the run because of ``error``: a RunFailed for an OSError, otherwise itself."""
        if not isinstance(error, OSError):
            return error
        ending = RunFailed(describe_cause(error))
        ending.__cause__ = error
        return ending

    def drain(self, ending: BaseException) -> Iterator[WrittenShard]:
        """Stop the graph, and yield the shards that are written within the time for the last writes of ``ending``.

        A shard that was yielded before and is not known to be committed is yielded again. Without a graph, or if the
        time is over, nothing is yielded.
        """
        if self._execution is None:
            return
        self._flush(self._execution, ending)
        self._had_unwritten = self._execution.shards.has_unwritten
        while (shard := self._execution.next_shard()) is not None:
            yield self._number_in_run(shard)
            self._acknowledge()

    def describe_end(self, ending: BaseException, failure: str) -> None:
        """Add to ``ending`` how many items have a row and how many finished items were not written.

        The first becomes a note of a KeyboardInterrupt, or the start of the message of HeadLost or an error with a
        cause; other errors do not get it. The second is a note. If nothing has started, nothing is added.

        Args:
            failure: the error of the last write; "" if none failed.
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
        """Stop the graph, and let finished work, if any, be written in the time for the last writes of ``ending``."""
        execution.end_input()
        if execution.shards.has_unwritten:  # otherwise the run's record starts the clock
            self._job.say(f"stopping: flushing finished work (up to {LAST_WRITES_S:g} s)")
            execution.end_input(compute_seconds_left(ending) - _RECORD_S)

    def _number_in_run(self, shard: WrittenShard) -> WrittenShard:
        """Remember ``shard`` as returned, and return it with its number in the run instead of in the graph."""
        self._shard = shard
        return shard._replace(number=self._job.n_shards + shard.number)

    def _acknowledge(self) -> None:
        """Count the shard that was returned last, if any, as committed, and keep the KEY columns of its rows."""
        shard = self._shard
        execution = self._execution
        if shard is not None and execution is not None:
            # A copy: a slice would keep the whole shard in Ray's object store.
            self._committed.append(shard.rows.select(self._items.KEY).take(pa.array(range(len(shard.rows)))))
            execution.acknowledge(shard)
        self._shard = None

    def _reschedule(self, change: ClusterChanged) -> None:
        """Close the graph because of ``change``, end its workers, and keep only the items without a committed row.

        If rows were committed, this waits until all items are known. The user is told. Nodes with full disks (DiskFull)
        are excluded from later graphs.

        Raises:
            RunFailed: the thread of the graph does not end within _END_S seconds.
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
        """Close the graph, if one runs, and add its shards and rows to the run's counts.

        After an interrupt, which ends the run, this leaves _RECORD_S of the time for last writes.
        """
        execution = self._execution
        try:
            with self._resources:
                if execution is not None:
                    execution.close(
                        None if interrupt is None else max(0.0, compute_seconds_left(interrupt) - _RECORD_S)
                    )
        finally:
            if execution is not None:
                self._job.n_shards += execution.n_shards
                self._execution, self._n_done = None, self._n_done + execution.shards.n_committed
