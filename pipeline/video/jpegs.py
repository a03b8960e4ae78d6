"""The pixels of a folder of JPEG frames. Each frame is decoded from its bytes, so that FFmpeg opens no path here."""

from __future__ import annotations

from collections.abc import Iterator

import av
import numpy as np
from numpy.typing import NDArray

from pipeline.errors import VideoFault
from pipeline.video.decoders import Frames
from pipeline.video.frame_folders import FIRST_FRAME, frame_names, frame_rate, read_frame
from pipeline.video.packets import MAX_PIXELS
from pipeline.video.probe import VideoIndex

#: The name by which videos record the decoder of such folders; no other one reads them, whatever is requested.
JPEGS = "pipeline.video.jpegs:JpegDecoder"


def index_frames(path: str) -> VideoIndex:
    """Index a folder of frames; only the first one is decoded, for its shape.

    Raises VideoFault: "unsupported" where the path does not say how many frames a second there are, and what
    ``frame_names`` and ``read_frame`` raise.
    """
    rate = frame_rate(path)
    if rate is None:
        raise VideoFault(
            "unsupported",
            f"{path} is a folder, not a video file; one of JPEG frames says in its path how many a second they are, as "
            "in frames_fps3/NAME",
        )
    names, first = frame_names(path), _decoded(path, FIRST_FRAME)
    return VideoIndex(
        path=path,
        demuxer="",
        stream=0,
        codec="mjpeg",
        width=first.width,
        height=first.height,
        pixel_format=first.format.name,
        fps=rate,
        timestamps=np.arange(1, len(names) + 1) / rate,
        duration_s=(len(names) + 1) / rate,
    )


class JpegDecoder:
    """The ``FrameDecoder`` of JPEG folders; frames of another size than the first one's are scaled to it."""

    version = str(av.__version__)

    def __init__(self, index: VideoIndex) -> None:
        self._index = index
        self._names = frame_names(index.path)

    def read(self, indices: NDArray[np.int64]) -> Iterator[Frames]:
        """Yield frames one by one; see ``FrameDecoder.read``."""
        size = {"width": self._index.width, "height": self._index.height}
        for i in indices.tolist():
            picture = _decoded(self._index.path, self._names[i])
            yield picture.to_ndarray(format="rgb24", interpolation="BICUBIC", **size)[None]

    def close(self) -> None:
        """Release nothing: no file stays open."""


def _decoded(path: str, name: str) -> av.VideoFrame:
    """Decode the picture of a frame. Raises VideoFault, or an error of PyAV's."""
    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.thread_count = 1
    pictures = [*decoder.decode(av.Packet(read_frame(path, name))), *decoder.decode(None)]
    if not pictures:
        raise VideoFault("corrupt", f"{path}/{name} cannot be decoded")
    if pictures[0].width * pictures[0].height > MAX_PIXELS:
        raise VideoFault("unsupported", f"{path}/{name} is larger than {MAX_PIXELS} pixels")
    return pictures[0]
