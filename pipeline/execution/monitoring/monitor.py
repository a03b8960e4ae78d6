"""What a run shows to others while it goes on: its metrics, its progress in its note, and the log of dead workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from pipeline.execution.monitoring.load import Progress
from pipeline.execution.monitoring.metrics import Metrics
from pipeline.execution.monitoring.report import Fault, WorkerReport
from pipeline.execution.monitoring.worker_logs import WorkerLogs
from pipeline.execution.run_record import RUNS
from pipeline.storage.stores import Store


class Monitor:
    """The outlets of one run, for use in a ``with`` block. ``tell`` gets its progress at every look at the workers."""

    def __init__(self, store: Store, run_id: str, tell: Callable[[Progress], object]) -> None:
        self._tell = tell
        self._name = f"{RUNS}/{run_id}.log"
        self._store = store
        self._faults: Counter[Fault] = Counter()
        self._moves = 0
        self.metrics = Metrics(run_id)
        self._logs = WorkerLogs(partial(store.put, self._name))

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self._logs.close()

    @property
    def log(self) -> str:
        """The file with what dead workers said last; "" where none died."""
        return f"{self._store}/{self._name}" if self._logs.n_deaths else ""

    def start(self) -> None:
        """Begin to listen to the workers, once Ray is joined."""
        self._logs.start()
        self.metrics.set("last_row_time", time.time())

    def look(self, report: WorkerReport, at: Progress) -> None:
        """Tell others what a look at the workers showed."""
        self._logs.add(report.deaths)
        self._tell(at)
        if report.moves < self._moves:  # the workers of another graph, whose counts begin anew
            self._faults.clear()
        for fault, count in report.faults.items():
            labels = {"stage": fault.stage, "node": fault.host, "class": fault.error_class}
            self.metrics.count("failures", count - self._faults[fault], **labels)
        self._faults, self._moves = Counter(report.faults), report.moves
        for stage, waiting in at.waiting.items():
            self.metrics.set("queue", waiting, stage=stage)
        for stage, share in at.busy.items():
            self.metrics.set("busy_share", share, stage=stage)
        self.metrics.set("items_left", at.total - at.done)

    def committed(self, item: str, ok: int, failed: int) -> None:
        """Count committed rows."""
        self.metrics.count("rows", ok, item=item, status="ok")
        self.metrics.count("rows", failed, item=item, status="failed")
        self.metrics.set("last_row_time", time.time())
