"""The nodes of a cluster: tasks on a given node, the CPUs of this machine, and a log of nodes that come and go."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import ray
from ray._private.utils import get_num_cpus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.runner.stages import Plan
from pipeline.runner.worker_reports import WorkerReport

T = TypeVar("T")
MAX_NAMES = 8  # the maximum number of nodes in a line


def iter_alive_nodes() -> Iterator[tuple[str, str, Mapping[str, float]]]:
    """Yield (name, node id, resources) of each living node. The name, host and start of the id, is unique."""
    for node in ray.nodes():
        if node["Alive"]:
            yield f"{node['NodeManagerHostname']} {node['NodeID'][:6]}", node["NodeID"], node["Resources"]


def make_node_task(node_id: str, gpus: int = 0) -> Any:
    """Return a Ray task whose ``.remote(function)`` calls a function without arguments on the node.

    It reserves ``gpus`` GPUs and no CPU, is not retried, and fails if the node is gone.
    """
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(_call).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy, max_retries=0)


def _call(work: Callable[[], T]) -> T:
    """Call ``work`` and return its result; this is the body of a ``make_node_task`` task."""
    return work()


def count_cores() -> int:
    """Return the number of CPUs that this process may use, by its container's limit and its affinity; at least 1."""
    by_affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else sys.maxsize
    return max(1, min(int(_count_cpus()), by_affinity))


def read_fraction_of_cpu() -> float | None:
    """Return the container's CPU limit if it is below one CPU, which Ray counts as none; otherwise None."""
    cpus = _count_cpus()
    return cpus if cpus < 1 else None


def _count_cpus() -> float:
    """Return the number of this machine's CPUs by its container's limit, which may be a fraction."""
    # Ray warns that it truncates the number, which users need not know.
    logging.getLogger(get_num_cpus.__module__).addFilter(_is_not_about_fractions)
    return float(get_num_cpus(override_docker_cpu_warning=True, truncate=False))


def _is_not_about_fractions(record: logging.LogRecord) -> bool:
    return "fractional cpus" not in record.getMessage()


class NodeLog:
    """The log of a run's nodes: lines about nodes that were lost or joined, and about each node's workers."""

    def __init__(self, say: Callable[[str], object]) -> None:
        """Start a log that passes its lines to ``say``."""
        self._say = say
        self._alive: dict[str, str] | None = None  # at the last look, id -> name
        self._workers: Mapping[str, Mapping[str, int]] = {}  # at the last look, node -> stage -> workers
        self._lost_names: list[str] = []  # lost nodes that no new node has replaced
        self._last_counts: Mapping[str, Mapping[str, int]] = {}  # the workers of each node in the last log line

    def look(self, report: WorkerReport, plan: Plan) -> None:
        """Log the nodes that were lost or have joined since the last call, and each node's workers if they changed.

        A node that joins is reported as the replacement of a lost node while there is one. The first call logs no
        nodes.
        """
        nodes = {node: (name, resources) for name, node, resources in iter_alive_nodes()}
        names = {node: name for node, (name, _) in nodes.items()}
        before, self._alive = self._alive or names, names
        for node in [node for node in before if node not in names]:
            workers = _format_counts(report.workers.get(node) or self._workers.get(node, {}))  # Ray may have moved them
            lost_workers = f" ({workers})" if workers else ""
            self._say(
                f"note: node {before[node]} was lost{lost_workers}. The {plan.wording.item}s that it had in hand run "
                "again on the other nodes"
            )
            self._lost_names.append(before[node])
        for node in [node for node in names if node not in before]:
            name, resources = nodes[node]
            size = f"{resources.get('CPU', 0.0):g} CPUs, {resources.get('GPU', 0.0):g} GPUs"
            if self._lost_names:
                consequence = f"in place of {self._lost_names.pop(0)}. Workers that wait for a node start there"
            else:
                consequence = "and has no workers yet. Unfinished items are rescheduled if that saves time"
            self._say(f"note: node {name} joined ({size}) {consequence}")
        self._workers = report.workers
        self._log_counts(names, plan)

    def _log_counts(self, names: Mapping[str, str], plan: Plan) -> None:
        """Log the workers of each node if all planned workers run and the numbers differ from the last line.

        Workers of the last of several stages do not count, since they start later. With fewer than two nodes
        (``names``, id -> name) nothing is logged.
        """
        early = list(plan.pools.items())[: max(1, len(plan.pools) - 1)]  # writers start when there is something to do
        by_node = {
            names[node]: counts
            for node, workers in sorted(self._workers.items())
            if node in names and (counts := {stage: workers[stage] for stage, _ in early if stage in workers})
        }
        if len(names) < 2 or any(sum(workers.get(stage, 0) for workers in by_node.values()) < n for stage, n in early):
            return
        idle = [name for name in names.values() if name not in by_node]
        parts = [f"{name}: {_format_counts(workers)}" for name, workers in by_node.items()] + [
            f"{name}: none" for name in idle
        ]
        more = f"; and {len(parts) - MAX_NAMES} more nodes" if len(parts) > MAX_NAMES else ""
        line = f"workers of each node: {'; '.join(parts[:MAX_NAMES])}{more}"
        if by_node != self._last_counts:
            self._last_counts = by_node
            self._say(line)


def _format_counts(workers: Mapping[str, int]) -> str:
    """Format the number of workers of each stage: "2 to decode, 1 to encode"."""
    return ", ".join(f"{count} to {stage}" for stage, count in workers.items())
