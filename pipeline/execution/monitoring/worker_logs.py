"""What worker processes wrote before they died, kept in a file of the run.

A node that is lost takes its log files along. But Ray's log monitor publishes the lines of a node's workers while they
run, so the driver listens, keeps the last lines of each process in memory, and writes down those of processes that
died.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple, Protocol, TypedDict

import ray

from pipeline.errors import printable
from pipeline.execution.monitoring.report import Death

_LINES, _PROCESSES = 50, 5000  # last lines of a process, and processes, that are kept in memory
_LARGEST = 2**20  # characters of a file, to which nothing more is added then
_POLL_S = _WAIT_S = 1.0  # so long the last lines of a process that died may be on their way


class _Lines(TypedDict):
    """Lines that a worker of a job has written."""

    ip: str
    pid: int
    job: str
    lines: list[str]


class _Subscriber(Protocol):
    """Ray's subscriber to the lines of all workers."""

    def poll(self, timeout: float) -> _Lines | None: ...

    def close(self) -> None: ...


class WorkerLogs:
    """The listener to this driver's workers. ``save`` gets the whole text of the file whenever something is added."""

    def __init__(self, save: Callable[[bytes], object]) -> None:
        self._save = save
        self._text = ""
        self._lines: OrderedDict[tuple[str, int], deque[str]] = OrderedDict()  # (ip, pid) -> its last lines
        self._known: dict[Death, None] = {}
        self._unwritten: deque[Death] = deque()
        self._subscriber: _Subscriber | None = None
        self._ended = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="worker-logs", daemon=True)

    @property
    def n_deaths(self) -> int:
        """The number of processes that died."""
        return len(self._known)

    def start(self) -> None:
        """Begin to listen, once Ray is joined."""
        with suppress(Exception):  # Ray has no public way to listen: without one the deaths alone are written
            subscriber = ray._raylet.GcsLogSubscriber(address=ray.get_runtime_context().gcs_address)
            subscriber.subscribe()
            self._subscriber = subscriber
        self._listener.start()

    def add(self, deaths: Collection[Death]) -> None:
        """Take the deaths that the workers' report names; the new ones are written a moment later."""
        for death in deaths:
            if death not in self._known:
                self._known[death] = None
                self._unwritten.append(death)

    def close(self) -> None:
        """End listening, once the deaths are written."""
        if self._listener.is_alive():
            deadline = time.monotonic() + _POLL_S + 2 * _WAIT_S
            while self._unwritten and time.monotonic() < deadline:
                time.sleep(0.05)
            self._ended.set()
            with suppress(Exception):
                if self._subscriber is not None:
                    self._subscriber.close()
            self._listener.join(0.2)

    def _listen(self) -> None:
        """Keep lines, and write deaths, until the end; runs in a thread."""
        job = ray.get_runtime_context().get_job_id()
        while not self._ended.is_set():
            n_deaths = len(self._unwritten)  # those that are noticed while the last lines of these come wait their turn
            self._keep(job, _WAIT_S if n_deaths else _POLL_S)
            if n_deaths:
                self._write([self._unwritten[i] for i in range(n_deaths)])
                for _ in range(n_deaths):
                    self._unwritten.popleft()

    def _keep(self, job: str, for_s: float) -> None:
        """Keep the lines that come in ``for_s`` seconds."""
        until = time.monotonic() + for_s
        while (left_s := until - time.monotonic()) > 0 and not self._ended.is_set():
            try:
                found = None if self._subscriber is None else self._subscriber.poll(timeout=left_s)
            except Exception:  # noqa: BLE001 - what Ray raises where the cluster is gone differs by version
                found = None
            if found is None:
                self._ended.wait(min(0.1, max(0.0, until - time.monotonic())))
            elif found["job"] == job:
                process = (found["ip"], int(found["pid"]))
                self._lines.setdefault(process, deque(maxlen=_LINES)).extend(found["lines"])
                self._lines.move_to_end(process)
                if len(self._lines) > _PROCESSES:
                    self._lines.popitem(last=False)

    def _write(self, deaths: Collection[Death]) -> None:
        """Add the deaths to the file."""
        nodes = _nodes()
        for death in deaths:
            if len(self._text) < _LARGEST:
                node = nodes.get(death.worker.node, _Node("", ""))
                self._text += "\n".join(self._obituary(death, node)) + "\n\n"
        with suppress(OSError):  # a store that fails ends the run at the next commit
            self._save(self._text.encode())

    def _obituary(self, death: Death, node: _Node) -> list[str]:
        """Return the lines about a process that died on ``node``."""
        stage, worker, items = death
        having = f" with {', '.join(items)} in hand" if items else ""
        where = f"on {worker.host} (process {worker.pid}, node {worker.node})"
        lines = [f"{datetime.now(UTC).isoformat(timespec='seconds')} a worker of {stage} {where} died{having}"]
        if node.lost:
            lines.append(f"its node was lost: {node.lost}")
        last = self._lines.get((node.ip, worker.pid))
        lines.append("its last lines:" if last else "it had written nothing that Ray passed on")
        return [*lines, *(f"    {printable(line)}" for line in last or ())]


class _Node(NamedTuple):
    """A node's address, and why it was lost: "" for one that is alive."""

    ip: str
    lost: str


def _nodes() -> dict[str, _Node]:
    """Return all nodes by their ids, lost ones too; none where the cluster does not answer."""
    found: dict[str, _Node] = {}
    with suppress(Exception):
        for node in ray.nodes() if ray.is_initialized() else ():  # it would start a Ray
            why = printable(node.get("DeathReasonMessage") or "Ray gives no reason")
            found[node["NodeID"]] = _Node(node["NodeManagerAddress"], "" if node["Alive"] else why)
    return found
