"""What workers report of themselves, and the actor that they report to, which the driver asks.

The actor keeps one report a busy worker, whatever the size of the corpus. It also knows what a worker held when its
process died, so that the next process of that worker can ask which item has killed others before.
"""

from __future__ import annotations

import operator
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.storage.outages import Outage


class Worker(NamedTuple):
    """The sender of a report: one name for all processes of an actor or attempts of a task, and where this one runs."""

    name: str
    host: str
    node: str
    pid: int = 0


class ProgressDelta(NamedTuple):
    """Numbers of items since a worker's last report.

    Attributes:
        left: items that went on to the next stage.
        moves: items that came or went on.
        done: items that were tried without a failure that another node might avoid.
        failed: items that were tried with such a failure.
        made: items that went on as results of the stage, not as failures.
        up_s: seconds since then in which the worker had its model and could work.
        busy_s: those of them in which it had something in hand.
        faults: the error classes of the items that failed in this stage.
    """

    left: int = 0
    moves: int = 0
    done: int = 0
    failed: int = 0
    made: int = 0
    up_s: float = 0.0
    busy_s: float = 0.0
    faults: tuple[str, ...] = ()

    def plus(self, more: ProgressDelta) -> ProgressDelta:
        return ProgressDelta(*map(operator.add, self, more))  # numbers add up, faults are joined


class NodeTally(NamedTuple):
    """The items that a stage did and failed on a node, as ProgressDelta counts them."""

    host: str
    done: int = 0
    failed: int = 0


class FailureKind(NamedTuple):
    """The kind of a failure: the stage, the host, and the error class of the item."""

    stage: str
    host: str
    error_class: str


class Death(NamedTuple):
    """The end of a worker's process, noticed as its next one started, and what it had in hand."""

    stage: str
    worker: Worker
    items: tuple[str, ...]


@dataclass(frozen=True)
class WorkerReport:
    """The state of all stages, as the actor knows it.

    Attributes:
        inside: stage -> what its workers hold and where: "ID on HOST", or a description of other work.
        left: stage -> how many items went through it. An item that is tried again counts again.
        made: stage -> how many of these had not failed, in this stage or before.
        moves: a number that grows with every item that enters or leaves a stage.
        failure: why a worker gave the run up, if one did.
        tried: stage -> node id -> its tally.
        out_of_service: descriptions of the workers that were put out of service.
        failing: the stages of which all workers at work fail nearly every item.
        up_s: stage -> seconds in which its workers could work, summed over them.
        busy_s: stage -> those of them in which they had something in hand.
        faults: how often items failed, by stage, host and error class; again where they were tried again.
        deaths: the last processes of workers that died.
        outages: stores that do not answer a worker, each since the first worker noticed.
        workers: node id -> stage -> its workers there.
    """

    inside: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    moves: int = 0
    failure: str | None = None
    tried: dict[str, dict[str, NodeTally]] = field(default_factory=dict)
    out_of_service: list[str] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)
    up_s: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    faults: dict[FailureKind, int] = field(default_factory=dict)
    deaths: list[Death] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    workers: dict[str, dict[str, int]] = field(default_factory=dict)


_RESTARTS = 3
# A worker is given up if its processes die more often than this. An item that kills its worker costs two deaths, so a
# few such items an hour do not end a run, nor does a process lost each day; a machine where every process dies does.
DEATHS, DEATHS_S = 10, 3600.0
# A worker is out of service while all but one of its last RECENT items failed in a way that another machine may avoid,
# and less than BETTER of the other workers' items did: one that fails instantly would drain the corpus before others
# finish their first item. It tries one item after REST_S, and the next after twice that: a mount may come back.
RECENT, REST_S, BETTER = 8, 60.0, 0.25
_AT_WORK_S = 10.0  # a worker that moved an item in the last 10 s counts as at work
# A report takes the actor a quarter of a millisecond of a core: all workers together send so many a second, each at
# most one in REPORT_S seconds and at least one in SELDOM_S.
REPORTS_A_SECOND, REPORT_S, SELDOM_S = 2000, 1.0, 8.0
_DEATHS_KEPT = 100  # processes that died, for the driver's log
_BACKLOG = 1000  # pending calls a worker: if the actor hangs, they must not fill the worker's memory


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
        self._faults: Counter[FailureKind] = Counter()
        self._outages: dict[Worker, Collection[Outage]] = {}
        self._moves = 0
        self._failure: str | None = None

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    def state(
        self,
        stage: str,
        worker: Worker,
        held: Sequence[str],
        delta: ProgressDelta,
        outages: Collection[Outage] = (),
    ) -> None:
        """Record a worker of ``stage``: its items now, its counts since its last report, stores that do not answer."""
        self._processes[stage][worker.name] = worker
        self._outages.pop(worker, None)
        if outages:
            self._outages[worker] = outages
        if held:
            self._held[stage][worker.name] = held
        else:
            self._held[stage].pop(worker.name, None)
        self._left[stage] += delta.left
        self._made[stage] += delta.made
        self._moves += delta.moves
        self._up_s[stage] += delta.up_s
        self._busy_s[stage] += delta.busy_s
        self._faults.update(FailureKind(stage, worker.host, fault) for fault in delta.faults)
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

    def _node_lives(self, node: str, max_age_s: float = _AT_WORK_S) -> bool:
        """Return whether a node is alive, by a list of nodes that is at most ``max_age_s`` old.

        Where Ray does not answer, the last list stands; without any list every node counts as alive.
        """
        if self._living is None:
            return True
        now = self._clock()
        if self._nodes is None or now - self._nodes[0] >= max_age_s:
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
        if last.node == worker.node or self._node_lives(last.node, max_age_s=0.0):  # no item is to blame
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
        return min(SELDOM_S, max(REPORT_S, sum(map(len, self._processes.values())) / REPORTS_A_SECOND))

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
            outages=self._current_outages(),
            workers=self._workers_of_nodes(),
        )

    def _workers_of_nodes(self) -> dict[str, dict[str, int]]:
        """Count the workers of each stage by the node of their last process."""
        found: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for stage, workers in self._processes.items():
            for node, count in Counter(worker.node for worker in workers.values()).items():
                found[node][stage] = count
        return dict(found)

    def _current_outages(self) -> list[Outage]:
        """Return what processes that still run have reported of stores, the first report of each store."""
        last = {process for workers in self._processes.values() for process in workers.values()}
        running = [worker for worker in self._outages if worker in last and self._node_lives(worker.node)]
        outages = sorted((outage for worker in running for outage in self._outages[worker]), key=lambda it: -it.since)
        return list({outage.place: outage for outage in outages}.values())


@contextmanager
def heartbeats_of(stages: Sequence[str]) -> Iterator[ActorHandle]:
    """Run the actor for these stages inside the context, beside this process if that is possible; yield its handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"num_cpus": 0, "max_restarts": _RESTARTS, "max_pending_calls": _BACKLOG, "scheduling_strategy": here}
    heartbeats = ray.remote(Heartbeats).options(**options).remote(tuple(stages), living=_living)
    try:
        yield heartbeats
    finally:
        with suppress(Exception):  # a cluster that is gone has no actor either
            ray.kill(heartbeats)  # Ray Data holds on to it after a run
