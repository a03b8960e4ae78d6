"""The driver of a run: its whole life in one class, from the claim of the output to the summary.

``Driver.run`` is the life of a run. ``Driver.stream`` runs items through Ray, and reschedules the unfinished items when
the nodes change. ``GraphRun`` runs one graph: it takes the output, has shards written, commits each shard, and watches
the workers. A kind of run (``pipeline.prune.run``, ``pipeline.generate.run``) overrides the steps.

However a run ends, encoded rows are written first, unless the store itself fails.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sized
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.actor import ActorHandle
from rich.console import Console

from pipeline.errors import RunFailed
from pipeline.options import RunOptions
from pipeline.runner.claim import Claim
from pipeline.runner.cluster import check_device, describe_cause, is_out_of_disk, sum_resources
from pipeline.runner.head import Head, HeadLost
from pipeline.runner.heartbeats import WorkerReport, heartbeats_of
from pipeline.runner.last_writes import LAST_WRITES_S, NO_ANSWER, seconds_left, write_last
from pipeline.runner.monitor import Monitor
from pipeline.runner.nodes import DiskSearch, NodeLog, find_full_disks, find_known_full_disks
from pipeline.runner.progress import reporter
from pipeline.runner.run_record import Outcome, RunFile
from pipeline.runner.shards import TICK_S, RunGraph, Shard, Shards
from pipeline.runner.stages import Plan, end_workers
from pipeline.runner.watchdog import (
    SHRUNK_S,
    ClusterChanged,
    DiskFull,
    Fetcher,
    Growth,
    Watchdog,
    is_still_running,
)
from pipeline.storage.outages import OUTAGES, announce_outages
from pipeline.storage.stores import Store

O = TypeVar("O", bound=RunOptions)  # noqa: E741 - beside T and S
T = TypeVar("T", bound=Sized)
S = TypeVar("S", bound=Outcome)
FREE_SPACE = (
    "Free space on them, or start these nodes with --temp-dir or --object-spilling-directory on another disk "
    "(RAY_TMPDIR where the command itself starts Ray)"
)
# With a full disk Ray cannot start workers. A run in which nothing moves waits so long for free space.
_FULL_S = 60.0
# Workers that start, or a cluster that ends with the run, do not answer. A stop does not wait for them.
_STOP_LOOK_S = 5.0
_END_S = 60.0  # for the thread of an interrupted graph, where this process or Ray stood still
_RECORD_S = 3.0  # the part of the time for last writes that is kept for the record and the note


class Driver(ABC, Generic[O, T, S]):
    """One run on the driver, with options O, items to do T, and a summary S.

    The steps come in the order of the methods below: prepare, match, list_remaining, process (which calls ``stream``),
    then summarise and tidy. While items stream, a graph is planned and built, and its shards are committed.

    Attributes:
        store, run_id: the output of the run, and its name; ``prepare`` sets them.
        run_file: the record of the run; ``process`` sets it.
        monitor: shows the run to others.
        n_shards: the next free shard number.
        excluded_nodes: the nodes on which no worker may run, id -> host.
    """

    store: Store
    run_id: str
    run_file: RunFile
    monitor: Monitor

    def __init__(self, options: O, console: Console) -> None:
        """Set up a run; nothing is checked or started. Lines for the user go to ``console``."""
        self.options = options
        self.console = console
        self.n_shards = 0
        self.excluded_nodes: dict[str, str] = {}
        self.nodes = NodeLog(self.say)

    # The steps of a kind of run

    @abstractmethod
    def prepare(self) -> None:
        """Check the options and set ``store`` and ``run_id``. Raise UsageError; nothing is started."""

    @abstractmethod
    def match(self) -> None:
        """Take over the settings of results in the store. Raise IdentityMismatch if the options contradict them."""

    @abstractmethod
    def list_remaining(self) -> T:
        """Return the items still to do. Raise UsageError if the store fails or an item has changed."""

    @abstractmethod
    def process(self, todo: T) -> None:
        """Set ``run_file``, then stream the items under it. Raise RunFailed."""

    @abstractmethod
    def plan(self, items: T) -> Plan:
        """Divide the cluster's resources among the workers for items. Raise RunFailed if they do not suffice."""

    @abstractmethod
    def build(self, items: T, plan: Plan, heartbeats: ActorHandle) -> RunGraph:
        """Build the graph of Ray Data for items; its workers report to ``heartbeats``."""

    @abstractmethod
    def commit(self, number: int, rows: pa.Table) -> None:
        """Make the rows of shard ``number`` visible; they have a column ``status``.

        It may get the same shard again after an interrupt. The second call must change nothing.
        """

    @abstractmethod
    def select_unfinished(self, items: T) -> T:
        """Return the items that have no row of this run yet."""

    @abstractmethod
    def replan(self, n_items: int) -> Plan | None:
        """Plan ``n_items`` on the current nodes; None if no plan is possible now."""

    @abstractmethod
    def summarise(self, todo: T, wall_s: float) -> S:
        """Count the committed rows and return the summary."""

    def available_resources(self) -> Mapping[str, float]:
        """Return the resources of the nodes that the run may use now."""
        return sum_resources(self.excluded_nodes, self.options.max_gpus)

    def knows_all(self, items: T) -> bool:
        """Return True if no more items are found while ``items`` stream."""
        return True

    def can_run_on(self, cluster: Mapping[str, float]) -> bool:
        """Return True if a cluster with these resources can run all stages."""
        return cluster.get("CPU", 0.0) > 0

    def find_stop_reason(self, report: WorkerReport) -> str | None:
        """Return the reason to stop, or None."""
        return None

    def take_last_report(self, report: WorkerReport) -> None:
        """Record the last report of a graph's workers. Called once a graph, however it ended."""

    def tidy(self) -> None:
        """Merge the files that the run wrote. Called last, after the summary."""

    # What all runs share

    def say(self, line: str) -> None:
        """Print a line for the user."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def run(self) -> S:
        """Bring the store up to date with the request, and return the summary.

        Raises UsageError (nothing was started) or RunFailed (committed rows stay; a rerun resumes).
        """
        with announce_outages(self.say):
            return self._run()

    def _run(self) -> S:
        """Do the steps of a run in their order. An OSError becomes RunFailed."""
        try:
            self.prepare()
            changed_options = " ".join(f"{name}={value}" for name, value in self.options.changed_values().items())
            line = f"configuration: {changed_options or 'all defaults'}"
            self.console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
            self.store.make()
            with Claim(self.store, self.run_id, self.say, join=self.options.join) as claim:
                self.match()  # once more: another run may have written before the claim was made
                start = time.monotonic()
                todo = self.list_remaining()
                n_todo = len(todo)
                with Monitor(self.store, self.run_id, claim.set_progress) as self.monitor:
                    if n_todo:
                        self.process(todo)
                    else:
                        check_device(self.options, self.say)
                summary = replace(self.summarise(todo, time.monotonic() - start), log=self.monitor.log)
                if n_todo:
                    self.run_file.save(summary=summary.as_record())
                    self.tidy()
                return summary
        except OSError as error:  # a store failed; a fault of a single item becomes its error row
            raise RunFailed(describe_cause(error)) from error

    def stream(self, items: T) -> None:
        """Run items through graphs and commit every shard; reschedule unfinished items when the nodes change.

        Nodes whose disk is full are excluded from then on. Raises RunFailed if the graph or the store fails, if nothing
        moves for ``options.stall_timeout`` seconds, or if rows are missing.
        """
        n_done = 0
        while len(items):
            plan = self.plan(items)
            try:
                with heartbeats_of(tuple(plan.wording.stages)) as heartbeats:
                    return GraphRun(self, items, plan, heartbeats, n_done).run()
            except ClusterChanged as why:
                n_items, items = len(items), self.select_unfinished(items)
                n_done += n_items - len(items)
                if is_still_running(_END_S):
                    raise RunFailed(f"{why}, but the previous workers do not end. Rerun the command") from None
                end_workers()
                reschedule = f"Rescheduling {len(items)} {plan.wording.item}s on the"
                if isinstance(why, DiskFull):
                    self.excluded_nodes |= why.nodes
                    self.say(f"note: {why}. {reschedule} other nodes. {FREE_SPACE}")
                else:
                    self.say(f"note: {why}. {reschedule} current nodes")
            except HeadLost:
                raise  # the workers end with their nodes, and nobody could be asked for them
            except RunFailed:
                end_workers()  # they would keep resources from the next run of this process
                raise


class GraphRun(Generic[T]):
    """One graph while it runs: it commits every shard as it is written, and looks at the workers meanwhile."""

    def __init__(
        self, driver: Driver[Any, T, Any], items: T, plan: Plan, heartbeats: ActorHandle, n_done: int = 0
    ) -> None:
        """Set up one graph for ``items``; its shards are numbered on from the driver's next free number.

        ``n_done`` items of the run have a row by earlier graphs.
        """
        options = driver.options
        self._driver, self._items, self._plan, self._heartbeats = driver, items, plan, heartbeats
        self._reporter = reporter(driver.console, len(items), options.log_interval, plan.wording)
        self._first_shard = driver.n_shards
        self._n_taken = 0  # items that came out of the graph, an upper bound of those that are not committed yet
        self._n_done_before = n_done
        self._growth = Growth(plan, options.max_gpus)
        self._head = Head(driver.say)
        self._named_disks: dict[str, str] = {}

    def run(self) -> None:
        """Run the graph to its end and commit its shards.

        Raises RunFailed (also if rows are missing at the end) or ClusterChanged. Before either, or Ctrl-C, finished
        work is flushed, unless the store failed. The errors say how many items have a row after that. The last report
        of the workers is read in any case.
        """
        driver = self._driver
        self._look_at_nodes(WorkerReport())
        driver.say(f"starting workers: {self._plan.workers}")
        graph = driver.build(self._items, self._plan, self._heartbeats)
        with self._reporter, Shards(graph, driver.options.flush_seconds) as shards:
            self._watchdog = Watchdog(
                self._heartbeats,
                driver.options.stall_timeout,
                self._plan,
                len(self._items),
                driver.available_resources,
            )
            self._looked_at = time.monotonic()
            is_stop = False
            try:
                self._drain(graph, shards)
            except (RunFailed, ClusterChanged, KeyboardInterrupt) as ending:
                is_stop = isinstance(ending, KeyboardInterrupt)
                is_store_away = isinstance(ending.__cause__, OSError)  # a failed store would fail again
                if shards.has_unwritten and not is_store_away:
                    self._flush(shards, ending)
                if is_stop:
                    ending.add_note(f"this run has written rows for {self._count_done()}")
                elif isinstance(ending, RunFailed) and (isinstance(ending, HeadLost) or ending.__cause__ is not None):
                    ending.args = (f"the run stopped after {self._count_done()}: {ending}",)
                raise
            finally:
                self._take_last_report(is_stop)

    def _count_done(self) -> str:
        """Return how many items of the run have a row, in words."""
        n_done, n_items = self._reporter.progress.done, len(self._items)
        return f"{self._n_done_before + n_done} of {self._n_done_before + n_items} {self._plan.wording.item}s"

    def _take_last_report(self, is_stop: bool) -> None:
        """Read the workers' report once more, and record and show it; ``is_stop``: an interrupt ends the run."""
        driver = self._driver
        is_short = is_stop or not self._head.answers()
        report = self._watchdog.read_latest(_STOP_LOOK_S if is_short else self._watchdog.every_s)
        OUTAGES.take_reports(report.outages)
        driver.monitor.look(report, self._reporter.current)
        if not is_stop:
            self._look_at_nodes(report)
        driver.take_last_report(report)
        for worker in report.excluded_workers:
            driver.say(f"note: excluded worker: {worker}")

    def _flush(self, shards: Shards, ending: BaseException) -> None:
        """Write and commit finished items within the time for the last writes.

        If some are not written, ``ending`` gets a line about them. Errors of Ray, the store and a commit are not
        raised.
        """
        driver, item = self._driver, self._plan.wording.item
        driver.say(f"stopping: flushing finished work (up to {LAST_WRITES_S:g} s)")
        reason = NO_ANSWER
        with suppress(OSError, ray.exceptions.RayError, RunFailed):
            for shard in shards.iter_last(seconds_left(ending) - _RECORD_S):
                if isinstance(ending, ClusterChanged):  # the run continues
                    self._commit(shard)
                elif failure := write_last(ending, partial(self._commit, shard), _RECORD_S):
                    reason = failure
                    break
        if n_left := self._n_taken - self._reporter.progress.done:
            ending.add_note(
                f"{n_left} finished {item}s were not written: {reason}. Rerun the command to process them again"
            )

    def _drain(self, graph: RunGraph, shards: Shards) -> None:
        """Write and commit the graph's output until every item has a row; watch the workers meanwhile.

        Raises DiskFull if nodes have full disks and others can run all stages, else RunFailed for any error.
        """
        reporter, item = self._reporter, self._plan.wording.item
        try:
            with Fetcher(graph.batches()) as batches:
                while not batches.is_at_end or shards.finish():
                    self._head.look()
                    self._look_when_due()
                    if not batches.is_at_end and shards.has_room() and (batch := batches.next(TICK_S)) is not None:
                        self._n_taken += batch.n_items  # first, as an interrupt may come while a writer has it already
                        shards.take(batch)
                        reporter.count_computed(batch.n_items)
                    for shard in shards.iter_written():
                        self._commit(shard)
        except (ray.exceptions.RayError, OSError) as error:
            if isinstance(error, ray.exceptions.RayError) and not self._head.answers():
                raise HeadLost(self._head.describe_loss()) from error
            why = (isinstance(error, ray.exceptions.RayError) and self._watchdog.failure()) or describe_cause(error)
            disks = self._find_full_disks(error)
            if disks.full:
                raise self._make_disk_error(disks.full, why) from error
            if disks.silent:
                nodes = ", ".join(sorted(disks.silent.values()))
                why += f"; no process started on {nodes}, as on a full disk: look at Ray's folder there"
            raise RunFailed(why) from error
        if n_missing := len(self._items) - reporter.progress.done:
            raise RunFailed(f"{n_missing} of {len(self._items)} {item}s have no row. Rerun the command")

    def _find_full_disks(self, error: Exception) -> DiskSearch:
        """Search for full disks after an error of Ray; nothing is found for any other error."""
        with suppress(Exception):  # a cluster that does not answer: the error itself says more
            if isinstance(error, ray.exceptions.RayError):
                reported = self._watchdog.report.full_disks
                return find_full_disks(self._driver.excluded_nodes, reported, spilling_failed=is_out_of_disk(error))
        return DiskSearch({}, {})

    def _make_disk_error(self, full: dict[str, str], why: str) -> DiskFull | RunFailed:
        """Return DiskFull if other nodes can run all stages, else the error that ends the run because of ``why``."""
        if self._driver.can_run_on(sum_resources({**self._driver.excluded_nodes, **full})):
            return DiskFull(full)
        return RunFailed(
            f"{why}; {DiskFull(full)}, and no other node can run all stages. {FREE_SPACE}; then rerun the command"
        )

    def _look_at_disks(self, report: WorkerReport) -> None:
        """Name full disks while nothing moves, and end the graph after _FULL_S if no worker has an item in hand."""
        still_s, full = self._watchdog.still_s, dict[str, str]()
        if still_s > SHRUNK_S:
            with suppress(Exception):  # a cluster that does not answer: the watchdog will tell
                full = find_known_full_disks(self._driver.excluded_nodes, report.full_disks)
        if full and not self._named_disks:
            self._driver.say(f"note: {DiskFull(full)}, and nothing moves. Ray cannot start workers there. {FREE_SPACE}")
        self._named_disks = full
        if full and still_s > _FULL_S and not any(report.inside.values()):
            raise self._make_disk_error(full, f"no {self._plan.wording.item} moved for {still_s:.0f} s")

    def _commit(self, shard: Shard) -> None:
        """Commit a shard, count its items as progress, and restart the stall timer."""
        driver, number = self._driver, self._first_shard + shard.number
        driver.commit(number, shard.rows)
        driver.n_shards = max(driver.n_shards, number + 1)
        self._watchdog.record_movement()
        self._grow_reporter()
        ok = pc.sum(pc.equal(shard.rows["status"], "ok")).as_py()
        self._reporter.advance(ok, len(shard.rows) - ok)
        self._n_taken -= shard.n_taken - len(shard.rows)

    def _look_when_due(self) -> None:
        """Read and show the workers' report at intervals. Raise RunFailed or ClusterChanged if the graph should end.

        It may ask an autoscaler for more nodes.
        """
        if time.monotonic() - self._looked_at < self._watchdog.every_s or not self._head.answers():
            return
        self._looked_at = time.monotonic()
        driver, progress = self._driver, self._reporter
        self._watchdog.grow(len(self._items))
        report = self._watchdog.read()
        OUTAGES.take_reports(report.outages)
        self._grow_reporter()
        progress.stages(report)
        driver.monitor.look(report, progress.current)
        self._look_at_nodes(report)
        if (why := driver.find_stop_reason(report)) is not None:
            raise RunFailed(why)
        self._look_at_disks(report)
        self._watchdog.check()
        if (speed := progress.pace.speed()) is not None and progress.progress.busy:
            self._growth.look(progress.progress, speed, self._replan(speed.n_left))

    def _grow_reporter(self) -> None:
        """Show the number of items known by now, and whether more will come."""
        self._reporter.grow(len(self._items), is_final=self._driver.knows_all(self._items))

    def _look_at_nodes(self, report: WorkerReport) -> None:
        """Log nodes that joined or were lost. Nothing is raised if the cluster does not answer."""
        with suppress(Exception):  # a cluster that does not answer: the watchdog will tell
            if self._head.answers():  # else Ray would wait for it
                self._driver.nodes.look(report, self._plan)

    def _replan(self, n_items: int) -> Plan | None:
        """Plan ``n_items`` for the current cluster; None if it does not answer or no plan is possible."""
        try:
            return self._driver.replan(n_items) if self._head.answers() else None
        except Exception:  # noqa: BLE001 - a cluster that does not answer has not grown
            return None
