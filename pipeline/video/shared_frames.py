"""Shared memory for frames, which a decode process fills and its parent reads without a copy."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import tempfile
import weakref
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from pipeline.video.decoders import Frames

_MAX_IDLE_BYTES = 64 * 2**20  # bytes of memory kept for the next videos
_AT_ONCE = getattr(mmap, "MAP_POPULATE", 0)  # map all pages in one call instead of one page fault each


class Handover(NamedTuple):
    """The message about the memory that holds a video's frames.

    Attributes:
        new: True if the block's descriptor follows.
        dropped: numbers of blocks that the writer will not use again.
    """

    number: int
    new: bool
    dropped: tuple[int, ...]


class SharedFrames:
    """The writer's side, in the decode process: one block of memory per video, reused when the reader frees it."""

    def __init__(self) -> None:
        """Start without memory."""
        self._idle: dict[int, mmap.mmap] = {}
        self._lent: dict[int, mmap.mmap] = {}
        self._n_pieces = 0
        self._current: tuple[int, mmap.mmap] | None = None
        self._descriptor: int | None = None  # of the current block, if it is new to the reader

    def reuse(self, numbers: list[int]) -> None:
        """Mark these blocks, which the reader has freed, as idle; KeyError if one was not handed over."""
        for number in numbers:
            self._idle[number] = self._lent.pop(number)

    def allocate_block(self, shape: tuple[int, ...]) -> Frames:
        """Return a uint8 array for [T,h,w,3] frames in the smallest idle block that fits, or in a new block.

        Fill the array, then call ``hand_over_block``. A second call before that takes the first array's block back, or
        drops it if it is new.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)  # the reader never got it, so a new block is dropped
        elif self._current is not None:
            self._idle[self._current[0]] = self._current[1]
        self._current = self._descriptor = None
        size = math.prod(shape)
        number = min((n for n, m in self._idle.items() if len(m) >= size), key=lambda n: len(self._idle[n]), default=-1)
        if number >= 0:
            self._current = number, self._idle.pop(number)
        else:
            self._n_pieces += 1
            self._descriptor = create_memory(max(1, size))
            self._current = self._n_pieces, mmap.mmap(self._descriptor, 0)
        return np.frombuffer(self._current[1], np.uint8, size).reshape(shape)

    def hand_over_block(self) -> tuple[Handover, int | None]:
        """Give the block of the last ``allocate_block``, which must have been called, to the reader.

        Idle blocks beyond 64 MiB together are given up, the largest first.

        Returns:
            The message for the reader, and the descriptor of a new block, which the caller closes; None for a known
            block.
        """
        assert self._current is not None
        (number, memory), descriptor = self._current, self._descriptor
        self._current = self._descriptor = None
        self._lent[number] = memory
        dropped_numbers = []
        while sum(map(len, self._idle.values())) > _MAX_IDLE_BYTES:
            dropped_numbers.append(max(self._idle, key=lambda n: len(self._idle[n])))
            del self._idle[dropped_numbers[-1]]
        return Handover(number, descriptor is not None, tuple(dropped_numbers)), descriptor


class ReceivedFrames:
    """The reader's side, in the parent process. A block is free once nothing refers to its array."""

    def __init__(self) -> None:
        self._pieces: dict[int, mmap.mmap] = {}
        self._freed: list[int] = []

    def close(self) -> None:
        """Drop all blocks; the memory is released once no array refers to it."""
        self._pieces.clear()

    def list_freed(self) -> list[int]:
        """Return the numbers of the blocks that became free since the last call."""
        freed = self._freed[:]
        del self._freed[: len(freed)]
        return freed

    def frames(self, handover: Handover, descriptor: int | None, shape: tuple[int, ...]) -> Frames:
        """Return the [T,h,w,3] frames of a video without a copy, and forget the blocks that the writer gave up.

        When nothing refers to the array any more, its block is listed as free.

        Args:
            descriptor: of a new block; it stays the caller's. None for a known block.

        Raises:
            OSError: the block is unknown or smaller than the frames, or a new block is larger or may shrink.
        """
        size = math.prod(shape)
        for number in handover.dropped:
            self._pieces.pop(number, None)
        if descriptor is not None:
            # On a platform without seals, it is a file that belongs to this process's user.
            has_seals = hasattr(os, "memfd_create")
            if has_seals and not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError("the decode process handed over frames in memory that may shrink")
            if os.fstat(descriptor).st_size > max(1, size):  # mapping it would fill all of it
                raise OSError(f"the decode process handed over more than {size:,} bytes of frames")
            self._pieces[handover.number] = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | _AT_ONCE)
        memory = self._pieces.get(handover.number)
        if memory is None or len(memory) < size:
            raise OSError(f"the decode process handed over less than {size:,} bytes of frames")
        frames = np.frombuffer(memory, np.uint8, size)  # all views have this array for their base
        weakref.finalize(frames, self._freed.append, handover.number)
        return frames.reshape(shape)


def create_memory(size: int) -> int:
    """Create ``size`` bytes of anonymous memory and return its descriptor.

    It is sealed: it cannot shrink under a reader, and writes beyond its end fail. Platforms without such memory get an
    unnamed temporary file, and no seals.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    with suppress(AttributeError, OSError):  # not every platform has seals
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor
