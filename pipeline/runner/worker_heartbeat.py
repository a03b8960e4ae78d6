"""The worker's side of the heartbeats: it reports the items in hand, and ends its process after a GPU fault."""

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
from pipeline.errors import make_printable
from pipeline.runner.cluster.disks import RayDisk
from pipeline.runner.worker_reports import REPORT_S, SELDOM_S, Crash, ProgressDelta, Worker
from pipeline.storage.outages import OUTAGES, Outage

_ANSWER_S = 10.0
POISON = 2  # after this many crashes with an item in hand, no other process tries the item
_LOOK_S = 1.0
_SOON_S, _LATER_S = 4.0, 60.0  # a worker asks for its report interval often while workers start, later seldom
_IDLE_S = 10.0  # seconds between the reports of an idle worker


class WorkerGivenUp(RuntimeError):  # noqa: N818
    """The processes of this worker have crashed too often, so the run ends."""


class ItemsInHand:
    """The items that a worker has in hand (``Heartbeat.hold_items``); ``release`` passes them on in order.

    Attributes:
        items: the ids of the items that are still in hand.
    """

    def __init__(self, items: Sequence[str], count: Callable[[ProgressDelta], None]) -> None:
        self.items = list(items)
        self._count = count

    def release(
        self, is_failure: bool | None = None, *, is_result: bool = True, n: int = 1, fault: str | None = None
    ) -> None:
        """Remove the next ``n`` items from ``items``, and count them as passed on to the next stage.

        Args:
            is_failure: whether they failed in a way that another node might avoid; None if this worker did not try
                them. A failure is reported at once, since it may exclude the worker.
            is_result: whether they go on as results of the stage, not as failures.
            fault: the error class if an item failed here.
        """
        del self.items[:n]
        n_tried = n * (is_failure is not None)
        n_wrong = n * bool(is_failure)
        faults = () if fault is None else (fault,)
        self._count(
            ProgressDelta(n, n, n_ok=n_tried - n_wrong, n_failed=n_wrong, n_results=n * is_result, faults=faults)
        )


