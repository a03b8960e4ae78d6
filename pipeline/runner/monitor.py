"""What a run publishes while it works: its metrics, the progress in its claim's note, and a log of crashed workers.

Metrics appear at Ray's metrics port as ``ray_gstep_...``; without ``ray[default]`` recording does nothing. A lost node
takes its log files with it, so the driver keeps the workers' last lines and logs those of crashed processes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any

import ray
from ray.util import metrics as ray_metrics

from pipeline.errors import make_printable
from pipeline.runner.cluster.head import HeadLost
from pipeline.runner.progress import Progress
from pipeline.runner.run_record import RUNS, format_now, name_ending
from pipeline.runner.worker_reports import CrashedProcess, FailureKind, WorkerReport
from pipeline.storage.outages import OUTAGES
from pipeline.storage.stores import Store


class Monitor:
    """The publisher of one run's metrics, progress and crash log, used as a ``with`` block around the run."""

    def __init__(self, store: Store, run_id: str, tell: Callable[[Progress], object]) -> None:
        """Set up the monitor. It publishes nothing before ``start``.

        Args:
            store: receives the crash log, ``runs/<run_id>.log``.
            tell: called with the progress at each ``look``.
        """
        self._tell = tell
        self._name = f"{RUNS}/{run_id}.log"
        self._store = store
        self._faults: Counter[FailureKind] = Counter()
        self._moves = 0
        self._is_started = False
        self.metrics = Metrics(run_id)
        self._logs = WorkerLogs(partial(store.put, self._name))

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Record in the metric "runs_ended" how the run ended, and close the crash log, which may take seconds.

        The metric is not recorded if the head was lost or the monitor never started.
        """
        if self._is_started and not isinstance(error, HeadLost):
            self.metrics.count("runs_ended", 1, status=name_ending(kind))
        with suppress(ValueError):  # it never started
            OUTAGES.recorders.remove(self._record_outage)
        self._logs.close()

    @property
    def log(self) -> str:
        """The URI or path of the crash log; "" if no worker has crashed."""
        return f"{self._store}/{self._name}" if self._logs.n_crashed else ""

    def start(self) -> None:
        """Start to listen to the workers and to record store outages. Call it after joining Ray."""
        self._is_started = True
        self._logs.start()
        self.metrics.set("last_row_time", time.time())
        OUTAGES.recorders.append(self._record_outage)

    def _record_outage(self, place: str, since: float) -> None:
        """Set the metric "outage_start_time" of a store; 0 if it answers again."""
        self.metrics.set("outage_start_time", since, store=place)

    def look(self, report: WorkerReport, at: Progress) -> None:
        """Pass on the progress, log newly crashed workers, and update the metrics.

        The failure counts of ``report`` are cumulative, so only their growth is counted. If its ``n_moves`` has
        decreased, a new graph has started, and all are counted.
        """
        self._logs.add(report.crashed_processes)
        self._tell(at)
        if report.n_moves < self._moves:  # the workers of another graph, whose counts begin anew
            self._faults.clear()
        for fault, count in report.faults.items():
            labels = {"stage": fault.stage, "node": fault.host, "class": fault.error_class}
            self.metrics.count("failures", count - self._faults[fault], **labels)
        self._faults = Counter(report.faults)
        self._moves = report.n_moves
        for stage, waiting in at.waiting.items():
            self.metrics.set("queue", waiting, stage=stage)
        for stage, share in at.busy.items():
            self.metrics.set("busy_share", share, stage=stage)
        self.metrics.set("items_left", at.total - at.done)

    def count_rows(self, item: str, ok: int, failed: int) -> None:
        """Add the numbers of committed rows of a kind, "video" or "question", to the metrics."""
        self.metrics.count("rows", ok, item=item, status="ok")
        self.metrics.count("rows", failed, item=item, status="failed")
        self.metrics.set("last_row_time", time.time())


#: The metrics by their names: the meaning of each, and its labels besides ``run``.
METRICS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "rows": ("rows committed", ("item", "status")),
        "tokens": ("tokens of committed videos, before pruning (in) and stored (kept)", ("kind",)),
        "bytes": ("bytes of committed videos: of files (read) and of tokens (stored)", ("kind",)),
        "stage_seconds": ("seconds that committed videos took in a stage", ("stage",)),
        "failures": ("failed items; a retried item counts again", ("stage", "node", "class")),
        "items_left": ("items without a row", ()),
        "queue": ("items in a stage's queue or in hand", ("stage",)),
        "busy_share": ("share of the last half minute in which workers had items in hand", ("stage",)),
        "last_row_time": ("when the last row was committed, or the run began, in seconds since 1970", ()),
        "outage_start_time": ("when a store stopped answering, in seconds since 1970; 0 while it answers", ("store",)),
        "runs_ended": ("1 once the run has ended: finished, failed, cancelled", ("status",)),
    }
)


class Metrics:
    """The recorder of one run's metrics. It adds the label ``run`` to each value."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._recorders: dict[str, Any] = {}

    def count(self, name: str, amount: float, **labels: str) -> None:
        """Add ``amount`` to the counter ``name``, a key of METRICS. An amount of 0 or less is ignored."""
        if amount > 0:
            self._get_recorder(ray_metrics.Counter, name).inc(amount, {**labels, "run": self._run})

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set the gauge ``name``, a key of METRICS, to ``value``."""
        self._get_recorder(ray_metrics.Gauge, name).set(value, {**labels, "run": self._run})

    def _get_recorder(self, kind: type, name: str) -> Any:
        """Return Ray's recorder, of class ``kind``, for a metric, created at first use."""
        if name not in self._recorders:
            meaning, labels = METRICS[name]
            self._recorders[name] = kind(f"gstep_{name}", meaning, ("run", *labels))
        return self._recorders[name]


