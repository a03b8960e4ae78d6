"""The worker's side of the heartbeats: what it has in hand, and the GPU fault after which it ends."""

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
from typing import Any, NoReturn

import ray
from ray.actor import ActorHandle

from gstep.errors import is_gpu_broken, is_out_of_memory
from pipeline.runner.heartbeats import REPORT_S, SELDOM_S, ProgressDelta, Worker
from pipeline.storage.outages import OUTAGES, Outage

_ANSWER_S = 10.0
POISON = 2  # deaths with one item in hand after which the item is given to no other process
_LOOK_S = 1.0
_SOON_S, _LATER_S = 4.0, 60.0  # each worker asks how often it may report: soon, as others are starting, and then seldom
_IDLE_S = 10.0  # a worker that has nothing to do says so this often


class WorkerGivenUp(RuntimeError):  # noqa: N818
    """The process of this worker has died too often; the run ends."""


class HeldItems:
    """The items that a worker has in hand; it lets go of them one by one, in order, as they are done."""

    def __init__(self, items: Sequence[str], count: Callable[[ProgressDelta], None]) -> None:
        self.items = list(items)
        self._count = count

    def done(self, failed: bool | None = None, *, made: bool = True, n: int = 1, fault: str | None = None) -> None:
        """Let go of the next ``n`` items, which go on to the next stage.

        Args:
            failed: whether they failed in a way that another node might avoid; None where this worker did not try them.
                A failure is reported at once, since it may put the worker out of service.
            made: whether they go on as results of the stage, not as failures.
            fault: the error class of an item that failed here.
        """
        del self.items[:n]
        tried = n * (failed is not None)
        wrong = n * bool(failed)
        faults = () if fault is None else (fault,)
        self._count(ProgressDelta(n, n, done=tried - wrong, failed=wrong, made=n * made, faults=faults))


