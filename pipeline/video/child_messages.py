"""The messages from a decode process to its parent: JSON and arrays of numbers, which cannot carry code.

A hostile video may have taken over the decode process, so the parent checks every value and limits sizes and waits.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import numpy as np

from pipeline.errors import FAULTS, VideoFault, make_printable
from pipeline.rows import VIDEO_COLUMNS, Column, VideoRecord
from pipeline.video.decode import DecodedVideo
from pipeline.video.shared_frames import Handover

_MAX_BYTES = 2**16  # bytes of a message's JSON, in which each text has 1 KB at most
_MAX_FRAMES = 2**22  # frames of a video, whose indices and times are in its message
_MAX_MESSAGE_BYTES = _MAX_BYTES + 16 * _MAX_FRAMES
_MAX_WAIT_S = 1e6  # a pipe can be polled for 2^31 ms at most
_COLUMNS: Mapping[str, Column] = {name: column for name, column in VIDEO_COLUMNS.items() if column.decoded}
_BITS = {"int32": 31, "int64": 63, "uint64": 64}  # bits of nonnegative integers, by the type of their column


class WrongMessage(Exception):  # noqa: N818
    """The decode process sent data that is not a valid message."""


class VideoMessage(NamedTuple):
    """The message about a decoded video.

    Attributes:
        video: the video with an empty array in place of its frames.
        shape: the shape [T, h, w, 3] of its frames.
    """

    video: DecodedVideo
    shape: tuple[int, int, int, int]
    handover: Handover


def send_text(pipe: Connection, text: str) -> None:
    """Send a text to the parent: first a note about the process, later the name of each decoder."""
    _send(pipe, {"text": text})


def send_fault(pipe: Connection, fault: VideoFault) -> None:
    """Send the class, message and decoder of a video's fault, but no other attributes."""
    _send(pipe, {"fault": [fault.fault_class, fault.message, fault.backend]})


def send_video(pipe: Connection, video: DecodedVideo, handover: Handover) -> None:
    """Send a decoded video without its frames, which the parent reads from shared memory.

    Only the columns that decoding determines are sent (``Column.decoded``); missing ones are sent as null, and texts
    are made printable.
    """
    values = ((name, video.record.get(name)) for name in _COLUMNS)
    fields = {name: make_printable(value) if isinstance(value, str) else value for name, value in values}
    arrays = np.asarray(video.frame_indices, "<i8").tobytes() + np.asarray(video.timestamps, "<f8").tobytes()
    message = {"video": fields, "shape": video.frames.shape, "handover": handover, "cpu_s": video.cpu_s}
    _send(pipe, message, arrays)


def _send(pipe: Connection, message: Mapping[str, Any], arrays: bytes = b"") -> None:
    """Send a message as one line of JSON, followed by the bytes of its arrays."""
    pipe.send_bytes(json.dumps(message, default=np.generic.item).encode() + b"\n" + arrays)


def receive_message(pipe: Connection, deadline: float, max_frame_bytes: int) -> str | VideoFault | VideoMessage:
    """Receive and check the next message of a decode process.

    Args:
        deadline: the ``time.monotonic()`` at which waiting ends, even if part of the message has arrived.
        max_frame_bytes: the largest allowed size of all frames of a video together.

    Returns:
        A text, made printable; the fault of a video, which is not raised; or the message about a decoded video.

    Raises:
        TimeoutError: the message is not complete at the deadline.
        EOFError, OSError: the pipe has ended.
        WrongMessage: the data is not a valid message, its JSON exceeds 64 KiB, or a shape exceeds 4 million frames or
            ``max_frame_bytes``.
    """
    try:
        (size,) = struct.unpack("!i", _read(pipe, deadline, 4))
        if not 0 <= size <= _MAX_MESSAGE_BYTES:
            raise WrongMessage(f"its length is {size}, not 0 to {_MAX_MESSAGE_BYTES}")
        line, _, arrays = _read(pipe, deadline, size).partition(b"\n")
        if len(line) > _MAX_BYTES:
            raise WrongMessage(f"its text has {len(line)} bytes, more than {_MAX_BYTES}")
        match json.loads(line):
            case {"text": str(text)}:
                return make_printable(text)
            case {"fault": [str(fault_class), str(message), str() | None as backend]} if fault_class in FAULTS:
                return VideoFault(fault_class, message, backend=backend)  # type: ignore[arg-type]
            case {"video": dict(fields), "shape": [*shape], "handover": [*handover], "cpu_s": float(cpu_s)}:
                if not 0 <= cpu_s < math.inf:
                    raise WrongMessage("its CPU seconds are not a number of 0 or more")
                checked_shape = _check_shape(shape, max_frame_bytes)
                video = replace(_make_video(fields, checked_shape[0], arrays), cpu_s=cpu_s)
                return VideoMessage(video, checked_shape, _check_handover(handover))
    except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
        raise WrongMessage(f"{type(error).__name__}: {error}") from error
    raise WrongMessage("its kind is unknown")


