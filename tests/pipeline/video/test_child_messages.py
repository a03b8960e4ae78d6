"""A value that a decode process sends is taken only if its column may hold it."""

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
from pipeline.video.shared_frames import Handover
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


@pytest.mark.parametrize("name", DECODED)
def test_a_value_is_null_only_where_a_file_may_leave_it_unstated(pipe, video, name):
    if name in NULL:
        assert send(pipe, video, **{name: None}).record == {**video.record, name: None}
    else:
        with pytest.raises(WrongMessage, match=f"^{name} has a wrong value$"):
            send(pipe, video, **{name: None})


def test_a_folder_of_frames_states_neither_transfer_nor_shape_of_pixels(pipe, tmp_path):
    path = write_jpegs(tmp_path / "frames_fps3" / "x", 3)
    video = decode_video(DecodeRequest(path, Sampling(2), KeepSize()))
    assert set(DECODED) - set(video.record) == set(UNSTATED)
    received = send(pipe, video)
    assert received.record == {**video.record, **dict.fromkeys(UNSTATED)}
    assert np.array_equal(received.timestamps, video.timestamps)


@pytest.mark.parametrize("name", DECODED)
def test_a_value_has_the_type_and_the_range_of_its_column(pipe, video, name):
    kind = VIDEO_COLUMNS[name].kind
    for value in VALID[kind]:
        assert send(pipe, video, **{name: value}).record[name] == value
    for value in WRONG[kind]:
        with pytest.raises(WrongMessage, match=f"^{name} has a wrong value$"):
            send(pipe, video, **{name: value})
