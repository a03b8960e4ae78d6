"""Ending a run that does not move, with the name of the stage that holds it up, or that new nodes would make faster."""

from __future__ import annotations

import ctypes
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

from pipeline.errors import RunFailed, printable
from pipeline.runner.heartbeats import WorkerReport
from pipeline.runner.progress import Progress, Speed
from pipeline.runner.stages import Plan

T = TypeVar("T")

_LONGEST_LOOK_S = 10.0
# If nothing moves for so long and the cluster has shrunk, waiting does not help: Ray restarts workers of a lost node
# only where there is room, the remaining workers hold all of it, and what the lost ones had in hand waits for them.
SHRUNK_S = 30.0


class ClusterChanged(Exception):  # noqa: N818
    """An error: what is left must be planned anew for the nodes that are there now. Its text says why."""


class DiskFull(ClusterChanged):
    """The disks of some nodes take no more objects of Ray: node id -> host and folder."""

    def __init__(self, nodes: Mapping[str, str]) -> None:
        super().__init__(f"the disk is full on {', '.join(sorted(nodes.values()))}")
        self.nodes = nodes


@dataclass
class Watchdog:
    """The judge of a running graph that does not move.

    Args:
        heartbeats: the actor to which the workers report.
        timeout_s: seconds without movement after which the run fails.
        total: how many items there are, as far as they are known.
        available_resources: returns the resources of the nodes that the graph may use now.
    """

    heartbeats: ActorHandle
    timeout_s: float
    plan: Plan
    total: int
    available_resources: Callable[[], Mapping[str, float]] = ray.cluster_resources
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._had_room: bool | None = None  # at the first look
        self._report = WorkerReport()
        self._asked: ray.ObjectRef | None = None
        self._moved_at = self.clock()
        self.every_s = min(_LONGEST_LOOK_S, self.timeout_s / 10)

    def moved(self) -> None:
        """Record that something was committed."""
        self._moved_at = self.clock()

    def grow(self, total: int) -> None:
        """Record how many items are known; more than before count as movement."""
        if total != self.total:
            self.total = total
            self.moved()

    def read(self) -> WorkerReport:
        """Return the workers' report; one that shows movement is recorded. Without an answer it is the last one."""
        before, report = self._report.moves, self._read()
        if report.moves != before:
            self.moved()
        self._report = report
        return report

    def check(self) -> None:
        """Raise RunFailed if nothing has moved for ``timeout_s``, by the last report that was read.

        Raise ClusterChanged where nodes were lost, and the run could go on with the nodes that are left.
        """
        if self._had_room is None:
            self._had_room, _ = self._room()
        still_s = self.clock() - self._moved_at
        if SHRUNK_S < still_s <= self.timeout_s and self._had_room and self._shrunk():
            raise ClusterChanged("nodes were lost and nothing moves")
        if still_s > self.timeout_s:
            raise RunFailed(
                f"no {self.plan.wording.item} moved for {self.timeout_s:g} s: {self._verdict()}; or raise "
                "--stall-timeout"
            )

    def _room(self) -> tuple[bool, bool]:
        """Return whether all workers fit the cluster, and whether some of each stage do."""
        try:
            found = self.available_resources()
        except Exception:  # noqa: BLE001 - a cluster that does not answer: the timeout will tell
            return True, True
        cpus, gpus = found.get("CPU", 0.0), found.get("GPU", 0.0)
        return cpus >= self.plan.cpus and gpus >= self.plan.gpus, cpus > 0 and gpus >= min(1, self.plan.gpus)

    def _shrunk(self) -> bool:
        """Return whether the cluster no longer has room for all workers, but still for some."""
        all_fit, some_fit = self._room()
        return some_fit and not all_fit

    def failure(self) -> str | None:
        """Return the reason that a worker reported for ending the run, or None."""
        return self.last().failure

    def last(self) -> WorkerReport:
        """Ask the heartbeats once more, and return their latest answer."""
        self._asked = None  # so that the answer is not an older one that is under way
        return self._read()

    def _read(self) -> WorkerReport:
        """Return the latest answer of the heartbeats. One question is under way at a time."""
        try:
            self._asked = self._asked or self.heartbeats.read.remote()
            report: WorkerReport = ray.get(self._asked, timeout=self.every_s)
        except ray.exceptions.GetTimeoutError:
            return self._report
        except ray.exceptions.RayError:
            report = self._report
        self._asked = None
        return report

    def _verdict(self) -> str:
        """Name the last stage that holds something, else the last that takes nothing though it could, and a remedy."""
        item = self.plan.wording.item
        for stage, words in reversed(list(self.plan.wording.stages.items())):
            held = self._report.inside.get(stage)
            if held:
                return f"{stage} holds {len(held)} ({printable(held[0])}) and does not move; {words.remedy}"
        left = {"": self.total, **self._report.left}  # "" stands for the manifest, before the first stage
        for before, stage in reversed(list(pairwise(left))):
            waiting = left[before] - left[stage]
            if waiting >= self.plan.collected(stage, waits=left[before] < self.total):
                return f"{stage} takes none of {waiting} waiting {item}s; scheduling: {_describe_resources(self.plan)}"
        return f"scheduling: no worker holds a {item}; {_describe_resources(self.plan)}"


