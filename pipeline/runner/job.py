"""The interface between a kind of run and ``Stream``: how to plan and build its graphs, and when to end it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import pyarrow as pa
from ray.actor import ActorHandle
from rich.console import Console

from pipeline.console import Say, make_speaker
from pipeline.errors import RunFailed
from pipeline.options import RunOptions
from pipeline.runner.cluster.connection import describe_cause, sum_resources
from pipeline.runner.cluster.nodes import NodeLog
from pipeline.runner.monitor import Monitor
from pipeline.runner.progress import Progress
from pipeline.runner.shards import RunGraph
from pipeline.runner.stages import Plan, Wording
from pipeline.runner.worker_reports import WorkerReport
from pipeline.storage.outages import announce_outages


class Items(Protocol):
    """The items of a run, such as videos. More of them may become known while the run works.

    Attributes:
        KEY: the columns of a committed row that identify its item.
    """

    KEY: ClassVar[Sequence[str]]

    def __len__(self) -> int:
        """Return the number of items that are known so far."""

    @property
    def is_complete(self) -> bool:
        """True once all items are known."""

    def without(self, rows: pa.Table) -> Self:
        """Return the items that have no row in ``rows`` (KEY columns), after waiting until all items are known."""


T = TypeVar("T", bound=Items)


class Job(ABC, Generic[T]):
    """The work of one run on items of type T: it plans the workers and builds the Ray Data graphs for them.

    Attributes:
        excluded_nodes: the nodes on which no worker may run, node id -> host.
        n_shards: the number of the next graph's first shard.
    """

    wording: ClassVar[Wording]

    def __init__(self, options: RunOptions, console: Console) -> None:
        """Start with no excluded nodes, and with shard number 0."""
        self.options = options
        self.console = console
        self.say = make_speaker(console)
        self.excluded_nodes: dict[str, str] = {}
        self.nodes = NodeLog(self.say)
        self.n_shards = 0

    @abstractmethod
    def plan(self, items: T) -> Plan:
        """Return a plan that divides the cluster's resources among the workers for ``items``.

        Raises:
            RunFailed: the resources do not suffice.
        """

    @abstractmethod
    def graph(self, items: T, plan: Plan, heartbeats: ActorHandle) -> RunGraph:
        """Return the Ray Data graph for ``items``, not yet running; its workers report to ``heartbeats``."""

    @abstractmethod
    def replan(self, n_items: int) -> Plan | None:
        """Return a plan of ``n_items`` items on the current nodes; None if no plan is possible now."""

    def available_resources(self) -> Mapping[str, float]:
        """Return the total resources of the living, not excluded nodes, with at most ``max_gpus`` GPUs."""
        return sum_resources(self.excluded_nodes, self.options.max_gpus)

    def can_run_on(self, cluster: Mapping[str, float]) -> bool:
        """Return True if a cluster with these resources can run every stage; by default that takes a CPU."""
        return cluster.get("CPU", 0.0) > 0

    def require_resources(self) -> Mapping[str, float]:
        """Return ``available_resources``; raise RunFailed if they cannot run every stage."""
        cluster = self.available_resources()
        if not self.can_run_on(cluster):
            raise RunFailed("the nodes that the run needs were lost. Rerun the command once they are back")
        return cluster


class Watch:
    """The observer of a run, which passes the workers' reports to the monitor and keeps the last of each graph."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.reports: list[WorkerReport] = []

    def look(self, report: WorkerReport, progress: Progress) -> None:
        """Pass a report and the progress to the monitor. A subclass may raise RunFailed."""
        self.monitor.look(report, progress)

    def take_last(self, report: WorkerReport, progress: Progress) -> None:
        """Pass the last report of a graph to the monitor and keep it."""
        self.monitor.look(report, progress)
        self.reports.append(report)


@contextmanager
def convert_store_errors(say: Say) -> Iterator[None]:
    """Announce stores that do not answer inside the context, and convert an OSError to RunFailed."""
    with announce_outages(say):
        try:
            yield
        except OSError as error:
            raise RunFailed(describe_cause(error)) from error


def print_options(options: RunOptions, console: Console) -> None:
    """Print the options that differ from their defaults in one line, or "all defaults"."""
    changed_options = " ".join(f"{name}={value}" for name, value in options.list_changed_values().items())
    line = f"configuration: {changed_options or 'all defaults'}"
    console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