_MAX_LINES, _MAX_PROCESSES = 50, 5000  # kept in memory: last lines per process, and processes
_MAX_LOG_CHARS = 2**20  # a longer log file gets no more lines
_POLL_S = _WAIT_S = 1.0  # the last lines of a crashed process may arrive this much later


class WorkerLogs:
    """The writer of the crash log: it listens to the output of this driver's workers in a thread."""

    def __init__(self, save: Callable[[bytes], object]) -> None:
        """Set up the writer; its thread starts with ``start``. ``save`` gets the complete log text at each addition."""
        self._save = save
        self._text = ""
        self._lines: OrderedDict[tuple[str, int], deque[str]] = OrderedDict()  # (ip, pid) -> its last lines
        self._known: dict[CrashedProcess, None] = {}
        self._unwritten: deque[CrashedProcess] = deque()
        # Ray's subscriber to the lines of all workers: ``poll`` returns a dict of ip, pid, job and lines, or None.
        self._subscriber: Any = None
        self._end_event = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="worker-logs", daemon=True)

    @property
    def n_crashed(self) -> int:
        """The number of different crashed processes that were added."""
        return len(self._known)

    def start(self) -> None:
        """Start to listen, after Ray is joined.

        If Ray offers no subscription, crashes are logged without the last lines of the processes.
        """
        with suppress(Exception):  # Ray has no public way to listen. Without it, only the crashes are logged
            subscriber = ray._raylet.GcsLogSubscriber(address=ray.get_runtime_context().gcs_address)
            subscriber.subscribe()
            self._subscriber = subscriber
        self._listener.start()

    def add(self, processes: Collection[CrashedProcess]) -> None:
        """Schedule crashed processes for the log, about a second later; processes added before are ignored."""
        for process in processes:
            if process not in self._known:
                self._known[process] = None
                self._unwritten.append(process)

    def close(self) -> None:
        """Wait up to about three seconds until all crashes are written, then stop the thread, waiting a second more.

        If the thread has ended or never started, this call writes the remaining crashes; otherwise they may be lost.
        """
        if self._listener.is_alive():
            deadline = time.monotonic() + _POLL_S + 2 * _WAIT_S
            while self._unwritten and time.monotonic() < deadline:
                time.sleep(0.05)
            self._end_event.set()
            with suppress(Exception):
                if self._subscriber is not None:
                    self._subscriber.close()
            self._listener.join(_WAIT_S)
        if self._unwritten and not self._listener.is_alive():  # this process was suspended meanwhile
            self._write(len(self._unwritten))

    def _listen(self) -> None:
        """Keep the workers' last lines and write crashes to the log until ``close``. Runs in the thread.

        A crash is written after one more wait for lines, so that its own last lines are there.
        """
        job = ray.get_runtime_context().get_job_id()
        while not self._end_event.is_set():
            n_crashed = len(self._unwritten)  # crashes noticed during the wait come next time
            self._keep(job, _WAIT_S if n_crashed else _POLL_S)
            if n_crashed:
                self._write(n_crashed)

    def _keep(self, job: str, for_s: float) -> None:
        """Keep the last lines of this job's worker processes that arrive within ``for_s`` seconds or until ``close``.

        The last _MAX_LINES lines per process are kept. Beyond _MAX_PROCESSES processes, the one that has been silent
        for the longest time is forgotten. If Ray does not answer, the call only waits.
        """
        until = time.monotonic() + for_s
        while (left_s := until - time.monotonic()) > 0 and not self._end_event.is_set():
            try:
                message = None if self._subscriber is None else self._subscriber.poll(timeout=left_s)
            except Exception:  # noqa: BLE001 - what Ray raises where the cluster is gone differs by version
                message = None
            if message is None:
                self._end_event.wait(min(0.1, max(0.0, until - time.monotonic())))
            elif message["job"] == job:
                process = (message["ip"], int(message["pid"]))
                self._lines.setdefault(process, deque(maxlen=_MAX_LINES)).extend(message["lines"])
                self._lines.move_to_end(process)
                if len(self._lines) > _MAX_PROCESSES:
                    self._lines.popitem(last=False)

    def _write(self, n_crashed: int) -> None:
        """Append the first ``n_crashed`` waiting crashes to the log text, save the whole text, and dequeue them.

        Once the text has _MAX_LOG_CHARS characters, further crashes are dropped without an entry. OSErrors are ignored.
        """
        nodes: dict[str, Mapping[str, Any]] = {}
        with suppress(Exception):  # a cluster that does not answer
            nodes = {node["NodeID"]: node for node in (ray.nodes() if ray.is_initialized() else ())}  # else Ray starts
        for process in [self._unwritten[i] for i in range(n_crashed)]:  # the driver may add to them meanwhile
            if len(self._text) < _MAX_LOG_CHARS:
                lines = self._describe_crash(process, nodes.get(process.worker.node, {}))
                self._text += "\n".join(lines) + "\n\n"
        with suppress(OSError):  # a store that fails ends the run at the next commit
            self._save(self._text.encode())
        for _ in range(n_crashed):
            self._unwritten.popleft()

    def _describe_crash(self, process: CrashedProcess, node: Mapping[str, Any]) -> list[str]:
        """Return the log lines about a crash: the process, its items, why its node was lost, and its last output.

        ``node`` is the entry of the process's node in ``ray.nodes()``; without one ({}) the last output is not found.
        """
        stage, worker, items = process
        items_text = f" with {', '.join(items)} in hand" if items else ""
        where = f"on {worker.host} (process {worker.pid}, node {worker.node})"
        lines = [f"{format_now()} a worker of {stage} {where} crashed{items_text}"]
        if node and not node["Alive"]:
            lines.append(
                f"its node was lost: {make_printable(node.get('DeathReasonMessage') or 'Ray gives no reason')}"
            )
        last = self._lines.get((node.get("NodeManagerAddress", ""), worker.pid))
        lines.append("its last lines:" if last else "Ray passed on no lines of it")
        return [*lines, *(f"    {make_printable(line)}" for line in last or ())]
