"""The worker's side of the heartbeats: its items in hand, and its exit after a GPU fault."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import ray
from ray.actor import ActorHandle

from gstep.errors import is_gpu_broken, is_out_of_memory
from pipeline.errors import printable
from pipeline.runner.cluster.disks import RayDisk
from pipeline.runner.worker_reports import REPORT_S, SELDOM_S, Crash, ProgressDelta, Worker
from pipeline.storage.outages import OUTAGES, Outage

_ANSWER_S = 10.0
POISON = 2  # crashes with one item in hand after which no other process tries the item
_LOOK_S = 1.0
_SOON_S, _LATER_S = 4.0, 60.0  # a worker asks for its report interval soon, while workers start, then seldom
_IDLE_S = 10.0  # seconds between the reports of an idle worker


class WorkerGivenUp(RuntimeError):  # noqa: N818
    """The processes of this worker crashed too often; the run ends."""


class ItemsInHand:
    """The items that a worker has in hand; ``release`` passes them on in order."""

    def __init__(self, items: Sequence[str], count: Callable[[ProgressDelta], None]) -> None:
        self.items = list(items)
        self._count = count

    def release(
        self, is_failure: bool | None = None, *, is_result: bool = True, n: int = 1, fault: str | None = None
    ) -> None:
        """Report the next ``n`` items as passed on to the next stage; they leave ``items``.

        Args:
            is_failure: whether they failed in a way that another node might avoid; None if this worker did not try
                them. A failure is reported at once, since it may exclude the worker.
            is_result: whether they go on as results of the stage, not as failures.
            fault: the error class of an item that failed here.
        """
        del self.items[:n]
        n_tried = n * (is_failure is not None)
        n_wrong = n * bool(is_failure)
        faults = () if fault is None else (fault,)
        self._count(
            ProgressDelta(n, n, n_ok=n_tried - n_wrong, n_failed=n_wrong, n_results=n * is_result, faults=faults)
        )


class Heartbeat:
    """The reporter of one worker to the actor. It travels to the worker; without an actor it does nothing.

    A worker may have several items in hand, also in several threads. It reports when it takes items, when it has none
    left, and once a second in between (less often among thousands of workers): a report for each of many short items
    would be much of its work.

    Args:
        suspects: whether an item may kill the process: items are then reported before the work on them starts, not
            only once a second.
    """

    of_process: ClassVar[Heartbeat | None] = None  # in the process of a run's worker, once it has started

    def __init__(self, stage: str, heartbeats: ActorHandle | None = None, *, suspects: bool = True) -> None:
        """Set the counts to zero; nothing is reported before ``start``."""
        self._stage = stage
        self._heartbeats = heartbeats
        self._suspects = suspects
        self._reports_by_itself = False
        self._delta = ProgressDelta()  # counts since the last report
        self._counted_until: float | None = None  # the time until which up_s and busy_s are counted
        self._last_failed = False
        self.has_crashed_before = False
        self._in_hand: list[ItemsInHand] = []
        self._last_report: list[str] = []  # the items in hand of the last report
        self._last_outages: tuple[Outage, ...] = ()
        self._full_disk = self._last_full_disk = ""  # of this node, measured now and then
        self._reporting = threading.RLock()  # reports must be sent in the order of events

    def start(self) -> None:
        """Report that this process of the worker starts. Raises WorkerGivenUp if too many crashed before it.

        Sets ``has_crashed_before``. In a Ray actor it also starts the thread that reports, and has the process end at
        exit without waiting for Ray.
        """
        if self._heartbeats is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id():
            # If the cluster is gone, Ray's C++ core may wait for itself for ever once Python has ended
            # (CoreWorkerProcess::HandleAtExit), and nobody would end such a process.
            atexit.register(os._exit, 0)
            self._reports_by_itself, Heartbeat.of_process = True, self
            threading.Thread(target=self._report_regularly, name="heartbeat", daemon=True).start()
        n_crashed = self._ask_about_worker("start", otherwise=0)
        if n_crashed is None:
            raise WorkerGivenUp(f"the processes of this {self._stage} worker crash again and again")
        self.has_crashed_before = n_crashed > 0
        self._counted_until = time.monotonic()

    @property
    def ends_at_once(self) -> bool:
        """True in an actor of a run: its process ends without the exit handlers registered before ``start``."""
        return self._reports_by_itself

    def wait_while_excluded(self) -> None:
        """Block while this worker is excluded. The actor is asked only after a failed item."""
        while self._last_failed and self._ask_about_worker("is_excluded"):
            time.sleep(_LOOK_S)

    def find_crashes(self, item: str) -> list[Crash]:
        """Return each crash of this stage's processes with ``item`` in hand.

        Call it with the item in hand: the actor has that report by then, so a crash of this process would count. A
        worker without crashes does not ask, since Ray retries an item on the worker that it killed.
        """
        return (self._ask("find_crashes", self._stage, item) or []) if self.has_crashed_before else []

    def holding(self, *ids: str) -> AbstractContextManager[ItemsInHand]:
        """Report these items as in hand inside the context; call ``release`` on the yielded object for each."""
        return self._report_items(ids, ProgressDelta(n_moves=len(ids)))

    def busy(self, work: str) -> AbstractContextManager[object]:
        """Report ``work`` as in hand inside the context: work that is no item and does not count as progress.

        Items in hand stay reported, since the last report before a crash may be lost.
        """
        return self._report_items((work,), ProgressDelta())

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Report the model as being loaded inside the context; such time counts neither as work nor as idle."""
        self._counted_until = None
        with self.busy("the model, being loaded"):
            yield
        self._counted_until = time.monotonic()

    @contextmanager
    def _report_items(self, items: Sequence[str], delta: ProgressDelta) -> Iterator[ItemsInHand]:
        """Report items as in hand inside the context, and as gone after it, however it ends.

        ``delta`` is added to the counts. Without ``suspects`` the thread reports them at its next turn.
        """
        items_in_hand = ItemsInHand(items, self._count)
        with self._reporting:
            self._count_time()
            self._in_hand.insert(0, items_in_hand)
            self._delta = self._delta.plus(delta)
            if self._suspects or not self._reports_by_itself:
                self._report()
        if self._suspects and self.has_crashed_before:
            # A process that ends at once takes its last reports with it, and an item of an older report gets the blame.
            # That happens once at most: after a crash the work waits until the actor has the report.
            self._ask("every_s")
        try:
            yield items_in_hand
        finally:
            with self._reporting:
                self._count_time()
                self._in_hand.remove(items_in_hand)
                # Ray Data may end an idle worker before its next report.
                if not self._in_hand or not self._reports_by_itself:
                    self._report()

    def _count(self, delta: ProgressDelta) -> None:
        """Add to the counts of the next report; a failure is reported at once."""
        with self._reporting:
            self._delta = self._delta.plus(delta)
            if delta.n_ok or delta.n_failed:
                self._last_failed = bool(delta.n_failed)
            if delta.n_failed:
                self._report()

    def _report_regularly(self) -> None:
        """Report changes once a second, or at the actor's interval, and idleness seldom; runs in a thread for ever."""
        every_s = REPORT_S
        asked_at = time.monotonic()
        ask_s = _SOON_S
        while True:
            time.sleep(every_s)
            self._full_disk = RayDisk.describe_full()
            if time.monotonic() - asked_at >= ask_s:  # an actor that does not answer has too much to do, or is gone
                every_s = self._ask("every_s", otherwise=max(every_s, min(SELDOM_S, 2 * every_s)))
                asked_at, ask_s = time.monotonic(), min(_LATER_S, 2 * ask_s)
            with self._reporting:
                self._count_time()
                idle = (
                    self._delta._replace(up_s=0.0) == ProgressDelta() and self._list_held_items() == self._last_report
                )
                idle &= (OUTAGES.report(), self._full_disk) == (self._last_outages, self._last_full_disk)
                if not idle or self._delta.up_s >= _IDLE_S:
                    self._report()

    def _count_time(self) -> None:
        """Add the time since the last call to the counts of the next report; none while the model loads."""
        if (since := self._counted_until) is not None:
            self._counted_until = time.monotonic()
            up_s = self._counted_until - since
            self._delta = self._delta.plus(ProgressDelta(up_s=up_s, busy_s=up_s if self._in_hand else 0.0))

    def _list_held_items(self) -> list[str]:
        return [item for holding in self._in_hand for item in holding.items]

    def fail(self, why: str) -> None:
        """Report the reason why this worker ends the run. Call it before raising: Ray buries errors in its own text."""
        self._ask("fail", why)  # if this is lost, the run ends with Ray's own error

    def end(self, reason: str) -> None:
        """Report why this process ends itself: the reason of a crash. Waits until the actor has it, 10 s at most."""
        self._ask("end", self._me, printable(reason))

    def _ask_about_worker(self, method: str, otherwise: object = None) -> Any:
        """Call a method of the actor about this worker, as ``_ask``."""
        if self._heartbeats is None:  # asking Ray for the name of this worker would start Ray
            return otherwise
        return self._ask(method, self._stage, self._me, otherwise=otherwise)

    def _ask(self, method: str, *arguments: object, otherwise: object = None) -> Any:
        """Call a method of the actor and return its answer, or ``otherwise`` without an answer in 10 s."""
        if self._heartbeats is None:
            return otherwise
        try:
            return ray.get(getattr(self._heartbeats, method).remote(*arguments), timeout=_ANSWER_S)
        except Exception:  # noqa: BLE001 - as in _report
            return otherwise

    def _report(self) -> None:
        """Send the items in hand and the counts to the actor, without waiting for it, and set the counts to zero.

        If the actor is dead or too busy, the counts are kept for the next report.
        """
        if self._heartbeats is None:
            return
        items = self._list_held_items()
        outages = OUTAGES.report()
        with suppress(Exception):  # a dead actor or a full backlog must not fail an item
            self._heartbeats.state.remote(self._stage, self._me, items, self._delta, outages, self._full_disk)
            self._delta = ProgressDelta()
            self._last_report = items
            self._last_outages, self._last_full_disk = outages, self._full_disk

    @cached_property
    def _me(self) -> Worker:
        """The worker to which this process belongs."""
        context = ray.get_runtime_context()
        name = str(context.get_actor_id() or context.get_task_id())
        return Worker(name, socket.gethostname(), context.get_node_id(), os.getpid())


def exit_after_gpu_fault(item: str, error: Exception) -> None:
    """End this process if ``error`` broke its CUDA context, which would fail all later work too; else return.

    A small operation tests the GPU: Triton, cuDNN and drivers have words of their own for a broken context. cuBLAS says
    "CUDA error" if it only has too little memory. Without a CUDA context in this process the error's text decides.
    """
    if is_out_of_memory(error):
        return
    import torch  # noqa: PLC0415 - decoders do without

    has_context: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_gpu_broken() if has_context else "CUDA error" in str(error):
        give_up_process(item, error)


def give_up_process(item: str, error: Exception) -> NoReturn:
    """End this process at once with exit code 70; ``item`` (a video, a question) is in hand.

    The heartbeats keep the error. Ray starts another process, which asks them for the crashes with ``item`` in hand.
    """
    print(f"{item}: {error}", file=sys.stderr, flush=True)
    if Heartbeat.of_process is not None:
        Heartbeat.of_process.end(str(error))
    os._exit(70)
