"""The reports of workers, and the actor that collects them for the driver."""

from __future__ import annotations

import operator
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.storage.outages import Outage


class Worker(NamedTuple):
    """The sender of a report: a worker, and the process that it runs in now.

    Attributes:
        name: the same for all processes of an actor, or all attempts of a task.
    """

    name: str
    host: str
    node: str
    pid: int = 0


class ProgressDelta(NamedTuple):
    """The counts of items since a worker's last report.

    Attributes:
        n_passed_on: items that were passed on to the next stage.
        n_moves: items taken plus items passed on.
        n_ok: items tried without a failure that another node might avoid.
        n_failed: items tried with such a failure.
        n_results: items passed on as results of the stage, not as failures.
        up_s: seconds in which the worker had its model and could work.
        busy_s: seconds of ``up_s`` in which it had items in hand.
        faults: the error classes of the items that failed in this stage.
    """

    n_passed_on: int = 0
    n_moves: int = 0
    n_ok: int = 0
    n_failed: int = 0
    n_results: int = 0
    up_s: float = 0.0
    busy_s: float = 0.0
    faults: tuple[str, ...] = ()

    def add_delta(self, more: ProgressDelta) -> ProgressDelta:
        """Return the sum of two deltas."""
        return ProgressDelta(*map(operator.add, self, more))  # numbers are added, faults concatenated


class NodeTally(NamedTuple):
    """The numbers of items that a stage tried on a node, as ProgressDelta counts them."""

    host: str
    n_ok: int = 0
    n_failed: int = 0


class FailureKind(NamedTuple):
    """The stage, the host and the error class of failures."""

    stage: str
    host: str
    error_class: str


class CrashedProcess(NamedTuple):
    """A crashed process of a worker and its items in hand, recorded at the next process's start or a node's loss."""

    stage: str
    worker: Worker
    items: tuple[str, ...]


class Crash(NamedTuple):
    """A crash with an item in hand: the host, and the reason that the process gave before it ended, "" without one."""

    host: str
    reason: str = ""


def describe_crashes(process: str, item: str, crashes: Sequence[Crash]) -> str:
    """Return the error message of an item ("video") that was in hand when a ``process`` ("encode process") crashed."""
    where = ", ".join(dict.fromkeys(crash.host for crash in crashes))
    reasons = list(dict.fromkeys(crash.reason for crash in crashes if crash.reason))
    if n_silent := sum(not crash.reason for crash in crashes):  # such as processes killed by a signal
        reasons.append(f"Ray's logs say how{f' {n_silent} of them ended' if reasons else ''}")
    return f"the {process} crashed {len(crashes)} times with this {item} in hand, on {where}; {'; '.join(reasons)}"


@dataclass(frozen=True)
class WorkerReport:
    """The state of all stages, as the actor knows it.

    Attributes:
        inside: stage -> "ID on HOST" for each item in hand, or a description of other work.
        n_passed_on: stage -> items that it passed on. A retried item counts again.
        n_results: stage -> items that it passed on as results, not as failures of this stage or an earlier one.
        n_moves: a number that grows with every item that enters or leaves a stage.
        failure: the reason of the first worker that ended the run; None without one.
        tallies: stage -> node id -> its tally.
        excluded_workers: descriptions of the workers that were excluded at some time.
        failing: the stages whose workers at work have all failed at least 7 of their last 8 items (RECENT).
        up_s: stage -> seconds in which its workers could work, summed over them.
        busy_s: stage -> seconds of ``up_s`` in which they had items in hand.
        faults: the number of failed items. A retried item counts again.
        crashed_processes: the last 100, oldest first.
        outages: stores that do not answer a worker, each since the first worker noticed.
        workers: node id -> stage -> number of its workers there.
        full_disks: node id -> the disk there that is too full to start a worker, by a report of the last ten minutes.
    """

    inside: dict[str, list[str]] = field(default_factory=dict)
    n_passed_on: dict[str, int] = field(default_factory=dict)
    n_results: dict[str, int] = field(default_factory=dict)
    n_moves: int = 0
    failure: str | None = None
    tallies: dict[str, dict[str, NodeTally]] = field(default_factory=dict)
    excluded_workers: list[str] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)
    up_s: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    faults: dict[FailureKind, int] = field(default_factory=dict)
    crashed_processes: list[CrashedProcess] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    workers: dict[str, dict[str, int]] = field(default_factory=dict)
    full_disks: dict[str, str] = field(default_factory=dict)