class Heartbeat:
    """The reporter of one worker to the actor; it travels to the worker, and without an actor it does nothing.

    A worker may hold several items, also in several threads. It reports when it takes items, once a second what became
    of them (less often among thousands of workers), and at once when it has none left: a report for each of many short
    items would be much of its work.

    Args:
        suspects: whether an item may kill the process, so that it must be reported before it is worked on. Else that,
            too, is reported once a second.
    """

    def __init__(self, stage: str, heartbeats: ActorHandle | None = None, *, suspects: bool = True) -> None:
        self._stage = stage
        self._heartbeats = heartbeats
        self._suspects = suspects
        self._reports_by_itself = False
        self._delta = ProgressDelta()  # what is not reported yet
        self._counted_until: float | None = None  # the time until which up_s and busy_s are counted
        self._failed = False
        self.one_died = False
        self._held: list[HeldItems] = []
        self._reported: list[str] = []  # the items that the last report said are held
        self._reported_outages: tuple[Outage, ...] = ()
        self._reporting = threading.RLock()  # reports must be sent in the order in which things happened

    def start(self) -> None:
        """Say that this process of the worker starts. Raises WorkerGivenUp where too many have died before it."""
        if self._heartbeats is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id():
            # If the cluster is gone, Ray's C++ core may wait for itself for ever once Python has ended
            # (CoreWorkerProcess::HandleAtExit), and nobody would end such a process.
            atexit.register(os._exit, 0)
            self._reports_by_itself = True
            threading.Thread(target=self._report_regularly, name="heartbeat", daemon=True).start()
        n_died = self._ask_about_me("start", otherwise=0)
        if n_died is None:
            raise WorkerGivenUp(f"the processes of this {self._stage} worker die again and again")
        self.one_died = n_died > 0
        self._counted_until = time.monotonic()

    @property
    def ends_at_once(self) -> bool:
        """True in an actor of a run, whose process ends without what was registered for its end before ``start``."""
        return self._reports_by_itself

    def rest(self) -> None:
        """Wait while this worker is out of service. The actor is asked only after a failed item."""
        while self._failed and self._ask_about_me("rests"):
            time.sleep(_LOOK_S)

    def deaths(self, item: str) -> list[str]:
        """List the hosts on which processes of this stage died while they held ``item``, one for each death.

        Ask while holding it: the actor has that report by then, so the death of this process would count. A worker of
        which no process died does not ask, since Ray gives an item again to the worker that it killed.
        """
        return (self._ask("deaths", self._stage, item) or []) if self.one_died else []

    def holding(self, *ids: str) -> AbstractContextManager[HeldItems]:
        """Report these items as held by this worker inside the context; each is let go of as it is done."""
        return self._hold(ids, ProgressDelta(moves=len(ids)))

    def busy(self, work: str) -> AbstractContextManager[object]:
        """Report ``work`` as held inside the context: work that is not an item and must not pass for progress.

        Items that were held stay held, since the last report before a process dies may be lost with it.
        """
        return self._hold((work,), ProgressDelta())

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Report the model as being loaded inside the context; such time counts neither as work nor as idle."""
        self._counted_until = None
        with self.busy("the model, being loaded"):
            yield
        self._counted_until = time.monotonic()

    @contextmanager
    def _hold(self, items: Sequence[str], delta: ProgressDelta) -> Iterator[HeldItems]:
        """Hold items inside the context, and report that as soon as it matters."""
        held = HeldItems(items, self._count)
        with self._reporting:
            self._count_time()
            self._held.insert(0, held)
            self._delta = self._delta.plus(delta)
            if self._suspects or not self._reports_by_itself:
                self._report()
        try:
            yield held
        finally:
            with self._reporting:
                self._count_time()
                self._held.remove(held)
                # Ray Data may end an idle worker before its next report.
                if not self._held or not self._reports_by_itself:
                    self._report()

    def _count(self, delta: ProgressDelta) -> None:
        """Add to the counts of the next report; a failure is reported at once."""
        with self._reporting:
            self._delta = self._delta.plus(delta)
            if delta.done or delta.failed:
                self._failed = bool(delta.failed)
            if delta.failed:
                self._report()

    def _report_regularly(self) -> None:
        """Report once a second, or as the actor says, what changed, or seldom that nothing did; runs in a thread."""
        every_s, asked_at, ask_s = REPORT_S, time.monotonic(), _SOON_S
        while True:
            time.sleep(every_s)
            if time.monotonic() - asked_at >= ask_s:  # an actor that does not answer has too much to do, or is gone
                every_s = self._ask("every_s", otherwise=min(SELDOM_S, 2 * every_s))
                asked_at, ask_s = time.monotonic(), min(_LATER_S, 2 * ask_s)
            with self._reporting:
                self._count_time()
                idle = self._delta._replace(up_s=0.0) == ProgressDelta() and self._held_items() == self._reported
                idle &= OUTAGES.report() == self._reported_outages
                if not idle or self._delta.up_s >= _IDLE_S:
                    self._report()

    def _count_time(self) -> None:
        """Add the time since the last call to the counts of the next report."""
        if (since := self._counted_until) is not None:
            self._counted_until = time.monotonic()
            up_s = self._counted_until - since
            self._delta = self._delta.plus(ProgressDelta(up_s=up_s, busy_s=up_s if self._held else 0.0))

    def _held_items(self) -> list[str]:
        return [item for holding in self._held for item in holding.items]

    def fail(self, why: str) -> None:
        """Report why this worker ends the run, before it raises: Ray would bury the error in its own text."""
        self._ask("fail", why)  # if this is lost, the run ends with Ray's own error

    def _ask_about_me(self, method: str, otherwise: object = None) -> Any:
        """Call a method of the actor about this worker, as ``_ask``."""
        if self._heartbeats is None:  # asking Ray for the name of this worker would start Ray
            return otherwise
        return self._ask(method, self._stage, self._me, otherwise=otherwise)

    def _ask(self, method: str, *arguments: object, otherwise: object = None) -> Any:
        """Call a method of the actor and return its answer, or ``otherwise`` where none comes."""
        if self._heartbeats is None:
            return otherwise
        try:
            return ray.get(getattr(self._heartbeats, method).remote(*arguments), timeout=_ANSWER_S)
        except Exception:  # noqa: BLE001 - as in _report
            return otherwise

    def _report(self) -> None:
        """Send the held items and counts to the actor without waiting for it; a dead actor fails no item."""
        if self._heartbeats is None:
            return
        held, outages = self._held_items(), OUTAGES.report()
        with suppress(Exception):  # a dead actor or a full backlog must not fail an item
            self._heartbeats.state.remote(self._stage, self._me, held, self._delta, outages)
            self._delta, self._reported, self._reported_outages = ProgressDelta(), held, outages

    @cached_property
    def _me(self) -> Worker:
        """The worker that this process is an attempt of."""
        here = ray.get_runtime_context()
        name = str(here.get_actor_id() or here.get_task_id())
        return Worker(name, socket.gethostname(), here.get_node_id(), os.getpid())


def exit_after_gpu_fault(item: str, error: Exception) -> None:
    """End this process if ``error`` broke its CUDA context, which would fail all later work too; else return.

    The GPU is asked, whatever the error says: Triton, cuDNN and drivers have words of their own for a broken context,
    and cuBLAS says "CUDA error" where it only has too little memory. Where this process has no CUDA context to ask, the
    error's words decide.
    """
    if not is_out_of_memory(error) and _is_broken(error):
        give_up_process(item, error)


def _is_broken(error: Exception) -> bool:
    """Return whether the GPU refuses all work since an error."""
    import torch  # noqa: PLC0415 - decoders do without

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA error" in str(error)
    return is_gpu_broken()


def give_up_process(item: str, error: Exception) -> NoReturn:
    """End this process at once; ``item`` was in hand.

    Ray starts another process, which asks the heartbeats how many died with ``item`` (a video, a question) in hand.
    """
    print(f"{item}: {error}", file=sys.stderr, flush=True)
    os._exit(70)
