"""The disks to which Ray writes on a node: free space, and whether Ray can still write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import ray

_SPILL_VARIABLE, _SPILL_LIMIT = "RAY_local_fs_capacity_threshold", 0.95  # Ray's name and default
MIN_FREE_BYTES = 2**20  # with less, a worker may not even write its log
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
