"""The execution of one graph: its output becomes written shards, and its workers are watched meanwhile."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, suppress
from typing import Generic, TypeVar

import pyarrow.compute as pc
import ray

from pipeline.errors import RunFailed
from pipeline.runner.cluster.connection import describe_cause, is_out_of_disk, sum_resources
from pipeline.runner.cluster.disks import DiskSearch, find_full_disks, find_known_full_disks
from pipeline.runner.cluster.head import Head, HeadLost
from pipeline.runner.job import Items, Job, Watch
from pipeline.runner.progress import make_reporter
from pipeline.runner.shards import TICK_S, ShardBundler, WrittenShard
from pipeline.runner.watchdog import SHRUNK_S, DiskFull, Fetcher, Growth, Watchdog
from pipeline.runner.worker_reports import WorkerReport, run_heartbeats
from pipeline.storage.outages import OUTAGES

T = TypeVar("T", bound=Items)
FREE_SPACE = (
    "Free space on them, or start these nodes with --temp-dir or --object-spilling-directory on another disk "
    "(RAY_TMPDIR where the command itself starts Ray)"
)
# Ray cannot start workers on a full disk. A run in which nothing moves waits this long for free space.
_FULL_S = 60.0
# A stopping run waits no longer than this for its last report: workers that start, or a cluster that ends with the
# run, do not answer.
_STOP_LOOK_S = 5.0


class GraphExecution(Generic[T]):
    """One graph of a job while it runs. The caller ends it with ``close`` and then leaves its contexts.

    Attributes:
        n_shards: 1 plus the largest number of an acknowledged shard; 0 before the first.
    """

    def __init__(self, job: Job[T], items: T, watch: Watch, resources: ExitStack) -> None:
        """Plan the workers for ``items``, log them and new nodes, build the graph, and start it in a thread.

        Args:
            resources: gets the contexts to leave after ``close``, so that an interrupt half-way does not lose them.

        Raises:
            RunFailed: the cluster is too small for the plan.
        """
        self._job = job
        self._items = items
        self._watch = watch
        self._plan = job.plan(items)
        self._head = Head(job.say)
        self._growth = Growth(self._plan, job.options.max_gpus)
        self._named_disks: dict[str, str] = {}
        self._last_writes_until: float | None = None  # set once no more output of the graph is taken
        self.n_shards = 0
        heartbeats = resources.enter_context(run_heartbeats(tuple(self._plan.wording.stages)))
        display = make_reporter(job.console, len(items), job.options.log_interval, self._plan.wording)
        self._log_nodes(WorkerReport())
        job.say(f"starting workers: {self._plan.workers}")
        graph = job.graph(items, self._plan, heartbeats)
        self._reporter = resources.enter_context(display)
        self.shards = resources.enter_context(ShardBundler(graph, job.options.flush_seconds))
        self._watchdog = Watchdog(
            heartbeats, job.options.stall_timeout, self._plan, len(items), job.available_resources
        )
        self._looked_at = time.monotonic()
        self._batches = resources.enter_context(Fetcher(graph.batches()))

    def next_shard(self) -> WrittenShard | None:
        """Run the graph until a shard is written, and return it, again until ``acknowledge``; None after the last one.

        After ``end_input``, only output that was taken before is written, until the time limit, and shards whose writer
        fails are left out.

        Raises:
            RunFailed: the graph, a writer or the head (HeadLost) failed, nothing moved for too long, or the watch ended
                the run.
            ClusterChanged: the other items should be rescheduled, because nodes changed or have full disks (DiskFull).
        """
        if self._last_writes_until is not None:
            return self._next_last()
        try:
            while True:
                self._head.look()
                self._check_workers_when_due()
                if (shard := self.shards.next_written()) is not None:
                    return shard
                if self._batches.is_at_end:
                    if not self.shards.finish():
                        return None
                elif self.shards.has_room() and (batch := self._batches.next(TICK_S)) is not None:
                    self.shards.take(batch)
                    self._reporter.count_computed(batch.n_items)
        except (ray.exceptions.RayError, OSError) as error:
            self._batches.close()  # first: a graph that runs on keeps resources, which the search for a cause needs
            raise self._explain(error) from error

    def acknowledge(self, shard: WrittenShard) -> None:
        """Count the last shard of ``next_shard`` as committed, show the new counts, and reset the stall timer."""
        self.shards.acknowledge()  # first: after this, an interrupt does not return the shard again
        self.n_shards = max(self.n_shards, shard.number + 1)
        self._watchdog.record_movement()
        self._grow_reporter()
        ok = pc.sum(pc.equal(shard.rows["status"], "ok")).as_py()
        self._reporter.advance(ok, len(shard.rows) - ok)

    def end_input(self, within_s: float = math.inf) -> None:
        """Stop the graph. ``next_shard`` still writes the output that was taken before, within ``within_s`` seconds."""
        self._batches.close()
        self._last_writes_until = time.monotonic() + within_s

    def check_complete(self) -> None:
        """Raise RunFailed if fewer rows are committed than there are items."""
        if (n_missing := len(self._items) - self.shards.n_committed) > 0:
            item = self._plan.wording.item
            raise RunFailed(f"{n_missing} of {len(self._items)} {item}s have no row. Rerun the command")

    def close(self, within_s: float | None = None) -> None:
        """Stop the graph, pass the last report of its workers to the watch, and log excluded workers.

        Args:
            within_s: the seconds that an interrupt leaves for the report. If None, changed nodes are logged too.
        """
        self._batches.close()
        look_s = self._watchdog.every_s if within_s is None and self._head.answers() else _STOP_LOOK_S
        report = self._watchdog.read_latest(look_s if within_s is None else min(look_s, within_s))
        OUTAGES.take_reports(report.outages)
        self._watch.take_last(report, self._reporter.current)
        if within_s is None:
            self._log_nodes(report)
        for worker in report.excluded_workers:
            self._job.say(f"note: excluded worker: {worker}")

    def _next_last(self) -> WrittenShard | None:
        """Return the next shard that is written within the time limit of ``end_input``, or None, ignoring RayErrors."""
        assert self._last_writes_until is not None
        with suppress(ray.exceptions.RayError):  # no writer takes the rest
            while self.shards.finish() and (left_s := self._last_writes_until - time.monotonic()) > 0:
                with suppress(ray.exceptions.RayError):  # the other shards may still be written
                    if (shard := self.shards.next_written(min(TICK_S, left_s))) is not None:
                        return shard
        return None

    def _explain(self, error: ray.exceptions.RayError | OSError) -> RunFailed | DiskFull:
        """Return the error that ends the graph because of ``error``, with the reason that a worker gave, if any.

        It is HeadLost if the head does not answer, and DiskFull if nodes have full disks and the others can run all
        stages. Otherwise, and for each OSError of the driver, it is RunFailed, whose message also names nodes where no
        process started. Errors of the search for full disks are ignored.
        """
        is_of_ray = isinstance(error, ray.exceptions.RayError)
        if is_of_ray and not self._head.answers():
            return HeadLost(self._head.describe_loss())
        worker_failure = self._watchdog.read_latest(self._watchdog.every_s).failure if is_of_ray else None
        why = worker_failure or describe_cause(error)
        disks = DiskSearch({}, {})
        with suppress(Exception):  # a cluster that does not answer: the error itself says more
            if is_of_ray:
                reported = self._watchdog.report.full_disks
                spilling_failed = is_out_of_disk(error)
                disks = find_full_disks(self._job.excluded_nodes, reported, spilling_failed=spilling_failed)
        if disks.full:
            return self._make_disk_error(disks.full, why)
        if disks.silent:
            nodes = ", ".join(sorted(disks.silent.values()))
            why += f"; no process started on {nodes}, as on a full disk: look at Ray's folder there"
        return RunFailed(why)

    def _make_disk_error(self, full: dict[str, str], why: str) -> DiskFull | RunFailed:
        """Return DiskFull for the nodes ``full`` if the others can run all stages, otherwise RunFailed with ``why``."""
        if self._job.can_run_on(sum_resources({**self._job.excluded_nodes, **full})):
            return DiskFull(full)
        return RunFailed(
            f"{why}; {DiskFull(full)}, and no other node can run all stages. {FREE_SPACE}; then rerun the command"
        )

    def _check_workers_when_due(self) -> None:
        """Read and show the workers' report at intervals while the head answers, and end the graph if necessary.

        This also logs changed nodes and full disks, passes the report to the watch, and may ask an autoscaler for
        nodes.

        Raises:
            RunFailed: nothing moved for too long, or the watch ended the run.
            ClusterChanged: the other items should be rescheduled on the current nodes.
        """
        if time.monotonic() - self._looked_at < self._watchdog.every_s or not self._head.answers():
            return
        self._looked_at = time.monotonic()
        display = self._reporter
        self._watchdog.grow(len(self._items))
        report = self._watchdog.read()
        OUTAGES.take_reports(report.outages)
        self._grow_reporter()
        display.stages(report)
        self._log_nodes(report)
        self._watch.look(report, display.current)
        self._check_disks(report)
        self._watchdog.check()
        if (speed := display.pace.measure_speed()) is not None and display.progress.busy:
            today = None
            with suppress(Exception):  # a cluster that does not answer has not grown
                today = self._job.replan(speed.n_left) if self._head.answers() else None
            self._growth.look(display.progress, speed, today)

    def _check_disks(self, report: WorkerReport) -> None:
        """Log full disks, once until there are none, after nothing has moved for SHRUNK_S seconds.

        Errors of the search are ignored.

        Raises:
            DiskFull: nothing has moved for _FULL_S seconds, no worker has an item in hand, and the other nodes can run
                all stages.
            RunFailed: the same, but they cannot.
        """
        still_s = self._watchdog.still_s
        full = dict[str, str]()
        if still_s > SHRUNK_S:
            with suppress(Exception):  # a cluster that does not answer: the watchdog will tell
                full = find_known_full_disks(self._job.excluded_nodes, report.full_disks)
        if full and not self._named_disks:
            self._job.say(f"note: {DiskFull(full)}, and nothing moves. Ray cannot start workers there. {FREE_SPACE}")
        self._named_disks = full
        if full and still_s > _FULL_S and not any(report.inside.values()):
            raise self._make_disk_error(full, f"no {self._plan.wording.item} moved for {still_s:.0f} s")

    def _log_nodes(self, report: WorkerReport) -> None:
        """Log nodes that joined or were lost, and each node's workers, unless the cluster does not answer."""
        with suppress(Exception):  # a cluster that does not answer: the watchdog will tell
            if self._head.answers():  # else Ray would wait for it
                self._job.nodes.look(report, self._plan)

    def _grow_reporter(self) -> None:
        """Pass the number of items known by now, and whether more will come, to the display."""
        self._reporter.grow(len(self._items), is_final=self._items.is_complete)
