"""Detection of graphs that stall or should move to other nodes, and the thread that iterates over a graph."""

from __future__ import annotations

import ctypes
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import ray
from ray.actor import ActorHandle

from pipeline.errors import RunFailed, make_printable
from pipeline.runner.progress import Progress, Speed
from pipeline.runner.stages import Plan
from pipeline.runner.worker_reports import WorkerReport

T = TypeVar("T")

_MAX_LOOK_S = 10.0
_END_S = 10.0  # for an interrupted graph
# After this long without movement on a smaller cluster, waiting does not help: Ray restarts the workers of a lost node
# only on free resources, but the remaining workers hold all of them, and the lost workers' items wait.
SHRUNK_S = 30.0


class ClusterChanged(Exception):  # noqa: N818
    """The unfinished items must be rescheduled on the current nodes. The message is the reason."""


class DiskFull(ClusterChanged):
    """The disks of some nodes are too full for Ray to write more objects.

    Attributes:
        nodes: node id -> a text with host and folder.
    """

    def __init__(self, nodes: Mapping[str, str]) -> None:
        super().__init__(f"the disk is full on {', '.join(sorted(nodes.values()))}")
        self.nodes = nodes


@dataclass
class Watchdog:
    """The stall detector of one running graph. The caller reads reports with ``read`` and then calls ``check``.

    Attributes:
        timeout_s: seconds without movement after which the run fails.
        total: the number of items known so far.
        available_resources: returns the resources of the nodes that the graph may use now.
        report: the last report that ``read`` returned; empty before the first.
        every_s: seconds between two reads.
    """

    heartbeats: ActorHandle
    timeout_s: float
    plan: Plan
    total: int
    available_resources: Callable[[], Mapping[str, float]] = ray.cluster_resources
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        """Start the stall timer, and record whether all workers fit the cluster now."""
        self._did_fit, _ = self._check_fit()
        self.report = WorkerReport()
        self._pending_answer: ray.ObjectRef | None = None
        self._movement_at = self.clock()
        self.every_s = min(_MAX_LOOK_S, self.timeout_s / 10)

    @property
    def still_s(self) -> float:
        """The seconds since the last movement."""
        return self.clock() - self._movement_at

    def record_movement(self) -> None:
        """Reset the stall timer."""
        self._movement_at = self.clock()

    def grow(self, total: int) -> None:
        """Set the number of known items. A different number resets the stall timer."""
        if total != self.total:
            self.total = total
            self.record_movement()

    def read(self) -> WorkerReport:
        """Return the workers' current report, keep it in ``report``, and reset the stall timer if items have moved.

        If the actor has crashed or does not answer within ``every_s`` seconds, the previous report is returned.
        """
        before = self.report.n_moves
        report = self._read(self.every_s)
        if report.n_moves != before:
            self.record_movement()
        self.report = report
        return report

    def check(self) -> None:
        """Raise an error if nothing has moved for too long, by the reports that ``read`` has returned.

        Raises:
            ClusterChanged: nothing has moved for SHRUNK_S, but less than ``timeout_s``; all workers fitted the cluster
                when the graph started and do not now, and the remaining nodes can still run every stage.
            RunFailed: nothing has moved for ``timeout_s``; the message names the stalled stage and a remedy.
        """
        still_s = self.still_s
        if SHRUNK_S < still_s <= self.timeout_s and self._did_fit:
            all_fit, some_fit = self._check_fit()
            if some_fit and not all_fit:
                raise ClusterChanged("nodes were lost and nothing moves")
        if still_s > self.timeout_s:
            raise RunFailed(
                f"no {self.plan.wording.item} moved for {self.timeout_s:g} s: {self._describe_stall()}; or raise "
                "--stall-timeout"
            )

    def _check_fit(self) -> tuple[bool, bool]:
        """Compare the plan with the resources that are available now.

        Returns:
            Two booleans: all workers fit; some workers of each stage fit, as there are a CPU and, if the plan reserves
            GPUs, one GPU (or the share that all workers reserve). Both are True if the cluster does not answer.
        """
        try:
            resources = self.available_resources()
        except Exception:  # noqa: BLE001 - a cluster that does not answer: the timeout will tell
            return True, True
        cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
        return cpus >= self.plan.cpus and gpus >= self.plan.gpus, cpus > 0 and gpus >= min(1, self.plan.gpus)

    def read_latest(self, within_s: float) -> WorkerReport:
        """Request a new report and return it, without changing ``report`` or the stall timer.

        Without an answer within ``within_s`` seconds, ``report`` is returned.
        """
        self._pending_answer = None  # so that the answer is not an older one that is under way
        return self._read(within_s)

    def _read(self, within_s: float) -> WorkerReport:
        """Return an answer of the heartbeats actor; ``report`` if it has crashed or does not answer in time.

        After ``within_s`` seconds without an answer, the request stays pending, and a later call returns its answer.
        """
        try:
            self._pending_answer = self._pending_answer or self.heartbeats.read.remote()
            report: WorkerReport = ray.get(self._pending_answer, timeout=within_s)
        except ray.exceptions.GetTimeoutError:
            return self.report
        except ray.exceptions.RayError:
            report = self.report
        self._pending_answer = None
        return report

    def _describe_stall(self) -> str:
        """Return a text that names the stalled stage and a remedy, or only compares the cluster with the plan.

        The stalled stage is the last one with items in hand, otherwise the last one that takes none of its waiting
        items.
        """
        item = self.plan.wording.item
        for stage, words in reversed(list(self.plan.wording.stages.items())):
            items = self.report.inside.get(stage)
            if items:
                return f"{stage} holds {len(items)} ({make_printable(items[0])}) and does not move; {words.remedy}"
        n_left = {"": self.total, **self.report.n_passed_on}  # "" stands for the manifest, before the first stage
        for before, stage in reversed(list(pairwise(n_left))):
            waiting = n_left[before] - n_left[stage]
            if waiting >= self.plan.min_items_to_start(stage, more_expected=n_left[before] < self.total):
                return f"{stage} takes none of {waiting} waiting {item}s; scheduling: {_describe_resources(self.plan)}"
        return f"scheduling: no worker holds a {item}; {_describe_resources(self.plan)}"


