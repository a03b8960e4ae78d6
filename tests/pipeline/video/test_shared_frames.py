"""Frames in memory that two processes share: the same bytes, and nothing that could end the one who reads them."""

import fcntl
import os
from contextlib import closing

import numpy as np
import pytest

from pipeline.video.shared_frames import SharedFrames, mapped

SHAPE = (3, 4, 6, 3)


def test_what_is_put_into_the_array_is_what_another_mapping_reads():
    with closing(SharedFrames()) as shared:
        frames = shared.allocate(SHAPE)
        frames[:] = np.arange(frames.size, dtype=np.uint8).reshape(SHAPE)
        there = mapped(shared.sealed(), SHAPE)
    assert np.array_equal(there, frames) and there.flags.writeable and there.flags.c_contiguous
    assert not np.shares_memory(there, frames)  # two mappings of the same pages
    frames[0] = 7
    assert (there[0] == 7).all()


def test_a_second_array_takes_the_place_of_the_first():
    """As where the preferred decoder fails half-way."""
    with closing(SharedFrames()) as shared:
        shared.allocate(SHAPE)[:] = 1
        shared.allocate((1, 2, 2, 3))[:] = 2
        assert mapped(shared.sealed(), (1, 2, 2, 3)).tolist() == np.full((1, 2, 2, 3), 2).tolist()


def test_memory_that_is_smaller_or_could_become_so_is_refused():
    """Reading beyond its end would be a bus error of the actor's."""
    with closing(SharedFrames()) as shared:
        shared.allocate(SHAPE)
        with pytest.raises(OSError, match="less than 216 bytes"):
            mapped(shared._descriptor, SHAPE)
        descriptor = shared.sealed()
        with pytest.raises(OSError, match="less than 432 bytes"):
            mapped(descriptor, (6, 4, 6, 3))
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 1)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)


def test_closing_leaves_no_descriptor():
    shared = SharedFrames()
    shared.allocate(SHAPE)
    descriptor = shared.sealed()
    shared.close()
    shared.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
