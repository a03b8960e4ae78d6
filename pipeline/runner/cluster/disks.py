"""The disks to which Ray writes on its nodes: free space, and whether Ray can still write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import ray

from pipeline.runner.cluster.nodes import iter_alive_nodes, task_on

_SPILL_VARIABLE, _SPILL_LIMIT = "RAY_local_fs_capacity_threshold", 0.95  # Ray's name and default
MIN_FREE_BYTES = 2**20  # with less, a worker may not even write its log
_ANSWER_S = 30.0  # seconds that nodes may take to say how full their disks are
_SPILL_FOLDER = "--fallback_directory="  # an argument of a node's own process of Ray


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
                if disk.total:  # some file systems do not say
                    disks.setdefault(os.stat(folder).st_dev, cls(folder, disk.free, disk.total, limit))  # noqa: PTH116
        return list(disks.values())

    @classmethod
    def describe_full(cls) -> str:
        """Describe the disk of this node that is so full that no worker can start; "" if there is none."""
        return next((str(disk) for disk in cls.measure() if disk.free < MIN_FREE_BYTES), "")


def _find_ray_folders() -> Iterator[str]:
    """Yield the folders that Ray writes to on this node: its session folder and its spill folder.

    Only a worker of Ray knows a spill folder elsewhere.
    """
    if (node := ray._private.worker._global_node) is not None:
        yield node.get_session_dir_path()
    with suppress(OSError):  # a system without /proc: the session's folder is the usual one
        arguments = Path(f"/proc/{os.environ.get('RAY_RAYLET_PID', 'none')}/cmdline").read_text().split("\0")
        yield from (word.removeprefix(_SPILL_FOLDER) for word in arguments if word.startswith(_SPILL_FOLDER))


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
    own_disk = RayDisk.describe_full()
    known = dict(reported)
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
    full = find_known_full_disks(without, reported)
    small = dict[str, str]()
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