_RESTARTS = 3
# A worker is given up if its processes crash more often than this. An item that kills its worker costs two crashes. A
# few such items an hour do not end a run, nor does one crash a day; a machine where every process crashes does.
MAX_CRASHES, CRASHES_S = 10, 3600.0
# A worker is excluded while all but one of its last RECENT items failed in a way that another machine may avoid, and
# less than BETTER of the other workers' items did. A worker that fails instantly would drain the corpus before other
# workers finish an item. It tries one item after REST_S, and the next after twice that time: a mount may come back.
RECENT, REST_S, BETTER = 8, 60.0, 0.25
_AT_WORK_S = 10.0  # a worker that moved an item in the last 10 s counts as at work
# A report costs the actor a quarter of a millisecond of a core. So all workers together send REPORTS_PER_S reports a
# second; each worker waits REPORT_S seconds or longer between two, and SELDOM_S or longer if the actor does not answer.
REPORTS_PER_S, REPORT_S, SELDOM_S = 2000, 1.0, 8.0
_MAX_CRASHED_PROCESSES = 100  # crashed processes kept for the driver's log
_DISK_REPORT_S = 600.0  # older reports of a full disk are ignored: it may have room, but no worker there to say so
_BACKLOG = 1000  # pending calls per worker: if the actor hangs, they must not fill the worker's memory


class _RecentItems:
    """The outcomes of a worker's last items, by which the actor decides to exclude it.

    Attributes:
        failures: whether each of the last RECENT items failed, oldest first.
        moved_at: the time of the last outcome.
        rest_s: how long the worker rests before the next item.
        resting_since: None if the worker does not rest.
    """

    def __init__(self) -> None:
        self.failures: deque[bool] = deque(maxlen=RECENT)
        self.moved_at = 0.0
        self.rest_s = REST_S
        self.resting_since: float | None = None

    def add(self, delta: ProgressDelta, now: float) -> None:
        """Add the outcomes of a report. A success ends the worker's rest and resets ``rest_s``."""
        self.failures.extend([False] * delta.n_ok + [True] * delta.n_failed)
        self.moved_at = now
        if delta.n_ok:
            self.rest_s = REST_S
            self.resting_since = None

    @property
    def is_failing(self) -> bool:
        """True if at least RECENT - 1 of the last RECENT items failed."""
        return sum(self.failures) >= RECENT - 1


class _Outcomes(NamedTuple):
    """The last outcomes of the workers of a stage that were at work at one time."""

    at: float
    workers: set[str]
    n_all: int
    n_failed: int