class Heartbeat:
    """The reporter of one worker to the heartbeats actor, pickled to the worker. Without an actor it does nothing.

    It reports when the worker takes items, when it has none left, and once a second in between (less often among over
    2000 workers). A worker may have several items in hand, also in several threads.

    Args:
        suspects: whether an item may kill the process. Items are then reported before the work on them.

    Attributes:
        of_process: the heartbeat of this process; None until an actor's heartbeat has started.
        has_crashed_before: whether earlier processes of this worker have crashed; set by ``start``.
    """

    of_process: ClassVar[Heartbeat | None] = None  # in the process of a run's worker, once it has started

    def __init__(self, stage: str, heartbeats: ActorHandle | None = None, *, suspects: bool = True) -> None:
        """Set the counts to zero. Nothing is reported before ``start``."""
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
        self._full_disk = self._last_full_disk = ""  # of this node; measured before each report
        self._reporting = threading.RLock()  # reports must be sent in the order of events

    def start(self) -> None:
        """Report that a process of this worker starts, and set ``has_crashed_before``.

        In a Ray actor this also sets ``of_process``, starts the thread that reports, and registers an exit handler that
        ends the process without waiting for Ray. If the heartbeats actor does not answer, the process counts as the
        first.

        Raises:
            WorkerGivenUp: more than MAX_CRASHES processes of this worker have crashed within CRASHES_S seconds.
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
        """True in an actor of a run: its process ends without exit handlers registered before ``start``."""
        return self._reports_by_itself

    def wait_while_excluded(self) -> None:
        """Block while this worker is excluded. The actor is asked, once a second, only after a failed item."""
        while self._last_failed and self._ask_about_worker("is_excluded"):
            time.sleep(_LOOK_S)

    def find_crashes(self, item: str) -> list[Crash]:
        """Return the crashes of this stage's processes with ``item`` in hand; [] if the actor does not answer.

        Call it with the item in hand, so that a crash of this process would count. Without earlier crashes of this
        worker the result is [].
        """
        return (self._ask("find_crashes", self._stage, item) or []) if self.has_crashed_before else []

    def hold_items(self, *ids: str) -> AbstractContextManager[ItemsInHand]:
        """Return a context in which these items are reported as in hand; the caller calls ``release`` for each item."""
        return self._report_items(ids, ProgressDelta(n_moves=len(ids)))

    def busy(self, work: str) -> AbstractContextManager[object]:
        """Return a context in which ``work``, which is not an item, is reported as in hand, but not as movement."""
        return self._report_items((work,), ProgressDelta())

    @contextmanager
    def report_loading(self) -> Iterator[None]:
        """Report inside the context that the model is being loaded. This time counts neither as busy nor as idle."""
        self._counted_until = None
        with self.busy("the model, being loaded"):
            yield
        self._counted_until = time.monotonic()

    @contextmanager
    def _report_items(self, items: Sequence[str], delta: ProgressDelta) -> Iterator[ItemsInHand]:
        """Report items as in hand inside the context, and as gone after it, however it ends.

        If ``suspects`` is False, the thread reports them at its next turn. After an earlier crash of a suspect worker,
        the context starts once the actor has answered or 10 s have passed. ``delta`` is added to the next report.
        """
        items_in_hand = ItemsInHand(items, self._count)
        with self._reporting:
            self._count_time()
            self._in_hand.insert(0, items_in_hand)
            self._delta = self._delta.add_delta(delta)
            if self._suspects or not self._reports_by_itself:
                self._report()
        if self._suspects and self.has_crashed_before:
            # The last reports of a process that dies are lost, and an item of an older report gets the blame. That
            # happens once at most: after a crash, the work waits until the actor has the report.
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
        """Add ``delta`` to the counts of the next report; a failure is reported at once.

        Also remembers whether the last finished items failed.
        """
        with self._reporting:
            self._delta = self._delta.add_delta(delta)
            if delta.n_ok or delta.n_failed:
                self._last_failed = bool(delta.n_failed)
            if delta.n_failed:
                self._report()

    def _report_regularly(self) -> None:
        """Report changes at the interval that the actor sets, and idleness every _IDLE_S. Runs in a thread forever.

        If the actor does not answer, the interval doubles up to SELDOM_S.
        """
        every_s = REPORT_S
        asked_at = time.monotonic()
        ask_s = _SOON_S
        while True:
            time.sleep(every_s)
            self._full_disk = RayDisk.describe_full()
            if time.monotonic() - asked_at >= ask_s:  # an actor that does not answer is overloaded or gone
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
        """Add the time since the last call to the counts of the next report, unless the model is being loaded."""
        if (since := self._counted_until) is not None:
            self._counted_until = time.monotonic()
            up_s = self._counted_until - since
            self._delta = self._delta.add_delta(ProgressDelta(up_s=up_s, busy_s=up_s if self._in_hand else 0.0))

    def _list_held_items(self) -> list[str]:
        return [item for holding in self._in_hand for item in holding.items]

    def fail(self, why: str) -> None:
        """Report why this worker ends the run. Call it before raising, since Ray buries an error in its own text."""
        self._ask("fail", why)  # if this is lost, the run ends with Ray's own error

    def end(self, reason: str) -> None:
        """Report why this process is about to end itself, and wait up to 10 s for an answer."""
        self._ask("end", self._me, make_printable(reason))

    def _ask_about_worker(self, method: str, otherwise: object = None) -> Any:
        """Call ``method`` of the actor about this worker; return its answer, or ``otherwise`` without one in 10 s."""
        if self._heartbeats is None:  # asking Ray for the name of this worker would start Ray
            return otherwise
        return self._ask(method, self._stage, self._me, otherwise=otherwise)

    def _ask(self, method: str, *arguments: object, otherwise: object = None) -> Any:
        """Call ``method`` of the actor and return its answer, or ``otherwise`` on any error or after 10 s."""
        if self._heartbeats is None:
            return otherwise
        try:
            return ray.get(getattr(self._heartbeats, method).remote(*arguments), timeout=_ANSWER_S)
        except Exception:  # noqa: BLE001 - as in _report
            return otherwise

    def _report(self) -> None:
        """Send the items in hand and the counts to the actor without waiting for it, and set the counts to zero.

        If sending fails, the counts are kept for the next report.
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
        """The worker to which this process belongs, named after its actor or task."""
        context = ray.get_runtime_context()
        name = str(context.get_actor_id() or context.get_task_id())
        return Worker(name, socket.gethostname(), context.get_node_id(), os.getpid())


def exit_after_gpu_fault(item: str, error: Exception) -> None:
    """End this process with code 70 (``give_up_process``) if ``error`` has broken its CUDA context; otherwise return.

    A small operation on the GPU decides, or without a CUDA context in this process the text of the error. An
    out-of-memory error always returns.
    """
    if is_out_of_memory(error):
        return
    import torch  # noqa: PLC0415 - decoders do without

    has_context: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_gpu_broken() if has_context else "CUDA error" in str(error):
        give_up_process(item, error)


def give_up_process(item: str, error: Exception) -> NoReturn:
    """Print the error of ``item``, report it to the heartbeats, and end this process at once with exit code 70."""
    print(f"{item}: {error}", file=sys.stderr, flush=True)
    if Heartbeat.of_process is not None:
        Heartbeat.of_process.end(str(error))
    os._exit(70)
