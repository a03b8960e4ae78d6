"""The decoder with decord, for users who request it: it decodes more frames than needed and gets some files wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence

import decord
import numpy as np

from pipeline.video.decoders import Frames, LibraryDecoder
from pipeline.video.packets import PacketInfo, VideoPackets
from pipeline.video.probe import IndexMismatch, Orientation, VideoIndex

# The beginning of a packet that carries codec parameters (frame size and more): a length, and a unit of that type.
_PARAMETERS = {"h264": rb"(?s)\0\0..[\x27\x47\x67]", "hevc": rb"(?s)\0\0..[\x40\x42]\x01"}
_HEAD = 64  # bytes of a packet that are searched for them


class DecordDecoder(LibraryDecoder):
    """The decoder with decord on one thread. decord guesses the demuxer, so only sniffed files may reach it."""

    version = str(decord.__version__)

    @staticmethod
    def reason_against(index: VideoIndex) -> str:
        """Return the first reason why decord may deliver other frames than players show, or ""; each was observed."""
        if reason := LibraryDecoder.reason_against(index):
            return reason
        assert index.packets is not None and index.pts is not None
        reasons = (
            (index.packets.n_streams != 1, "it has several video streams"),
            (index.codec not in _PARAMETERS, "its codec is neither H.264 nor HEVC, so its frame size may change"),
            (index.pts[0] != 0, "it does not start at 0"),
            (_may_change_parameters(index.packets), "its codec parameters may change"),
            (_has_leading_frames(index.packets.table), "frames shown before a keyframe are stored behind it"),
            (index.orientation != Orientation(), "it is rotated"),
            (index.pixel_format != "yuv420p", f"its pixels are {index.pixel_format}"),
            (index.width % 2 or index.height % 2 or min(index.width, index.height) < 16, "its size is odd or tiny"),
            (index.packets.stream.codec_context.coded_width != index.width, "it may hide columns of its frames"),
        )
        return next((reason for applies, reason in reasons if applies), "")

    def open(self, index: VideoIndex) -> decord.VideoReader:
        """Open the file with decord so that a damaged frame raises; set decord's log level for the whole process.

        Raises:
            IndexMismatch: decord's keyframes are not those of the index.
        """
        assert index.pts is not None
        decord.logging.set_level(decord.logging.ERROR)
        video = decord.VideoReader(index.path, ctx=decord.cpu(0), num_threads=1, fault_tol=1e-6)
        if video.get_key_indices() != np.searchsorted(index.pts, index.keyframes).tolist():
            raise IndexMismatch("decord finds other keyframes")
        return video

    def frames(self, indices: list[int]) -> Frames:
        """Return the frames [k,H,W,3] with the numbers ``indices``."""
        frames: Frames = self._video.get_batch(indices).asnumpy()
        return frames


def _has_leading_frames(packets: Sequence[PacketInfo]) -> bool:
    """Return True if some frame is stored after a keyframe and shown before it; all packets must have times."""
    pts = np.array([packet.pts for packet in packets])
    keyframe = np.array([packet.keyframe for packet in packets])
    return bool((pts < np.maximum.accumulate(np.where(keyframe, pts, pts.min()))).any())


def _may_change_parameters(packets: VideoPackets) -> bool:
    """Return True if a keyframe seems to carry codec parameters, which may differ from the container's.

    A codec other than H.264 and HEVC gives True if the video has a keyframe.
    """
    pattern = re.compile(_PARAMETERS.get(packets.codec, b""))
    keyframes = (number for number, packet in enumerate(packets.table) if packet.keyframe)
    return any(pattern.search(bytes(next(packets.iter_range(n, n + 1)))[:_HEAD]) for n in keyframes)
