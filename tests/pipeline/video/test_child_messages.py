"""What a decode process sends: values that their columns may hold, and frames in memory that both processes share."""

import fcntl
import os
import time
from contextlib import closing
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest

from pipeline.rows import VIDEO_COLUMNS
from pipeline.video.child_messages import VideoMessage, WrongMessage, receive_message, send_video
from pipeline.video.decode import DecodedVideo, DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from pipeline.video.shared_frames import Handover, ReceivedFrames, SharedFrames
from tests.builders.clips import KeepSize, write_jpegs

UNSTATED = ("color_transfer", "sample_aspect_ratio")  # by many files, and by every folder of frames
NULL = (*UNSTATED, "frames_by_rate")  # and where frames do not go by a rate
DECODED = [name for name, column in VIDEO_COLUMNS.items() if column.decoded]
VALID = {"string": ["", "x"], "float64": [-0.5, 1e300], "int32": [0, 2**31 - 1]}
VALID |= {"int64": [0, 2**63 - 1], "uint64": [0, 2**64 - 1]}
WRONG = {"string": [7, 1.5, True, ["x"], {}], "float64": ["1.5", 1, True, [], float("nan"), float("inf")]}
WRONG |= {f"int{bits}": ["1", 1.5, True, [1], -1, 2 ** (bits - 1)] for bits in (32, 64)}
WRONG |= {"uint64": ["1", 1.5, True, [1], -1, 2**64]}


@pytest.fixture
def pipe():
    ends = Pipe()
    with closing(ends[0]), closing(ends[1]):
        yield ends


@pytest.fixture(scope="module")
def video(clip) -> DecodedVideo:
    return decode_video(DecodeRequest(clip, Sampling(2), KeepSize()))


def send(pipe: tuple[Connection, Connection], video: DecodedVideo, **values: object) -> DecodedVideo:
    """Send a video with other values in its record; return what is received, without its frames."""
    send_video(pipe[0], replace(video, record={**video.record, **values}), Handover(1, True, ()))
    message = receive_message(pipe[1], time.monotonic() + 60, 2**30)
    assert isinstance(message, VideoMessage)
    return message.video


def test_a_folder_of_frames_states_neither_transfer_nor_shape_of_pixels(pipe, tmp_path):
    path = write_jpegs(tmp_path / "frames_fps3" / "x", 3)
    video = decode_video(DecodeRequest(path, Sampling(2), KeepSize()))
    assert set(DECODED) - set(video.record) == set(UNSTATED)
    received = send(pipe, video)
    assert received.record == {**video.record, **dict.fromkeys(UNSTATED)}
    assert np.array_equal(received.timestamps, video.timestamps)


@pytest.mark.parametrize("name", DECODED)
def test_a_value_has_the_type_and_the_range_of_its_column_and_is_null_where_a_file_may_leave_it_unstated(
    pipe, video, name
):
    kind, null = VIDEO_COLUMNS[name].kind, [None]
    for value in VALID[kind] + null * (name in NULL):
        assert send(pipe, video, **{name: value}).record == {**video.record, name: value}
    for value in WRONG[kind] + null * (name not in NULL):
        with pytest.raises(WrongMessage, match=f"^{name} has a wrong value$"):
            send(pipe, video, **{name: value})


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