class Growth:
    """The decision whether to restart a graph because nodes have joined.

    Ray Data starts no more workers than a graph was built with. A new graph has to start all workers and to compute
    items between two stages again.
    """

    def __init__(self, plan: Plan, max_gpus: int | None = None) -> None:
        """Prepare the decision for a graph with the running workers of ``plan``.

        Args:
            max_gpus: up to this number of GPUs an autoscaler is asked for; None, or a plan without GPUs, asks for none.
        """
        self._plan = plan
        self._more = max(0, int((max_gpus or 0) - plan.gpus)) if plan.gpus else 0
        self._last_pools: Mapping[str, int] | None = None
        self._demand: list[ray.ObjectRef] = []

    def look(self, at: Progress, speed: Speed, today: Plan | None) -> None:
        """Raise ClusterChanged if restarting the graph on the current nodes saves over twice the time that it costs.

        The first call also submits a pending Ray task for each GPU that the plan lacks up to ``max_gpus``, as a demand
        to an autoscaler.

        Args:
            today: a plan of the unfinished items on the current nodes; None if they cannot be planned now.

        Raises:
            ClusterChanged: ``today`` has more workers for some stage, the same numbers of workers as at the last call
                (nodes may still be joining otherwise), and saves enough time.
        """
        if self._more and not self._demand:
            # Tasks that wait for a GPU are a demand that ends with this process, however it ends.
            waits = ray.remote(_occupy_gpu).options(num_cpus=0, num_gpus=1)
            self._demand = [waits.remote() for _ in range(self._more)]
        pools = self._plan.pools if today is None else today.pools
        is_settled, self._last_pools = pools == self._last_pools, pools
        if not is_settled or all(pools[stage] <= workers for stage, workers in self._plan.pools.items()):
            return
        queued = sum(list(at.waiting.values())[1:-1])  # the first stage does them again
        at_best_s = self._estimate_s(at, speed, pools)
        cost_s = speed.start_s + self._estimate_s(at, speed, pools, queued) - at_best_s
        saved_s = self._estimate_s(at, speed, self._plan.pools) - at_best_s
        if saved_s > 2 * cost_s:
            raise ClusterChanged(f"nodes joined, which saves about {saved_s - cost_s:.0f} s")

    def _estimate_s(self, at: Progress, speed: Speed, pools: Mapping[str, int], n_redone: int = 0) -> float:
        """Estimate the seconds until the slowest stage has finished, with ``pools`` (stage -> number of workers).

        The busiest stage sets the current rate of the run; a stage that is half as busy could do twice that rate.
        Stages whose busy share is unknown or 0 are ignored. ``n_redone`` items, which now wait for later stages, are
        processed again by the first stage.
        """
        most = max(at.busy.values(), default=0.0)
        items = n_redone
        left_s = 0.0
        for number, (stage, waiting) in enumerate(at.waiting.items()):
            items += waiting - (n_redone if number == 1 else 0)  # already counted in the queues of the later stages
            if share := at.busy.get(stage):
                slower = share / most * self._plan.pools[stage] / pools[stage]
                left_s = max(left_s, items / speed.rate * slower)
        return left_s


