"""What every worker is doing right now: an actor to which workers report and which the driver asks.

A worker reports the items that it holds, and no count of them, so the next report mends one that was lost, or was made
again by a restarted actor or a retried task. The actor keeps one report a busy worker, whatever the size of the corpus.
A worker does not wait for its reports, and no video fails if the actor is gone.

The actor also knows what a worker held when its process died, so the next process of that worker can ask which item
has killed others before (``Heartbeat.deaths``). A worker waits, for some seconds, for the answer to two questions only:
this one, after a process died, and whether it should rest, after an item failed.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.execution.monitoring.report import Death, Fault, NodeTally, ProgressDelta, Worker, WorkerReport

_RESTARTS = 3
_ANSWER_S = 10.0
# A worker is given up if its processes die more often than this. An item that kills its worker costs two deaths, so a
# few such items an hour do not end a run, nor does a process lost each day; a machine where every process dies does.
DEATHS, DEATHS_S = 10, 3600.0
POISON = 2  # deaths with one item in hand after which the item is given to no other process
# A worker is out of service while all but one of its last RECENT items failed in a way that another machine may avoid,
# and less than BETTER of the other workers' items did: one that fails instantly would drain the corpus before others
# finish their first item. It tries one item after REST_S, and the next after twice that: a mount may come back.
RECENT, REST_S, BETTER = 8, 60.0, 0.25
_AT_WORK_S = 10.0  # a worker that moved an item in the last 10 s counts as at work
_LOOK_S = _REPORT_S = 1.0
# A report takes the actor a quarter of a millisecond of a core: all workers together send so many a second, each at
# least one in SELDOM_S seconds. Each asks how often that is: soon, as others are starting, and later once a minute.
REPORTS_A_SECOND, SELDOM_S, _SOON_S, _LATER_S = 2000, 8.0, 4.0, 60.0
_IDLE_S = 10.0  # a worker that has nothing to do says so this often
_DEATHS_KEPT = 100  # processes that died, for the driver's log
_BACKLOG = 1000  # pending calls a worker: if the actor hangs, they must not fill the worker's memory


class WorkerGivenUp(RuntimeError):  # noqa: N818
    """The process of this worker has died too often; the run ends."""


class _RecentItems:
    """The outcomes of a worker's last items, by which the actor takes it out of service."""

    def __init__(self) -> None:
        self.failed: deque[bool] = deque(maxlen=RECENT)
        self.moved_at = 0.0
        self.rest_s = REST_S
        self.resting_since: float | None = None

    def add(self, delta: ProgressDelta, now: float) -> None:
        """Add the outcomes of a report; a success ends the worker's rest."""
        self.failed.extend([False] * delta.done + [True] * delta.failed)
        self.moved_at = now
        if delta.done:
            self.rest_s, self.resting_since = REST_S, None

    @property
    def fails(self) -> bool:
        """Return whether all but one of the last RECENT items failed."""
        return sum(self.failed) >= RECENT - 1


