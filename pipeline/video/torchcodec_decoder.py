"""The decoder with torchcodec, for users who request it. It needs FFmpeg's shared libraries on the machine."""

from __future__ import annotations

from importlib.metadata import version
from typing import ClassVar

from pipeline.video.decoders import Frames, LibraryDecoder
from pipeline.video.probe import IndexMismatch, Orientation, VideoIndex

try:
    from torchcodec.decoders import VideoDecoder
except RuntimeError as error:  # torchcodec's own message is several pages long
    raise ImportError("torchcodec finds no shared libraries of FFmpeg here: apt-get install ffmpeg") from error


# The degrees that torchcodec finds in the container -> its rotation of frames.
_TURNS = {
    0: Orientation(),
    90: Orientation(transpose=True, flip_rows=True),
    180: Orientation(flip_rows=True, flip_columns=True),
    270: Orientation(transpose=True, flip_columns=True),
}


class TorchcodecDecoder(LibraryDecoder):
    """The decoder with torchcodec on one CPU thread. It raises RuntimeError for files that torchcodec cannot read."""

    version = version("torchcodec")
    device: ClassVar[str] = "cpu"

    def open(self, index: VideoIndex) -> VideoDecoder:
        """Open the file with torchcodec, which reads all of it to count its frames.

        Raises:
            IndexMismatch: torchcodec would rotate frames differently: it ignores mirroring, and rotations that only the
                codec states.
        """
        options = {"dimension_order": "NHWC", "num_ffmpeg_threads": 1, "device": self.device, "seek_mode": "exact"}
        video = VideoDecoder(index.path, stream_index=index.stream, **options)
        if _TURNS.get(round(video.metadata.rotation or 0) % 360) != index.orientation:
            raise IndexMismatch("torchcodec rotates its frames differently")
        return video

    def frames(self, indices: list[int]) -> Frames:
        """Return the frames [k,H,W,3] with the numbers ``indices``, in host memory."""
        frames: Frames = self._video.get_frames_at(indices).data.cpu().numpy()
        return frames
