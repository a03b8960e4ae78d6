"""The driver of a run: its whole life, from the claim of its place to its summary, in one class.

``Driver.run`` is the life of a run. ``Driver.stream`` runs items through Ray, and plans what is left anew where the
nodes change. ``GraphRun`` runs one graph: it takes what comes out, has it written, commits each shard as it is written,
and looks at the workers meanwhile. A kind of run (``pipeline.prune.run``, ``pipeline.generate.run``) overrides the
steps.

However a run ends, rows already encoded are written first, unless the store itself fails.
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
from pipeline.runner.cluster import check_device, is_out_of_disk, resources_without, root_cause
from pipeline.runner.heartbeats import WorkerReport, heartbeats_of
from pipeline.runner.last_writes import LAST_WRITES_S, NO_ANSWER, seconds_left, write_last
from pipeline.runner.monitor import Monitor
from pipeline.runner.nodes import NodeLog, full_disks
from pipeline.runner.progress import reporter
from pipeline.runner.run_record import Outcome, RunFile
from pipeline.runner.shards import TICK_S, RunGraph, Shard, Shards
from pipeline.runner.stages import Plan, end_workers
from pipeline.runner.watchdog import ClusterChanged, DiskFull, Fetcher, Growth, Watchdog, still_running
from pipeline.storage.outages import OUTAGES, saying_outages
from pipeline.storage.stores import Store

O = TypeVar("O", bound=RunOptions)  # noqa: E741 - beside T and S
T = TypeVar("T", bound=Sized)
S = TypeVar("S", bound=Outcome)
FREE_SPACE = "Free space there, or start these nodes with --temp-dir or --object-spilling-directory on another disk"
_RECORD_S = 3.0  # of the time for the last writes those of the record and the note get this much


class Driver(ABC, Generic[O, T, S]):
    """One run on the driver, with options O, items to do T, and a summary S.

    The steps come in the order of the methods below: prepare, match, remaining, process (which calls ``stream``), then
    summarise and tidy. While items stream, a graph is planned and built, and its shards are committed.

    Attributes:
        store, run_id: where the results go, and the name of this run; ``prepare`` sets them.
        run_file: the record of the run; ``process`` sets it.
        monitor: shows the run to others.
        n_shards: how many numbers of shards are taken.
        without: the nodes on which no worker may run, id -> host.
    """

    store: Store
    run_id: str
    run_file: RunFile
    monitor: Monitor

    def __init__(self, options: O, console: Console) -> None:
        self.options = options
        self.console = console
        self.n_shards = 0
        self.without: dict[str, str] = {}
        self.nodes = NodeLog(self.say)

    # The steps of a kind of run

    @abstractmethod
    def prepare(self) -> None:
        """Check the options and set ``store`` and ``run_id``. Raise UsageError; nothing is started."""

    @abstractmethod
    def match(self) -> None:
        """Take over the settings of results that are there. Raise IdentityMismatch where they do not go together."""

    @abstractmethod
    def remaining(self) -> T:
        """Return the items that are left to do. Raise UsageError if the store fails or an item has changed."""

    @abstractmethod
    def process(self, todo: T) -> None:
        """Stream the items under a record of the run, which is ``run_file`` from then on. Raise RunFailed."""

    @abstractmethod
    def plan(self, items: T) -> Plan:
        """Divide the cluster as it is now among the workers for items. Raise RunFailed where it has no room."""

    @abstractmethod
    def build(self, items: T, plan: Plan, heartbeats: ActorHandle) -> RunGraph:
        """Build the graph of Ray Data for items; its workers report to ``heartbeats``."""

    @abstractmethod
    def commit(self, number: int, rows: pa.Table) -> None:
        """Make the rows of shard ``number`` visible; they have a column ``status``.

        After an interrupt it may get the same shard again, which must change nothing.
        """

    @abstractmethod
    def unfinished(self, items: T) -> T:
        """Return the items that this run has committed no row of."""

    @abstractmethod
    def plan_again(self, n_items: int) -> Plan | None:
        """Plan ``n_items`` on the nodes that are there now; None where that cannot be done now."""

    @abstractmethod
    def summarise(self, todo: T, wall_s: float) -> S:
        """Count the committed rows and return the summary."""

    def available_resources(self) -> Mapping[str, float]:
        """Return the resources of the nodes that the run may use now."""
        return resources_without(self.without, self.options.max_gpus)

    def can_run_on(self, cluster: Mapping[str, float]) -> bool:
        """Return whether a cluster with these resources can run all stages."""
        return cluster.get("CPU", 0.0) > 0

    def give_up(self, report: WorkerReport) -> str | None:
        """Return the reason to stop, or None."""
        return None

    def graph_ended(self, report: WorkerReport) -> None:
        """Take the last report of a graph's workers, however the graph ended."""

    def tidy(self) -> None:
        """Merge the files that the run wrote, once all is committed and counted."""

    # What all runs share

    def say(self, line: str) -> None:
        """Print a line for the user."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def run(self) -> S:
        """Bring the store up to date with the request, and return the summary.

        Raises UsageError (nothing was started) or RunFailed (what was committed stays; a rerun goes on).
        """
        with saying_outages(self.say):
            return self._run()

    def _run(self) -> S:
        """Do the steps of a run in their order."""
        try:
            self.prepare()
            chosen = " ".join(f"{name}={value}" for name, value in self.options.chosen().items())
            shown = f"configuration: {chosen or 'all defaults'}"
            self.console.print(shown, style="dim", markup=False, highlight=False, soft_wrap=True)
            self.store.make()
            with Claim(self.store, self.run_id, self.say, join=self.options.join) as claim:
                self.match()  # once more: another run may have written before the claim was made
                started = time.monotonic()
                todo = self.remaining()
                n_todo = len(todo)
                with Monitor(self.store, self.run_id, claim.tell) as self.monitor:
                    if n_todo:
                        self.process(todo)
                    else:
                        check_device(self.options, self.say)
                summary = replace(self.summarise(todo, time.monotonic() - started), log=self.monitor.log)
                if n_todo:
                    self.run_file.save(summary=summary.as_record())
                    self.tidy()
                return summary
        except OSError as error:  # a store failed; a fault of a single item becomes its error row
            raise RunFailed(root_cause(error)) from error

    def stream(self, items: T) -> None:
        """Run items through graphs and commit every shard; what is left is planned anew where the nodes change.

        Raises RunFailed where the graph or the store fails, nothing moves for ``options.stall_timeout`` seconds, or
        rows are missing.
        """
        while len(items):
            plan = self.plan(items)
            try:
                with heartbeats_of(tuple(plan.wording.stages)) as heartbeats:
                    return GraphRun(self, items, plan, heartbeats).run()
            except ClusterChanged as why:
                items = self.unfinished(items)
                if still_running():
                    raise RunFailed(f"{why}, but what ran before does not end; run the same command again") from None
                end_workers()
                left = f"{len(items)} {plan.wording.item}s are planned anew on"
                if isinstance(why, DiskFull):
                    self.without |= why.nodes
                    self.say(f"note: {why}. {left} the other nodes. {FREE_SPACE}")
                else:
                    self.say(f"note: {why}: {left} those that are there")
            except RunFailed:
                end_workers()  # they would keep room from the next run of this process
                raise


class GraphRun(Generic[T]):
    """One graph while it runs: it commits every shard as it is written, and looks at the workers meanwhile."""

    def __init__(self, driver: Driver[Any, T, Any], items: T, plan: Plan, heartbeats: ActorHandle) -> None:
        options = driver.options
        self._driver, self._items, self._plan, self._heartbeats = driver, items, plan, heartbeats
        self._progress = reporter(driver.console, len(items), options.log_interval, plan.wording)
        self._first_shard = driver.n_shards
        self._n_taken = 0  # items that came out of the graph
        self._growth = Growth(plan, options.max_gpus)

    def run(self) -> None:
        """Run the graph to its end. Raises RunFailed, also if rows are missing at the end, and ClusterChanged."""
        driver = self._driver
        self._look_at_nodes(WorkerReport())
        driver.say(f"starting workers: {self._plan.workers}")
        graph = driver.build(self._items, self._plan, self._heartbeats)
        with self._progress, Shards(graph, driver.options.flush_seconds) as shards:
            self._watchdog = Watchdog(
                self._heartbeats,
                driver.options.stall_timeout,
                self._plan,
                len(self._items),
                driver.available_resources,
            )
            self._looked_at = time.monotonic()
            try:
                self._drain(graph, shards)
            except (RunFailed, ClusterChanged, KeyboardInterrupt) as ending:
                if shards.unwritten and not isinstance(ending.__cause__, OSError):  # a failed store would fail again
                    self._write_rest(shards, ending)
                raise
            finally:
                report = self._watchdog.last()
                OUTAGES.take_reports(report.outages)
                driver.monitor.look(report, self._progress.at)
                self._look_at_nodes(report)
                driver.graph_ended(report)
                for worker in report.out_of_service:
                    driver.say(f"note: out of service: {worker}")

    def _write_rest(self, shards: Shards, ending: BaseException) -> None:
        """Write and commit what is done, in a part of the time that the last writes of ``ending`` have."""
        driver, item = self._driver, self._plan.wording.item
        driver.say(f"stopping: what is done is written first, in {LAST_WRITES_S:g} s at most")
        why = NO_ANSWER
        with suppress(OSError, ray.exceptions.RayError, RunFailed):
            for shard in shards.rest(seconds_left(ending) - _RECORD_S):
                if isinstance(ending, ClusterChanged):  # the run goes on
                    self._commit(shard)
                elif failure := write_last(ending, partial(self._commit, shard), _RECORD_S):
                    why = failure
                    break
        if n_left := self._n_taken - self._progress.at.done:
            ending.add_note(f"{n_left} {item}s that are done were not written. The next run does them again: {why}")

    def _drain(self, graph: RunGraph, shards: Shards) -> None:
        """Take what comes out of the graph, have it written, and commit it, until all is committed."""
        done, item = self._progress, self._plan.wording.item
        try:
            with Fetcher(graph.batches()) as batches:
                while not batches.ended or shards.finish():
                    self._look_when_due()
                    if not batches.ended and shards.has_room() and (batch := batches.next(TICK_S)) is not None:
                        shards.take(batch)
                        self._n_taken += batch.n_items
                        done.through(batch.n_items)
                    for shard in shards.written():
                        self._commit(shard)
        except (ray.exceptions.RayError, OSError) as error:
            why = (isinstance(error, ray.exceptions.RayError) and self._watchdog.failure()) or root_cause(error)
            of = f"{done.at.done} of {len(self._items)} {item}s"
            if full := self._full_disks(error):
                if self._driver.can_run_on(resources_without({**self._driver.without, **full})):
                    raise DiskFull(full) from error
                why += f"; {DiskFull(full)}, and no other node can go on. {FREE_SPACE}; then run the same command again"
            raise RunFailed(f"the run stopped after {of}: {why}") from error
        if missing := len(self._items) - done.at.done:
            raise RunFailed(f"{missing} of {len(self._items)} {item}s have no row; run the same command again")

    def _full_disks(self, error: Exception) -> dict[str, str]:
        """Return the nodes whose disks are full, which may be the reason for an error of Ray: id -> host and folder."""
        with suppress(Exception):  # of a cluster that does not answer: the error itself tells more
            if isinstance(error, ray.exceptions.RayError):
                return full_disks(self._driver.without, spilling_failed=is_out_of_disk(error))
        return {}

    def _commit(self, shard: Shard) -> None:
        """Commit a shard, and count its items as progress."""
        driver, number = self._driver, self._first_shard + shard.number
        driver.commit(number, shard.rows)
        driver.n_shards = max(driver.n_shards, number + 1)
        self._watchdog.moved()
        self._progress.grow(len(self._items))
        ok = pc.sum(pc.equal(shard.rows["status"], "ok")).as_py()
        self._progress.advance(ok, len(shard.rows) - ok)

    def _look_when_due(self) -> None:
        """Look at the workers at intervals, and raise where the run should end or be planned anew."""
        if time.monotonic() - self._looked_at < self._watchdog.every_s:
            return
        driver, progress = self._driver, self._progress
        self._watchdog.grow(len(self._items))
        report = self._watchdog.read()
        OUTAGES.take_reports(report.outages)
        progress.stages(report)
        driver.monitor.look(report, progress.at)
        self._look_at_nodes(report)
        if (why := driver.give_up(report)) is not None:
            raise RunFailed(why)
        self._watchdog.check()
        if (speed := progress.pace.speed()) is not None and progress.at.busy:
            self._growth.look(progress.at, speed, self._plan_again(speed.left))
        self._looked_at = time.monotonic()

    def _look_at_nodes(self, report: WorkerReport) -> None:
        """Tell which nodes have come and gone."""
        with suppress(Exception):  # a cluster that does not answer: the watchdog will tell
            self._driver.nodes.look(report, self._plan)

    def _plan_again(self, n_items: int) -> Plan | None:
        """Plan ``n_items`` for the cluster as it is now; None where it does not answer, or cannot be planned."""
        try:
            return self._driver.plan_again(n_items)
        except Exception:  # noqa: BLE001 - a cluster that does not answer has not grown
            return None
