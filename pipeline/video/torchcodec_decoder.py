"""torchcodec, for those who ask for it. It needs FFmpeg's shared libraries on the machine."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray
from torchcodec.decoders import VideoDecoder

from pipeline.video.decoders import Frames, chunk_length, wrong_elsewhere
from pipeline.video.probe import IndexMismatch, VideoIndex


class TorchcodecDecoder:
    """torchcodec on one thread of a CPU, with an index of its own, which it makes by reading the file once more.

    Raises RuntimeError for what it cannot read, and IndexMismatch for files whose frames it is known to get wrong, or
    where it counts other frames than the index.
    """

    version = version("torchcodec")

    def __init__(self, index: VideoIndex) -> None:
        reason = wrong_elsewhere(index)
        if reason:
            raise IndexMismatch(reason)
        self._chunk = chunk_length(index.height, index.width)
        self._video = VideoDecoder(
            index.path,
            stream_index=index.stream,
            dimension_order="NHWC",
            num_ffmpeg_threads=1,
            device="cpu",
            seek_mode="exact",
        )
        if len(self._video) != len(index.timestamps):
            raise IndexMismatch(f"torchcodec counts {len(self._video)} frames, the file {len(index.timestamps)}")

    def read(self, indices: NDArray[np.int64]) -> Iterator[Frames]:
        """See ``FrameDecoder.read``."""
        for start in range(0, len(indices), self._chunk):
            yield self._video.get_frames_at(indices[start : start + self._chunk].tolist()).data.numpy()

    def close(self) -> None:
        """Release the file."""
        del self._video