class Growth:
    """The judge of nodes that joined: whether what is left is done sooner if its workers end and more start there.

    Ray Data starts no more workers than a graph was built with, so that these need a new graph. It costs the start of
    all workers, and what an encoder has not got through yet is decoded again.

    Args:
        plan: that of the workers that run.
        max_gpus: how many GPUs an autoscaling cluster is asked for, once all workers run; None for no more.
    """

    def __init__(self, plan: Plan, max_gpus: int | None = None) -> None:
        self._plan = plan
        self._more = max(0, int((max_gpus or 0) - plan.gpus)) if plan.gpus else 0
        self._seen: Mapping[str, int] | None = None
        self._demand: list[ray.ObjectRef] = []

    def look(self, at: Progress, speed: Speed, today: Plan | None) -> None:
        """Raise ClusterChanged if ``today``'s plan of what is left saves more than twice what it costs.

        ``today`` is None where what is left cannot be planned now. Nodes must have stopped joining.
        """
        if self._more and not self._demand:
            # Tasks that wait for a GPU are a demand that ends with this process, however it ends.
            waits = ray.remote(_take_gpu).options(num_cpus=0, num_gpus=1)
            self._demand = [waits.remote() for _ in range(self._more)]
        pools = self._plan.pools if today is None else today.pools
        settled, self._seen = pools == self._seen, pools
        if not settled or all(pools[stage] <= workers for stage, workers in self._plan.pools.items()):
            return
        queued = sum(list(at.waiting.values())[1:-1])  # the first stage does them again
        at_best_s = self._left_s(at, speed, pools)
        cost_s = speed.start_s + self._left_s(at, speed, pools, queued) - at_best_s
        saved_s = self._left_s(at, speed, self._plan.pools) - at_best_s
        if saved_s > 2 * cost_s:
            raise ClusterChanged(f"nodes joined, which saves about {saved_s - cost_s:.0f} s")

    def _left_s(self, at: Progress, speed: Speed, pools: Mapping[str, int], again: int = 0) -> float:
        """Estimate the seconds until the slowest stage is through, with these pools.

        A stage with the pool of today does as many items a second as all workers together, divided by how busy it is
        beside the busiest stage. ``again`` items that the first stage has done are its work once more.
        """
        most, items, left_s = max(at.busy.values(), default=0.0), again, 0.0
        for number, (stage, waiting) in enumerate(at.waiting.items()):
            items += waiting - (again if number == 1 else 0)  # they are in the queues of the later stages already
            if share := at.busy.get(stage):
                slower = share / most * self._plan.pools[stage] / pools[stage]
                left_s = max(left_s, items / speed.rate * slower)
        return left_s


def _take_gpu() -> None:
    """Take a GPU for a moment: a demand as long as there is none."""


def _describe_resources(plan: Plan) -> str:
    """Describe the cluster's resources now, beside those that the workers ask for."""
    try:
        offer = ray.cluster_resources()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not why the run failed
        return f"the cluster does not answer: {printable(str(error))}"
    return (
        f"the cluster offers {offer.get('CPU', 0.0):g} CPUs and {offer.get('GPU', 0.0):g} GPUs, the plan needs "
        f"{plan.cpus:g} and {plan.gpus:g}: look at its nodes, or lower {plan.wording.to_lower}"
    )


class _Abandoned(BaseException):
    """The exception that ends the thread of a ``Fetcher`` from outside."""


class Fetcher(Generic[T]):
    """The thread that takes items from an iterator that may block for ever, at most one ahead.

    The iterator's exceptions are raised by ``next``. Leaving the ``with`` block interrupts the iterator where it is, as
    Ctrl-C would.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self.ended = False
        self._items = items
        self._ready: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fetch, name=_thread_of_graph(), daemon=True)
        self._thread.start()

    def __enter__(self) -> Fetcher[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        _interrupt(self._thread)

    def next(self, timeout_s: float) -> T | None:
        """Return the next item; None if nothing came in ``timeout_s`` seconds, or nothing comes any more (``ended``).

        Raises what the iterator raises.
        """
        try:
            item = self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        self.ended = item is None
        return None if item is None else item[0]

    def _fetch(self) -> None:
        """Take items and hand them over until the end, an error or an interruption; runs in the thread."""
        try:
            try:
                for item in self._items:
                    self._hand_over((item,))
            finally:
                if isinstance(self._items, Generator):
                    self._items.close()
            self._hand_over(None)
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - it is the main thread's
            with suppress(_Abandoned):  # the main thread has stopped waiting
                self._hand_over(error)

    def _hand_over(self, item: tuple[T] | BaseException | None) -> None:
        """Put an item, an error or the end where ``next`` finds it. Raise _Abandoned if the fetcher is closed."""
        while not self._closed.is_set():
            try:
                return self._ready.put(item, timeout=1)
            except queue.Full:
                continue
        raise _Abandoned


def _thread_of_graph() -> str:
    """Return the name of the thread that runs the iterators of the current thread's run."""
    return f"graph of {threading.get_ident()}"


def still_running() -> bool:
    """Return whether an iterator of this thread could not be interrupted, because it blocks outside Python code."""
    return any(thread.name == _thread_of_graph() and thread.is_alive() for thread in threading.enumerate())


def _interrupt(thread: threading.Thread) -> None:
    """Raise an exception in another thread, and wait for its end.

    Nothing simpler stops a waiting iteration: Ray Data has no public way to shut its executor down, a thread cannot be
    cancelled, and shutting Ray down could end a head of another owner. Ray waits in Python code, in short sleeps, and
    shuts the execution down at an exception of any kind, as it does for Ctrl-C.
    """
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Abandoned))
        thread.join(_LONGEST_LOOK_S)
