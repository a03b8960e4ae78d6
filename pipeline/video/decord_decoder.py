"""decord, for those who ask for it: it decodes more frames than are needed, and reads some files wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import decord
import numpy as np
from numpy.typing import NDArray

from pipeline.video.decoders import Frames, chunk_length, wrong_elsewhere
from pipeline.video.packets import PacketInfo, VideoPackets
from pipeline.video.probe import IndexMismatch, Orientation, VideoIndex

_PARAMETERS = {"h264": (7, 0x1F, 0), "hevc": (33, 0x3F, 1)}  # how a unit's type says so: value, mask, shift


class DecordDecoder:
    """decord, one thread. It opens files without saying which demuxer, so only sniffed files may reach it.

    Raises decord's DECORDError for what it cannot read, and IndexMismatch for files whose frames it is known to get
    wrong, or where it counts other frames than the index.
    """

    version = str(decord.__version__)

    def __init__(self, index: VideoIndex) -> None:
        reason = wrong_elsewhere(index) or _wrong_in_decord(index)
        if reason:
            raise IndexMismatch(reason)
        decord.logging.set_level(decord.logging.ERROR)
        self._chunk = chunk_length(index.height, index.width)
        # fault_tol: an error for the first damaged frame, instead of a silent copy of its neighbour.
        self._video = decord.VideoReader(index.path, ctx=decord.cpu(0), num_threads=1, fault_tol=1e-6)
        if len(self._video) != len(index.timestamps):
            raise IndexMismatch(f"decord counts {len(self._video)} frames, the file lists {len(index.timestamps)}")

    def read(self, indices: NDArray[np.int64]) -> Iterator[Frames]:
        """See ``FrameDecoder.read``."""
        for start in range(0, len(indices), self._chunk):
            yield self._video.get_batch(indices[start : start + self._chunk].tolist()).asnumpy()

    def close(self) -> None:
        """Release the file."""
        del self._video


def _wrong_in_decord(index: VideoIndex) -> str:
    """The first reason why decord might deliver other frames than a player shows; each of these was seen to do so."""
    assert index.packets is not None and index.pts is not None
    reasons = (
        (index.packets.n_streams != 1, "it has several video streams"),
        (index.codec not in ("h264", "hevc"), "only the frame size of H.264 and HEVC is known to stay the same"),
        (index.pts[0] != 0, "it does not start at 0"),
        (_changes_parameters(index.packets), "its parameters change on the way"),
        (_has_leading_frames(index.packets.table), "frames shown before a keyframe are stored behind it"),
        (index.orientation != Orientation(), "it is rotated"),
        (index.pixel_format != "yuv420p", f"its pixels are {index.pixel_format}"),
        (index.width % 2 or index.height % 2 or min(index.width, index.height) < 16, "its size is odd or tiny"),
        (index.packets.stream.codec_context.coded_width != index.width, "it may hide columns of its frames"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def _has_leading_frames(packets: Sequence[PacketInfo]) -> bool:
    """Whether groups of pictures are open: a frame behind a keyframe, in the file, is shown before it."""
    keyframe = None
    for packet in packets:
        if packet.keyframe:
            keyframe = packet.pts
        elif keyframe is not None and packet.pts is not None and packet.pts < keyframe:
            return True
    return False


def _changes_parameters(packets: VideoPackets) -> bool:
    """Whether a keyframe brings a parameter set (frame size and more) that is not the container's own."""
    wanted, mask, shift = _PARAMETERS.get(packets.codec, (0, 0, 0))
    known = packets.stream.codec_context.extradata or b""
    for number in (number for number, packet in enumerate(packets.table) if packet.keyframe):
        data, start = bytes(next(packets.between(number, number + 1))), 0
        while start + 5 <= len(data):
            length = int.from_bytes(data[start : start + 4], "big")
            unit = data[start + 4 : start + 4 + length]
            if not unit or len(unit) < length:
                return True  # not the form that is expected here: take no chances
            if (unit[0] >> shift) & mask == wanted and unit not in known:
                return True
            start += 4 + length
    return False