def _list_living_nodes() -> set[str]:
    """Return the ids of the nodes that Ray considers alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


class Heartbeats:
    """The actor that collects the reports of a graph's workers."""

    def __init__(
        self,
        stages: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        living: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """Start without reports.

        Args:
            stages: all stage names that reports may have, in processing order.
            living: returns the ids of the living nodes; None considers all nodes alive.
        """
        self._clock = clock
        self._list_living_nodes = living
        self._nodes: tuple[float, Collection[str]] | None = None  # when Ray was asked for them, and its answer
        self._in_hand: dict[str, dict[str, Sequence[str]]] = {stage: {} for stage in stages}  # by worker
        self._processes: dict[str, dict[str, Worker]] = {stage: {} for stage in stages}  # by worker: its last one
        self._crashed_processes: deque[CrashedProcess] = deque(maxlen=_MAX_CRASHED_PROCESSES)
        self._nodes_seen: set[str] = set()
        self._lost_processes: set[Worker] = set()  # processes on nodes that were lost
        self._crashes: dict[tuple[str, str], list[Crash]] = defaultdict(list)  # (stage, item) -> crashes
        self._reasons: dict[Worker, str] = {}  # of processes that said why they end
        self._crash_times: dict[str, deque[float]] = {}  # worker -> times of its last crashes
        self._tallies: dict[str, dict[str, NodeTally]] = {stage: {} for stage in stages}
        self._recent_items: dict[str, dict[str, _RecentItems]] = {stage: defaultdict(_RecentItems) for stage in stages}
        self._outcomes: dict[str, _Outcomes] = {}  # by stage
        self._excluded_workers: dict[str, str] = {}  # worker -> a description for the user
        self._totals = dict.fromkeys(stages, ProgressDelta())  # of all reports, without faults
        self._faults: Counter[FailureKind] = Counter()
        self._outages: dict[Worker, Collection[Outage]] = {}
        self._full_disks: dict[str, tuple[str, float]] = {}  # by node id: the disk, and when it was reported
        self._failure: str | None = None

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    def state(
        self,
        stage: str,
        worker: Worker,
        items: Sequence[str],
        delta: ProgressDelta,
        outages: Collection[Outage] = (),
        full_disk: str = "",
    ) -> None:
        """Record a report of a worker: replace its items, its outages and its node's full disk, and add its counts.

        Args:
            items: the items that it has in hand now.
            full_disk: the disk of its node that is too full to start a worker; "" without one.
        """
        self._processes[stage][worker.name] = worker
        self._outages.pop(worker, None)
        if outages:
            self._outages[worker] = outages
        self._full_disks[worker.node] = full_disk, self._clock()
        if items:
            self._in_hand[stage][worker.name] = items
        else:
            self._in_hand[stage].pop(worker.name, None)
        self._totals[stage] = self._totals[stage].add_delta(delta._replace(faults=()))
        self._faults.update(FailureKind(stage, worker.host, fault) for fault in delta.faults)
        if delta.n_ok or delta.n_failed:
            before = self._tallies[stage].get(worker.node, NodeTally(worker.host))
            n_ok, n_failed = before.n_ok + delta.n_ok, before.n_failed + delta.n_failed
            self._tallies[stage][worker.node] = NodeTally(worker.host, n_ok, n_failed)
            self._recent_items[stage][worker.name].add(delta, self._clock())

    def is_excluded(self, stage: str, worker: Worker) -> bool:
        """Return True if this worker must not take another item now.

        A worker is excluded while at least RECENT - 1 of its last RECENT items have failed and
        ``_do_others_do_better``. After REST_S it may try one item (False), after twice that time another, and so on.
        Its first exclusion is recorded for the report.
        """
        recent = self._recent_items[stage][worker.name]
        now = self._clock()
        if not recent.is_failing or not self._do_others_do_better(stage, worker.name):
            recent.resting_since = None
            return False
        if recent.resting_since is None:
            recent.resting_since = now
            reason = f"{sum(recent.failures)} of its last {RECENT} failed, few items of the other workers did"
            self._excluded_workers.setdefault(worker.name, f"a {stage} worker on {worker.host}: {reason}")
        if now - recent.resting_since < recent.rest_s:
            return True
        recent.rest_s, recent.resting_since = 2 * recent.rest_s, None
        return False

    def _find_workers_at_work(self, stage: str) -> set[str]:
        """Return a stage's workers with items in hand on a living node, or with an outcome in the last 10 s."""
        recently = self._recent_items[stage]
        now = self._clock()
        holding = {name for name in self._in_hand[stage] if self._is_node_alive(self._processes[stage][name].node)}
        return holding | {name for name, items in recently.items() if now - items.moved_at <= _AT_WORK_S}

    def _is_node_alive(self, node: str, max_age_s: float = _AT_WORK_S) -> bool:
        """Return True if a node is alive, by a list of nodes that is less than ``max_age_s`` seconds old.

        If Ray does not answer, the last list counts; without any, every node counts as alive.
        """
        if self._list_living_nodes is None:
            return True
        now = self._clock()
        if self._nodes is None or now - self._nodes[0] >= max_age_s:
            with suppress(Exception):  # without an answer, the last one counts
                self._nodes = now, self._list_living_nodes()
                self._nodes_seen.update(self._nodes[1])
        return self._nodes is None or node in self._nodes[1]

    def _do_others_do_better(self, stage: str, name: str) -> bool:
        """Return True if a share of less than BETTER of the last items failed for the other workers at work.

        Without others the result is False. Workers without an outcome count as better. The outcomes may be 0.01 s old
        per 100 workers.
        """
        recently = self._recent_items[stage]
        now = self._clock()
        counted = self._outcomes.get(stage)
        if counted is None or now - counted.at >= len(self._processes[stage]) // 100 / 100:
            names = self._find_workers_at_work(stage)
            failures = [
                is_failure for worker in names if worker in recently for is_failure in recently[worker].failures
            ]
            counted = self._outcomes[stage] = _Outcomes(now, names, len(failures), sum(failures))
        own = recently[name].failures if name in counted.workers else ()
        n_failed, n_all = counted.n_failed - sum(own), counted.n_all - len(own)
        return len(counted.workers) > (name in counted.workers) and n_failed < BETTER * max(1, n_all)

    def start(self, stage: str, worker: Worker) -> int | None:
        """Record the start of a worker's process, and the crash of the previous one with its items in hand.

        The items are blamed for the crash, unless that process ended with its node. It counts as lost in either case.

        Returns:
            The number of processes that this worker has lost, at most MAX_CRASHES + 1; 0 at its first start. None if
            more than MAX_CRASHES were lost within CRASHES_S; the run then fails (``fail``).
        """
        last, self._processes[stage][worker.name] = self._processes[stage].get(worker.name, worker), worker
        if worker.name not in self._crash_times:
            self._crash_times[worker.name] = deque(maxlen=MAX_CRASHES + 1)
            return 0
        now = self._clock()
        crash_times = self._crash_times[worker.name]
        crash_times.append(now)
        items = tuple(self._in_hand[stage].pop(worker.name, ()))
        reason = self._reasons.pop(last, "")
        if last not in self._lost_processes:
            self._crashed_processes.append(CrashedProcess(stage, last, items))
        if last.node == worker.node or self._is_node_alive(last.node, max_age_s=0.0):  # no item is to blame
            for item in items:
                self._crashes[stage, item].append(Crash(last.host, reason))
        if len(crash_times) <= MAX_CRASHES or now - crash_times[0] > CRASHES_S:
            return len(crash_times)
        details = f", the last process on {last.host} with {', '.join(items)} in hand" if items else ""
        details += f": {reason}" if reason else ""
        self.fail(
            f"{len(crash_times)} processes of one {stage} worker crashed in {now - crash_times[0]:.0f} s{details}"
        )
        return None

    def end(self, worker: Worker, reason: str) -> None:
        """Record why a worker's process is about to end itself, for the crash that ``start`` notices."""
        self._reasons[worker] = reason

    def _note_lost_nodes(self) -> None:
        """Record each process on a lost node once as crashed, before Ray starts new processes elsewhere.

        A node that was never seen alive is not lost: it may have joined just now.
        """
        for stage, workers in self._processes.items():
            for name, worker in workers.items():
                # A node that has joined just now may not be known yet.
                is_lost = not self._is_node_alive(worker.node) and worker.node in self._nodes_seen
                if is_lost and worker not in self._lost_processes:
                    self._lost_processes.add(worker)
                    self._crashed_processes.append(
                        CrashedProcess(stage, worker, tuple(self._in_hand[stage].get(name, ())))
                    )

    def find_crashes(self, stage: str, item: str) -> list[Crash]:
        """Return the crashes of this stage's processes with this item in hand, without losses of nodes."""
        return self._crashes.get((stage, item), [])

    def every_s(self) -> float:
        """Return the seconds between a worker's reports: REPORT_S, or more with over 2000 workers."""
        return max(REPORT_S, sum(map(len, self._processes.values())) / REPORTS_PER_S)

    def fail(self, why: str) -> None:
        """Record why a worker ended the run. Only the first reason is kept."""
        self._failure = self._failure or why

    def read(self) -> WorkerReport:
        """Return the state of all stages, after recording the processes of nodes that were lost meanwhile."""
        self._note_lost_nodes()
        inside = {
            stage: [f"{x} on {self._processes[stage][name].host}" for name, items in workers.items() for x in items]
            for stage, workers in self._in_hand.items()
        }
        failing = []
        for stage, recently in self._recent_items.items():
            at_work = self._find_workers_at_work(stage)
            if at_work and all(name in recently and recently[name].is_failing for name in at_work):
                failing.append(stage)
        return WorkerReport(
            inside=inside,
            n_passed_on={stage: total.n_passed_on for stage, total in self._totals.items()},
            n_results={stage: total.n_results for stage, total in self._totals.items()},
            n_moves=sum(total.n_moves for total in self._totals.values()),
            failure=self._failure,
            tallies={stage: dict(nodes) for stage, nodes in self._tallies.items()},
            excluded_workers=list(self._excluded_workers.values()),
            failing=failing,
            up_s={stage: total.up_s for stage, total in self._totals.items()},
            busy_s={stage: total.busy_s for stage, total in self._totals.items()},
            faults=dict(self._faults),
            crashed_processes=list(self._crashed_processes),
            outages=self._list_outages(),
            workers=self._count_workers(),
            full_disks={
                node: disk
                for node, (disk, at) in self._full_disks.items()
                if disk and self._clock() - at < _DISK_REPORT_S
            },
        )

    def _count_workers(self) -> dict[str, dict[str, int]]:
        """Count the workers on each node by their last process: node id -> stage -> number."""
        counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for stage, workers in self._processes.items():
            for node, count in Counter(worker.node for worker in workers.values()).items():
                counts[node][stage] = count
        return dict(counts)

    def _list_outages(self) -> list[Outage]:
        """Return the outages that running processes on living nodes report, the earliest one of each store."""
        last = {process for workers in self._processes.values() for process in workers.values()}
        running = [worker for worker in self._outages if worker in last and self._is_node_alive(worker.node)]
        outages = sorted(
            (outage for worker in running for outage in self._outages[worker]), key=lambda outage: -outage.since
        )
        return list({outage.place: outage for outage in outages}.values())


@contextmanager
def run_heartbeats(stages: Sequence[str]) -> Iterator[ActorHandle]:
    """Run the heartbeats actor for these stages inside the context, and yield its handle.

    It runs on this node if possible. After each of its first three crashes it restarts without its counts.
    """
    strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"num_cpus": 0, "max_restarts": _RESTARTS, "max_pending_calls": _BACKLOG, "scheduling_strategy": strategy}
    heartbeats = ray.remote(Heartbeats).options(**options).remote(tuple(stages), living=_list_living_nodes)
    try:
        yield heartbeats
    finally:
        with suppress(Exception):  # a cluster that is gone has no actor either
            ray.kill(heartbeats)  # Ray Data keeps a reference to it after a run