def wait_until_readable(pipe: Connection, deadline: float) -> None:
    """Wait until the pipe has data to read or has ended.

    Raises:
        TimeoutError: neither happens before ``deadline`` (``time.monotonic()``), or within 10^6 s.
    """
    if not pipe.poll(min(_MAX_WAIT_S, max(0.0, deadline - time.monotonic()))):
        raise TimeoutError


def _read(pipe: Connection, deadline: float, size: int) -> bytes:
    """Read exactly ``size`` bytes from the pipe.

    Raises:
        TimeoutError: they are not complete at the deadline.
        EOFError, OSError: the pipe has ended.
    """
    data = bytearray()
    while len(data) < size:
        wait_until_readable(pipe, deadline)
        chunk = os.read(pipe.fileno(), size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _is_int(value: object, least: int, end: int) -> bool:
    """Return True if ``value`` is an int (not a bool) in [least, end)."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < end


def _check_shape(shape: list[Any], max_frame_bytes: int) -> tuple[int, int, int, int]:
    """Return the shape [T, h, w, 3] of a video's frames as a tuple.

    Raises:
        WrongMessage: it is not four positive integers that end in 3, or exceeds _MAX_FRAMES or ``max_frame_bytes``.
    """
    if len(shape) != 4 or not all(_is_int(n, 1, 2**31) for n in shape) or shape[3] != 3 or shape[0] > _MAX_FRAMES:
        raise WrongMessage("the shape of its frames is invalid")
    if math.prod(shape) > max_frame_bytes:
        raise WrongMessage(f"its frames have {math.prod(shape)} bytes, more than {max_frame_bytes}")
    n_frames, height, width, channels = shape
    return n_frames, height, width, channels


def _check_handover(handover: list[Any]) -> Handover:
    """Convert the list [number, new, dropped] of a message to a Handover; raise WrongMessage if it is invalid."""
    match handover:
        case [int(number), bool(new), [*dropped]] if all(_is_int(n, 0, 2**63) for n in [number, *dropped]):
            return Handover(number, new, tuple(dropped))
    raise WrongMessage("it does not say which memory has the frames")


def _make_video(fields: dict[Any, Any], n_frames: int, arrays: bytes) -> DecodedVideo:
    """Make the video of a message, with an empty array in place of its frames and printable texts.

    Args:
        arrays: T frame indices (int64), then T timestamps (float64), both little-endian.

    Raises:
        WrongMessage: a column is missing, unknown or invalid; ``arrays`` has another length; indices are negative or
            descend; or a timestamp is not finite.
    """
    if fields.keys() != _COLUMNS.keys():
        raise WrongMessage("its columns are not those of a video")
    if len(arrays) != 16 * n_frames:
        raise WrongMessage(f"its arrays have {len(arrays)} bytes, not 16 for each of {n_frames} frames")
    for name, value in fields.items():
        if not _is_valid(value, _COLUMNS[name]):
            raise WrongMessage(f"{name} has a wrong value")
    indices = np.frombuffer(arrays, "<i8", n_frames)
    timestamps = np.frombuffer(arrays, "<f8", n_frames, offset=8 * n_frames)
    if indices[0] < 0 or (np.diff(indices) < 0).any() or not np.isfinite(timestamps).all():
        raise WrongMessage("its frames are not numbered in order, or have no times")
    texts = {name: make_printable(value) for name, value in fields.items() if isinstance(value, str)}
    no_frames = np.empty((0, 0, 0, 3), np.uint8)
    record = cast(VideoRecord, fields | texts)
    return DecodedVideo(no_frames, indices.astype(np.int64), timestamps.astype(np.float64), record)


def _is_valid(value: object, column: Column) -> bool:
    """Return True if the decode process may send this value of a column.

    The value must have the column's type and fit into it. Integers must not be negative, floats must be finite, and
    True and False are not valid. None is valid only in a column that ``may_be_unstated``.
    """
    match value:
        case None:
            return column.may_be_unstated
        case str():
            return column.kind == "string"
        case float():
            return column.kind == "float64" and math.isfinite(value)
    return column.kind in _BITS and _is_int(value, 0, 2 ** _BITS[column.kind])
