"""The disks to which Ray writes on the nodes: their free space, and the search for full ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import ray

from pipeline.runner.cluster.nodes import iter_alive_nodes, make_node_task

_SPILL_VARIABLE, _SPILL_LIMIT = "RAY_local_fs_capacity_threshold", 0.95  # Ray's name and default
MIN_FREE_BYTES = 2**20  # with less, a worker may not even write its log
_ANSWER_S = 30.0  # seconds in which nodes must report how full their disks are
_SPILL_FOLDER = "--fallback_directory="  # an argument of a node's own process of Ray


class RayDisk(NamedTuple):
    """A disk to which Ray writes on one node. As text: its folder and how full it is.

    Attributes:
        limit: the used share above which Ray spills no more objects, and fails.
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
        """The number of bytes that Ray may still write before ``limit``, at least 0."""
        return max(0, self.free - round((1 - self.limit) * self.size))

    def __str__(self) -> str:
        return f"{self.folder}, {self.share:.0%} full"

    @classmethod
    def measure(cls) -> list[RayDisk]:
        """Measure the disks of this process's node: of Ray's session folder, and of its folder for spilled objects.

        Call it in a worker or driver of Ray; only a worker finds the second. Each disk is listed once. A folder that
        cannot be measured is left out, so the list may be empty.
        """
        limit = float(os.environ.get(_SPILL_VARIABLE, _SPILL_LIMIT))
        disks: dict[int, RayDisk] = {}
        for folder in _find_ray_folders():
            with suppress(OSError):  # the folder is gone, or on another machine
                disk = shutil.disk_usage(folder)
                if disk.total:  # some file systems report no size
                    disks.setdefault(os.stat(folder).st_dev, cls(folder, disk.free, disk.total, limit))  # noqa: PTH116
        return list(disks.values())

    @classmethod
    def describe_full(cls) -> str:
        """Describe the first disk of this node with less than MIN_FREE_BYTES free; "" if there is none."""
        return next((str(disk) for disk in cls.measure() if disk.free < MIN_FREE_BYTES), "")


def _find_ray_folders() -> Iterator[str]:
    """Yield the folders that Ray writes to on this node: of its session, and, in a worker, a separate spill folder."""
    if (node := ray._private.worker._global_node) is not None:
        yield node.get_session_dir_path()
    with suppress(OSError):  # a system without /proc: the session's folder is the usual one
        arguments = Path(f"/proc/{os.environ.get('RAY_RAYLET_PID', 'none')}/cmdline").read_text().split("\0")
        yield from (word.removeprefix(_SPILL_FOLDER) for word in arguments if word.startswith(_SPILL_FOLDER))


class DiskSearch(NamedTuple):
    """The result of a search for full disks.

    Attributes:
        full: node id -> text with host and disk, for nodes with a disk too full for Ray.
        silent: node id -> host, for nodes that ran no process for the search.
    """

    full: dict[str, str]
    silent: dict[str, str]


def find_known_full_disks(without: Collection[str], reported: Mapping[str, str]) -> dict[str, str]:
    """Return the living nodes, except ``without``, with a disk known to be full: node id -> text with host and disk.

    Besides the ``reported`` disks (node id -> description), the driver measures those of its own node; less than
    MIN_FREE_BYTES is full.
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
    """Search the living nodes, except ``without``, for disks that are too full for Ray; wait up to half a minute.

    A task on each node measures its disks; a disk is full if Ray may write nothing more to it. A node whose task fails
    or does not answer is ``silent``: its disk may be too full to start the task. Nodes that are known already
    (``find_known_full_disks``) are not asked.

    Args:
        reported: known full disks, node id -> description.
        spilling_failed: True if Ray has just failed to spill objects. If no disk is full now, a disk counts as full
            that has less room than its node's object store has bytes.
    """
    full = find_known_full_disks(without, reported)
    small = dict[str, str]()
    nodes = {node: (name, resources) for name, node, resources in iter_alive_nodes() if node not in {*without, *full}}
    answers = {node: make_node_task(node).remote(RayDisk.measure) for node in nodes}
    if answers:
        ray.wait(list(answers.values()), num_returns=len(answers), timeout=_ANSWER_S)
    silent = {node: name for node, (name, _) in nodes.items()}
    for node, answer in answers.items():
        with suppress(ray.exceptions.RayError):
            disks = ray.get(answer, timeout=0)
            name, resources = nodes[node]
            del silent[node]
            if not disks:  # none can be measured there
                continue
            disk = min(disks, key=lambda disk: disk.writable_bytes)
            if not disk.writable_bytes:
                full[node] = f"{name} ({disk})"
            elif disk.writable_bytes < resources.get("object_store_memory", 0.0):
                small[node] = f"{name} ({disk}, which takes less than the node's object store holds)"
    return DiskSearch(full or (small if spilling_failed else {}), silent)