def _living() -> set[str]:
    """List the ids of the nodes that Ray takes for alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


class Heartbeats:
    """The class of the actor. ``living`` returns the ids of the living nodes; None takes all nodes for alive."""

    def __init__(
        self,
        stages: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        living: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self._clock = clock
        self._living = living
        self._nodes: tuple[float, Collection[str]] | None = None  # when Ray was asked for them, and its answer
        self._held: dict[str, dict[str, Sequence[str]]] = {stage: {} for stage in stages}  # by worker
        self._processes: dict[str, dict[str, Worker]] = {stage: {} for stage in stages}  # by worker: its last one
        self._dead: deque[Death] = deque(maxlen=_DEATHS_KEPT)
        self._nodes_seen: set[str] = set()
        self._lost: set[Worker] = set()  # processes on nodes that were lost
        self._deaths: dict[tuple[str, str], list[str]] = defaultdict(list)  # (stage, item) -> hosts
        self._died: dict[str, deque[float]] = {}  # worker -> when its last processes died
        self._tallies: dict[str, dict[str, NodeTally]] = {stage: {} for stage in stages}
        self._recent_items: dict[str, dict[str, _RecentItems]] = {stage: defaultdict(_RecentItems) for stage in stages}
        self._out_of_service: dict[str, str] = {}  # worker -> a description for the user
        self._left, self._made = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
        self._up_s, self._busy_s = dict.fromkeys(stages, 0.0), dict.fromkeys(stages, 0.0)
        self._faults: Counter[Fault] = Counter()
        self._moves = 0
        self._failure: str | None = None

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    def state(self, stage: str, worker: Worker, held: Sequence[str], delta: ProgressDelta) -> None:
        """Record the items that a worker of ``stage`` holds now, and its counts since its last report."""
        self._processes[stage][worker.name] = worker
        if held:
            self._held[stage][worker.name] = held
        else:
            self._held[stage].pop(worker.name, None)
        self._left[stage] += delta.left
        self._made[stage] += delta.made
        self._moves += delta.moves
        self._up_s[stage] += delta.up_s
        self._busy_s[stage] += delta.busy_s
        self._faults.update(Fault(stage, worker.host, fault) for fault in delta.faults)
        if delta.done or delta.failed:
            before = self._tallies[stage].get(worker.node, NodeTally(worker.host))
            done, failed = before.done + delta.done, before.failed + delta.failed
            self._tallies[stage][worker.node] = NodeTally(worker.host, done, failed)
            self._recent_items[stage][worker.name].add(delta, self._clock())

    def rests(self, stage: str, worker: Worker) -> bool:
        """Return whether this worker is out of service now, and must not take another item."""
        mine, now = self._recent_items[stage][worker.name], self._clock()
        if not mine.fails or not self._do_better(stage, self._at_work(stage) - {worker.name}):
            mine.resting_since = None
            return False
        if mine.resting_since is None:
            mine.resting_since = now
            failed = f"{sum(mine.failed)} of its last {RECENT} failed, and few of the others'"
            self._out_of_service.setdefault(worker.name, f"a {stage} worker on {worker.host}: {failed}")
        if now - mine.resting_since < mine.rest_s:
            return True
        mine.rest_s, mine.resting_since = 2 * mine.rest_s, None
        return False

    def _at_work(self, stage: str) -> set[str]:
        """Return the workers of a stage that hold something or have moved in the last seconds."""
        recently, now = self._recent_items[stage], self._clock()
        holding = {name for name in self._held[stage] if self._node_lives(self._processes[stage][name].node)}
        return holding | {name for name, it in recently.items() if now - it.moved_at <= _AT_WORK_S}

    def _node_lives(self, node: str, within_s: float = _AT_WORK_S) -> bool:
        """Return whether a node is alive by a list of at most ``within_s`` ago; True if the list cannot be had."""
        if self._living is None:
            return True
        now = self._clock()
        if self._nodes is None or now - self._nodes[0] >= within_s:
            with suppress(Exception):  # without an answer the last one stands
                self._nodes = now, self._living()
                self._nodes_seen.update(self._nodes[1])
        return self._nodes is None or node in self._nodes[1]

    def _do_better(self, stage: str, workers: Collection[str]) -> bool:
        """Return whether these workers certainly do better: less than BETTER of their last items failed."""
        recently = self._recent_items[stage]
        known = [failed for name in workers if name in recently for failed in recently[name].failed]
        return bool(workers) and sum(known) < BETTER * max(1, len(known))

    def _all_fail(self, stage: str, workers: Iterable[str]) -> bool:
        """Return whether all of these workers fail nearly every item."""
        recently = self._recent_items[stage]
        return all(name in recently and recently[name].fails for name in workers)

    def start(self, stage: str, worker: Worker) -> int | None:
        """Record that a process of this worker starts. Return how many before it died; None where too many did."""
        last, self._processes[stage][worker.name] = self._processes[stage].get(worker.name, worker), worker
        if worker.name not in self._died:
            self._died[worker.name] = deque(maxlen=DEATHS + 1)
            return 0
        now, died = self._clock(), self._died[worker.name]
        died.append(now)
        items = tuple(self._held[stage].pop(worker.name, ()))
        if last not in self._lost:
            self._dead.append(Death(stage, last, items))
        if last.node == worker.node or self._node_lives(last.node, within_s=0.0):  # no item is to blame for a lost node
            for item in items:
                self._deaths[stage, item].append(last.host)
        if len(died) <= DEATHS or now - died[0] > DEATHS_S:
            return len(died)
        having = f", the last one on {last.host} with {', '.join(items)} in hand" if items else ""
        self.fail(f"{len(died)} processes of one {stage} worker died in {now - died[0]:.0f} s{having}")
        return None

    def _note_lost_nodes(self) -> None:
        """Count the processes of lost nodes as dead; those that Ray starts elsewhere are others."""
        for stage, workers in self._processes.items():
            for name, worker in workers.items():
                gone = not self._node_lives(worker.node) and worker.node in self._nodes_seen  # not one that has joined
                if gone and worker not in self._lost:
                    self._lost.add(worker)
                    self._dead.append(Death(stage, worker, tuple(self._held[stage].get(name, ()))))

    def deaths(self, stage: str, item: str) -> list[str]:
        """List the hosts on which a process of this stage died with this item in hand, one for each death."""
        return self._deaths.get((stage, item), [])

    def every_s(self) -> float:
        """Return how often each worker should report: once a second, or less often where they are many."""
        return min(SELDOM_S, max(_REPORT_S, sum(map(len, self._processes.values())) / REPORTS_A_SECOND))

    def fail(self, why: str) -> None:
        """Record the reason why a worker ended the run; the first reason is kept."""
        self._failure = self._failure or why

    def read(self) -> WorkerReport:
        """Return the state of all stages."""
        self._note_lost_nodes()
        inside = {
            stage: [f"{x} on {self._processes[stage][name].host}" for name, items in workers.items() for x in items]
            for stage, workers in self._held.items()
        }
        at_work = {stage: workers for stage in self._held if (workers := self._at_work(stage))}
        failing = [stage for stage, workers in at_work.items() if self._all_fail(stage, workers)]
        return WorkerReport(
            inside=inside,
            left=dict(self._left),
            made=dict(self._made),
            moves=self._moves,
            failure=self._failure,
            tried={stage: dict(nodes) for stage, nodes in self._tallies.items()},
            out_of_service=list(self._out_of_service.values()),
            failing=failing,
            up_s=dict(self._up_s),
            busy_s=dict(self._busy_s),
            faults=dict(self._faults),
            deaths=list(self._dead),
        )


def start_heartbeats(stages: Sequence[str]) -> ActorHandle:
    """Start the actor for these stages, beside this process if that is possible; returns its handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"num_cpus": 0, "max_restarts": _RESTARTS, "max_pending_calls": _BACKLOG, "scheduling_strategy": here}
    return ray.remote(Heartbeats).options(**options).remote(tuple(stages), living=_living)


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
        every_s, asked_at, ask_s = _REPORT_S, time.monotonic(), _SOON_S
        while True:
            time.sleep(every_s)
            if time.monotonic() - asked_at >= ask_s:  # an actor that does not answer has too much to do, or is gone
                every_s = self._ask("every_s", otherwise=min(SELDOM_S, 2 * every_s))
                asked_at, ask_s = time.monotonic(), min(_LATER_S, 2 * ask_s)
            with self._reporting:
                self._count_time()
                idle = self._delta._replace(up_s=0.0) == ProgressDelta() and self._held_items() == self._reported
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
        held = self._held_items()
        with suppress(Exception):  # a dead actor or a full backlog must not fail an item
            self._heartbeats.state.remote(self._stage, self._me, held, self._delta)
            self._delta, self._reported = ProgressDelta(), held

    @cached_property
    def _me(self) -> Worker:
        """The worker that this process is an attempt of."""
        here = ray.get_runtime_context()
        name = str(here.get_actor_id() or here.get_task_id())
        return Worker(name, socket.gethostname(), here.get_node_id(), os.getpid())
