"""The nodes of a cluster: tasks on a chosen node, free disk space for Ray, and a log of nodes that come and go."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import ray
from ray._private.utils import get_num_cpus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.runner.cluster.disks import RayDisk
from pipeline.runner.stages import Plan
from pipeline.runner.worker_reports import WorkerReport

T = TypeVar("T")
_ANSWER_S = 30.0  # seconds that nodes may take to say how full their disks are
MAX_NAMES = 8  # nodes that a line names


def iter_alive_nodes() -> Iterator[tuple[str, str, Mapping[str, float]]]:
    """Yield (unique name, node id, resources) of each living node."""
    for node in ray.nodes():
        if node["Alive"]:
            yield f"{node['NodeManagerHostname']} {node['NodeID'][:6]}", node["NodeID"], node["Resources"]


def task_on(node_id: str, gpus: int = 0) -> Any:
    """Make the Ray task that calls a function without arguments on one node; it reserves ``gpus`` GPUs and no CPU.

    Use it as ``task_on(node_id).remote(function)``. The call fails if the node is gone.
    """
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(_call).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy, max_retries=0)


def _call(work: Callable[[], T]) -> T:
    """Call ``work`` on the node that Ray placed this on."""
    return work()


def count_cores() -> int:
    """Count the CPUs that this process may use, by its container's limit (as Ray counts) and its affinity."""
    by_affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else sys.maxsize
    return max(1, min(int(_count_cpus()), by_affinity))


def read_fraction_of_cpu() -> float | None:
    """Return the CPU limit of this process's container if it is below one CPU, which Ray counts as none; else None."""
    cpus = _count_cpus()
    return cpus if cpus < 1 else None


def _count_cpus() -> float:
    """Count this machine's CPUs by its container's limit, which may be a fraction."""
    # Ray warns that it truncates the number, which is not worth a line.
    logging.getLogger(get_num_cpus.__module__).addFilter(_is_not_about_fractions)
    return float(get_num_cpus(override_docker_cpu_warning=True, truncate=False))


def _is_not_about_fractions(record: logging.LogRecord) -> bool:
    return "fractional cpus" not in record.getMessage()


class DiskSearch(NamedTuple):
    """The nodes that a search for full disks found, as node id -> host and folder, or host alone.

    Attributes:
        full: nodes with a disk too full for Ray.
        silent: nodes that started no process for the search.
    """

    full: dict[str, str]
    silent: dict[str, str]


def find_known_full_disks(without: Collection[str], reported: Mapping[str, str]) -> dict[str, str]:
    """Return the living nodes known to have a disk too full to start a worker, except ``without``; no node is asked.

    The driver measures the disks of its own node. ``reported`` has the full disks of nodes by the workers' heartbeats,
    node id -> folder.
    """
    own_disk, known = RayDisk.describe_full(), dict(reported)
    if own_disk:
        known[ray.get_runtime_context().get_node_id()] = own_disk
    return {
        node: f"{name} ({known[node]})" for name, node, _ in iter_alive_nodes() if node in known and node not in without
    }


def find_full_disks(
    without: Collection[str] = (), reported: Mapping[str, str] = MappingProxyType({}), *, spilling_failed: bool = False
) -> DiskSearch:
    """Search the living nodes for disks too full for Ray, except ``without``. Waits up to half a minute for the nodes.

    A node whose disk is full may be unable to start the process that would measure it: ``find_known_full_disks`` finds
    some of these nodes.

    Ray frees spilled objects as soon as a run fails. So a lower limit holds if ``spilling_failed`` and no disk is full
    now: a disk counts as full if it has less free space than its node's object store needs.
    """
    full, small = find_known_full_disks(without, reported), dict[str, str]()
    nodes = {node: (name, has) for name, node, has in iter_alive_nodes() if node not in {*without, *full}}
    answers = {node: task_on(node).remote(RayDisk.measure) for node in nodes}
    if answers:
        ray.wait(list(answers.values()), num_returns=len(answers), timeout=_ANSWER_S)
    silent = {node: name for node, (name, _) in nodes.items()}
    for node, answer in answers.items():
        with suppress(ray.exceptions.RayError):
            disk = min(ray.get(answer, timeout=0), key=lambda disk: disk.writable_bytes)
            name, has = nodes[node]
            del silent[node]
            if not disk.writable_bytes:
                full[node] = f"{name} ({disk})"
            elif disk.writable_bytes < has.get("object_store_memory", 0.0):
                small[node] = f"{name} ({disk}, which takes less than the node's object store holds)"
    return DiskSearch(full or (small if spilling_failed else {}), silent)


class NodeLog:
    """The log of a run's nodes: nodes that were lost, joined or replaced, and the workers of each node."""

    def __init__(self, say: Callable[[str], object]) -> None:
        """Start a log whose lines go to ``say``."""
        self._say = say
        self._alive: dict[str, str] | None = None  # at the last look, id -> name
        self._workers: Mapping[str, Mapping[str, int]] = {}  # at the last look, node -> stage -> workers
        self._lost_names: list[str] = []  # lost nodes that no new node has replaced
        self._last_counts: Mapping[str, Mapping[str, int]] = {}  # the workers of each node in the last log line

    def look(self, report: WorkerReport, plan: Plan) -> None:
        """Log the nodes lost or joined since the last call, with the workers that ``report`` counts on them.

        The first call logs no node: it is the state to compare with.
        """
        nodes = {node: (name, has) for name, node, has in iter_alive_nodes()}
        names = {node: name for node, (name, _) in nodes.items()}
        before, self._alive = self._alive or names, names
        for node in [node for node in before if node not in names]:
            workers = _format_counts(report.workers.get(node) or self._workers.get(node, {}))  # Ray may have moved them
            had = f" ({workers})" if workers else ""
            self._say(
                f"note: node {before[node]} was lost{had}. The {plan.wording.item}s that it had in hand run "
                "again on the other nodes"
            )
            self._lost_names.append(before[node])
        for node in [node for node in names if node not in before]:
            name, has = nodes[node]
            size = f"{has.get('CPU', 0.0):g} CPUs, {has.get('GPU', 0.0):g} GPUs"
            if self._lost_names:
                consequence = f"in place of {self._lost_names.pop(0)}. Workers that wait for a node start there"
            else:
                consequence = "and has no workers yet. Unfinished items are rescheduled if that saves time"
            self._say(f"note: node {name} joined ({size}) {consequence}")
        self._workers = report.workers
        self._log_counts(names, plan)

    def _log_counts(self, names: Mapping[str, str], plan: Plan) -> None:
        """Log the workers of each node, once the plan's first workers have started, and on each change.

        ``names`` are the living nodes, id -> name. A cluster of a single node logs nothing.
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
    """Format the workers of each stage: "2 to decode, 1 to encode"."""
    return ", ".join(f"{count} to {stage}" for stage, count in workers.items())
