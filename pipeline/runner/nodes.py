"""The nodes of a cluster: tasks on a chosen node, free disk space for Ray, and a log of nodes that come and go."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ray
from ray._private.utils import get_num_cpus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.runner.heartbeats import WorkerReport
from pipeline.runner.stages import Plan

T = TypeVar("T")
_SPILL_VARIABLE, _SPILL_LIMIT = "RAY_local_fs_capacity_threshold", 0.95  # Ray's name and default
_SPILL_FOLDER = "--fallback_directory="  # an argument of a node's own process of Ray
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


class RayDisk(NamedTuple):
    """A disk to which Ray writes on one node.

    Attributes:
        folder: of Ray on this disk.
        free, size: bytes.
        limit: the used share above which Ray spills nothing more, and fails.
    """

    folder: str
    free: int
    size: int
    limit: float

    @property
    def share(self) -> float:
        """The used share of the disk, 0 to 1."""
        return 1 - self.free / self.size

    @property
    def writable_bytes(self) -> int:
        """Bytes that Ray may still write."""
        return max(0, self.free - round((1 - self.limit) * self.size))

    def __str__(self) -> str:
        return f"{self.folder}, {self.share:.0%} full"

    @classmethod
    def measure(cls) -> list[RayDisk]:
        """Measure the disks of the node that this process, a worker or a driver of Ray, runs on.

        These are the disks of Ray's session folder and of the folder to which Ray spills objects, each disk once.
        """
        limit = float(os.environ.get(_SPILL_VARIABLE, _SPILL_LIMIT))
        disks: dict[int, RayDisk] = {}
        for folder in _find_ray_folders():
            with suppress(OSError):  # it is gone, or no folder of this machine
                disk = shutil.disk_usage(folder)
                disks.setdefault(os.stat(folder).st_dev, cls(folder, disk.free, disk.total, limit))  # noqa: PTH116
        return list(disks.values())


def _find_ray_folders() -> Iterator[str]:
    """Yield the folders that Ray writes to on this node: its session folder and its spill folder."""
    yield ray._private.worker._global_node.get_session_dir_path()
    with suppress(OSError):  # a system without /proc: the session's folder is the usual one
        arguments = Path(f"/proc/{os.environ.get('RAY_RAYLET_PID', 'none')}/cmdline").read_text().split("\0")
        yield from (word.removeprefix(_SPILL_FOLDER) for word in arguments if word.startswith(_SPILL_FOLDER))


def find_full_disks(without: Collection[str] = (), *, spilling_failed: bool = False) -> dict[str, str]:
    """Return the living nodes with a disk too full for Ray, except ``without``: node id -> host and folder.

    Waits up to half a minute for the nodes; a node that does not answer is left out. Ray frees spilled objects as soon
    as a run fails. So a lower limit holds if ``spilling_failed`` and no disk is full now: a disk counts as full if it
    has less free space than its node's object store needs.
    """
    nodes = {node: (name, has) for name, node, has in iter_alive_nodes() if node not in without}
    answers = {node: task_on(node).remote(RayDisk.measure) for node in nodes}
    ray.wait(list(answers.values()), num_returns=max(1, len(answers)), timeout=_ANSWER_S)
    full, small = dict[str, str](), dict[str, str]()
    for node, answer in answers.items():
        with suppress(ray.exceptions.RayError):
            disk = min(ray.get(answer, timeout=0), key=lambda disk: disk.writable_bytes)
            name, has = nodes[node]
            if not disk.writable_bytes:
                full[node] = f"{name} ({disk})"
            elif disk.writable_bytes < has.get("object_store_memory", 0.0):
                small[node] = f"{name} ({disk}, which takes less than the node's object store holds)"
    return full or (small if spilling_failed else {})


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