def _occupy_gpu() -> None:
    """Do nothing. While no GPU is free, the pending task asks the autoscaler for one."""


def _describe_resources(plan: Plan) -> str:
    """Return a text that compares the cluster's resources with the plan's, or says that the cluster does not answer."""
    try:
        offer = ray.cluster_resources()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not why the run failed
        return f"the cluster does not answer: {make_printable(str(error))}"
    return (
        f"the cluster offers {offer.get('CPU', 0.0):g} CPUs and {offer.get('GPU', 0.0):g} GPUs, the plan needs "
        f"{plan.cpus:g} and {plan.gpus:g}: look at its nodes, or lower {plan.wording.to_lower}"
    )


class _Abandoned(BaseException):
    """Raised in the thread of a ``Fetcher``, from outside, to end it."""


class Fetcher(Generic[T]):
    """A thread that iterates over an iterator that may block forever, up to two items ahead of ``next``.

    Leaving the ``with`` block interrupts the iterator. ``is_at_end`` is True once ``next`` has reached the end.
    """

    def __init__(self, items: Iterator[T]) -> None:
        """Start the thread, which fetches the first item at once."""
        self.is_at_end = False
        self._items = items
        self._ready: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(1)
        self._close_event = threading.Event()
        self._may_interrupt = True  # guarded by the lock; False once the thread ends by itself
        self._end_by = math.inf  # when ``close`` stops waiting
        self._interrupt_lock = threading.Lock()
        self._thread = threading.Thread(target=self._fetch, name=_name_graph_thread(), daemon=True)
        self._thread.start()

    def __enter__(self) -> Fetcher[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Interrupt the iterator by raising _Abandoned in its thread, and wait up to _END_S seconds for the thread.

        Further calls share these seconds. A thread that still runs afterwards is left behind. Ray Data waits in Python
        code, and shuts its execution down at any exception.
        """
        with self._interrupt_lock:
            if self._may_interrupt and self._thread.ident is not None:
                self._may_interrupt = False
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(_Abandoned)
                )
        # Not earlier: the thread would raise _Abandoned by itself, and the other one would find it behind its handler.
        self._close_event.set()
        with suppress(queue.Empty):
            self._ready.get_nowait()  # a thread that waits for room goes on at once
        self._end_by = min(self._end_by, time.monotonic() + _END_S)
        self._thread.join(max(0.0, self._end_by - time.monotonic()))

    def next(self, timeout_s: float) -> T | None:
        """Return the next item, or None after ``timeout_s`` seconds without one or at the end (``is_at_end``).

        An exception of the iterator is raised here.
        """
        try:
            item = self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        self.is_at_end = item is None
        return None if item is None else item[0]

    def _fetch(self) -> None:
        """Hand over the items, then the end or the iterator's exception, unless ``close`` interrupts."""
        try:
            try:
                self._hand_items_over()
            except _Abandoned:
                raise
            except BaseException as error:  # noqa: BLE001 - it is the main thread's
                self._hand_over(error)
            with self._interrupt_lock:  # an exception that came behind the handler below would reach the user
                self._may_interrupt = False
        except _Abandoned:
            pass

    def _hand_items_over(self) -> None:
        """Hand over each item and then the end; close a generator, however this ends."""
        try:
            for item in self._items:
                self._hand_over((item,))
        finally:
            if isinstance(self._items, Generator):
                self._items.close()
        self._hand_over(None)

    def _hand_over(self, item: tuple[T] | BaseException | None) -> None:
        """Wait until there is room for an item, an error, or the end (None), and put it where ``next`` finds it.

        Raises:
            _Abandoned: ``close`` was called.
        """
        while not self._close_event.is_set():
            try:
                return self._ready.put(item, timeout=1)
            except queue.Full:
                continue
        raise _Abandoned


def _name_graph_thread() -> str:
    """Return the name of the threads that iterate over graphs for the current thread's run."""
    return f"graph of {threading.get_ident()}"


def is_still_running(within_s: float) -> bool:
    """Return True if a ``Fetcher`` thread of the current thread's run is alive after ``within_s`` seconds.

    Such a thread blocks outside of Python code. Each thread is waited for in turn.
    """
    threads = [thread for thread in threading.enumerate() if thread.name == _name_graph_thread()]
    for thread in threads:
        thread.join(within_s)
    return any(thread.is_alive() for thread in threads)
