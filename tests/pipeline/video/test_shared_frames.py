"""Frames in memory that two processes share: the same bytes, and nothing that could end the one who reads them."""

import fcntl
import os

import numpy as np
import pytest

from pipeline.video.shared_frames import Handover, ReceivedFrames, SharedFrames

SHAPE = (3, 4, 6, 3)


def handed_over(shared, received, value, shape=SHAPE):
    """Frames full of ``value`` as the reader gets them."""
    shared.allocate_block(shape)[:] = value
    handover, descriptor = shared.hand_over_block()
    try:
        return received.frames(handover, descriptor, shape), handover
    finally:
        if descriptor is not None:
            os.close(descriptor)


def test_what_is_put_into_the_array_is_what_another_mapping_reads():
    shared = SharedFrames()
    frames = shared.allocate_block(SHAPE)
    frames[:] = np.arange(frames.size, dtype=np.uint8).reshape(SHAPE)
    handover, descriptor = shared.hand_over_block()
    there = ReceivedFrames().frames(handover, descriptor, SHAPE)
    os.close(descriptor)
    assert np.array_equal(there, frames) and there.flags.writeable and there.flags.c_contiguous
    assert not np.shares_memory(there, frames)  # two mappings of the same pages
    frames[0] = 7
    assert (there[0] == 7).all()


def test_memory_is_filled_again_once_nothing_refers_to_its_frames():
    shared, received = SharedFrames(), ReceivedFrames()
    first, told = handed_over(shared, received, 1)
    assert told == Handover(1, True, ())
    second, told = handed_over(shared, received, 2)
    assert told.new and received.list_freed() == []
    part, values = memoryview(first[1:, ::2]), first[2].tolist()
    del first
    assert received.list_freed() == []  # a view is left
    shared.reuse(received.list_freed())
    other, told = handed_over(shared, received, 3)
    assert told.new and part.tolist()[1][0] == values[0]
    del part, second, other
    list_freed = received.list_freed()
    assert sorted(list_freed) == [1, 2, 3] and received.list_freed() == []
    shared.reuse(list_freed)
    third, told = handed_over(shared, received, 4, (1, 4, 6, 3))
    assert not told.new and (third == 4).all()


def test_no_more_memory_is_kept_than_the_next_videos_need():
    shared, received, shape = SharedFrames(), ReceivedFrames(), (1, 3000, 4000, 3)  # 36 MB each
    held = [handed_over(shared, received, n, shape)[0] for n in range(3)]
    del held
    shared.reuse(received.list_freed())
    frames, told = handed_over(shared, received, 9, shape)
    assert not told.new and len(told.dropped) == 1 and (frames == 9).all()
    assert set(received._pieces) == {told.number, *shared._idle}


def test_memory_that_is_smaller_or_could_become_so_is_refused():
    """Reading beyond its end would be a bus error of the actor's."""
    shared, received = SharedFrames(), ReceivedFrames()
    shared.allocate_block(SHAPE)
    handover, descriptor = shared.hand_over_block()
    with pytest.raises(OSError, match="less than"):
        received.frames(handover, descriptor, (600, 4, 6, 3))
    with pytest.raises(OSError, match="less than"):
        received.frames(Handover(8, False, ()), None, SHAPE)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 1)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    os.close(descriptor)
    unsealed = os.memfd_create("frames", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(OSError, match="may shrink"):
        received.frames(Handover(9, True, ()), unsealed, SHAPE)
    os.close(unsealed)
