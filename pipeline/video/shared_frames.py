"""Frames in memory that a decode process fills and the process that asked for them reads, without a copy between."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import tempfile
from contextlib import suppress

import numpy as np

from pipeline.video.decoders import Frames


class SharedFrames:
    """The memory for the frames of one video, in the process that decodes it. Close it after use."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def allocate(self, shape: tuple[int, ...]) -> Frames:
        """Return an array for [T,h,w,3] frames; one that was given before is no longer shared."""
        self.close()
        self._descriptor = _file_in_memory()
        os.ftruncate(self._descriptor, max(1, math.prod(shape)))
        return np.frombuffer(mmap.mmap(self._descriptor, 0), np.uint8, math.prod(shape)).reshape(shape)

    def sealed(self) -> int:
        """Return the descriptor of the memory, which from now on never shrinks under whoever maps it."""
        assert self._descriptor is not None
        with suppress(AttributeError, OSError):  # not every platform has seals
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return self._descriptor

    def close(self) -> None:
        """Give the memory back, once nothing maps it. May be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def mapped(descriptor: int, shape: tuple[int, ...]) -> Frames:
    """Return the [T,h,w,3] frames in the memory of ``descriptor``.

    Raises OSError where it is smaller, or could become so: reading would end this process then.
    """
    size = math.prod(shape)
    if os.fstat(descriptor).st_size < size or not _keeps_its_size(descriptor):
        raise OSError(f"the decode process handed over less than {size:,} bytes of frames")
    memory = mmap.mmap(descriptor, max(1, size), flags=mmap.MAP_SHARED | _AT_ONCE)
    return np.frombuffer(memory, np.uint8, size).reshape(shape)


_AT_ONCE = getattr(mmap, "MAP_POPULATE", 0)  # one call for all pages, not a fault for each


def _keeps_its_size(descriptor: int) -> bool:
    if not hasattr(os, "memfd_create"):
        return True  # a file of this process's user, on a platform without seals
    return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)


def _file_in_memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
