"""Frames as H.264 files and back, and as one picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

Frames = NDArray[np.uint8]
#: A frame a second, all the same: with ``fps`` 1, or as many frames as the video has, each rendered frame is taken.
FPS = 1
#: One thread and no lookahead by the number of CPUs: the same bytes on every run on a machine. No B-frames: the first
#: frame then is at 0 s without an edit list.
ENCODER = {"crf": "18", "preset": "medium", "bf": "0", "threads": "1", "x264-params": "threads=1:lookahead-threads=1"}
_GAP = 4  # pixels between videos of a picture


def write_mp4(target: Path | io.BytesIO, frames: Frames, encoder: Mapping[str, str] = ENCODER) -> None:
    """Write frames [T,H,W,3] (RGB, even sides) as H.264 in yuv420p."""
    with av.open(target, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=FPS, options=dict(encoder))
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode(None))


def read_mp4(source: Path | io.BytesIO) -> Frames:
    """Decode a video to frames [T,H,W,3] RGB."""
    with av.open(source) as video:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])


def write_picture(path: Path, videos: Sequence[Frames], *, columns: int = 8, scale: int = 2) -> None:
    """Write a PNG with the frames [T,H,W,3] of each video in rows of ``columns``, each pixel ``scale`` large."""
    sheets = [_sheet(frames, columns) for frames in videos]
    gap = np.full((_GAP, sheets[0].shape[1], 3), 255, np.uint8)
    stacked = np.concatenate([part for sheet in sheets for part in (sheet, gap)][:-1])
    picture = np.kron(stacked, np.ones((scale, scale, 1), np.uint8))
    with av.open(path, "w", format="image2", options={"update": "1"}) as out:
        stream = out.add_stream("png", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = *picture.shape[:2], "rgb24"
        out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode(None))


def _sheet(frames: Frames, columns: int) -> Frames:
    """Arrange frames [T,H,W,3] as one picture, ``columns`` in a row, with a grey line between them."""
    count, height, width = frames.shape[:3]
    rows = -(-count // columns)
    full = np.zeros((rows * columns, height, width, 3), np.uint8)
    full[:count] = frames
    full[:, :, 0] = full[:, 0] = 70  # a line between frames
    by_row = full.reshape(rows, columns, height, width, 3).swapaxes(1, 2)
    return by_row.reshape(rows * height, columns * width, 3)
