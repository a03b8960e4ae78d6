"""What a video file holds, frame by frame, found without decoding it: the index that every decoder works from.

Timestamps are seconds from the container's start time, the zero that players show. They come from here whichever
decoder delivers the pixels, because decoders disagree about start offsets and edit lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import av
import numpy as np
from av.codec.context import Flags
from av.error import InvalidDataError
from av.stream import Disposition
from numpy.typing import NDArray

from pipeline.errors import VideoFault

MAX_PIXELS = 8192 * 8192  # of a frame: one RGB frame is 200 MB there
_NOT_A_VIDEO = Disposition.attached_pic | Disposition.timed_thumbnails
_DECORD_CODECS = {
    "h264": (7, 0x1F, 0),
    "hevc": (33, 0x3F, 1),
}  # how a parameter set's unit type reads: value, mask, shift


class Orientation(NamedTuple):
    """How stored frames become shown ones: first transposed, then flipped."""

    transpose: bool = False
    flip_rows: bool = False
    flip_columns: bool = False


@dataclass(frozen=True)
class VideoIndex:
    """The frames of one video stream in presentation order.

    Attributes:
        path: the file, an absolute path.
        demuxer: name of FFmpeg's demuxer, as ``containers.sniff`` gave it.
        stream: index of the stream in the file.
        codec: name of the codec.
        width: pixels, as shown (after rotation).
        height: likewise.
        orientation: how stored frames are turned to be shown.
        timestamps: [F] float64 seconds, ascending.
        pts: [F] int64 presentation times in the stream's ticks, by which decoded frames are told apart; None where the
            file has no usable ones and only counting decoded frames tells.
        keyframes: [K] int64 presentation times at which decoding can start, ascending.
        seek_times: [K] int64 times to seek to for them (decoding times, where the file has those).
        fps: average frames a second.
        duration_s: end of the last frame, seconds.
        not_for_decord: why decord would read this file wrongly, empty where it reads it rightly.
    """

    path: str
    demuxer: str
    stream: int
    codec: str
    width: int
    height: int
    orientation: Orientation
    timestamps: NDArray[np.float64]
    pts: NDArray[np.int64] | None
    keyframes: NDArray[np.int64]
    seek_times: NDArray[np.int64]
    fps: float
    duration_s: float
    not_for_decord: str


class IndexMismatch(Exception):  # noqa: N818
    """A decoder met other frames than the index says."""


class _Packet(NamedTuple):
    pts: int | None
    dts: int | None
    duration: int
    keyframe: bool
    discard: bool


def open_container(path: str, demuxer: str) -> Any:
    """The file, opened by PyAV with its demuxer forced, and barred from opening anything but files."""
    return av.open(path, format=demuxer, options={"protocol_whitelist": "file"}, metadata_errors="replace")


def pick_stream(container: Any) -> Any:
    """The video stream that the ffmpeg command line takes: the largest, a default one counting 5 megapixels more.

    Raises VideoFault("unsupported") where there is none (cover art is no video), its codec is unknown or its
    frames are too large.
    """
    streams = [s for s in container.streams.video if not s.disposition & _NOT_A_VIDEO]
    if not streams:
        raise VideoFault("unsupported", f"the file holds no video stream{_instead(container)}; leave it out")
    streams = [s for s in streams if s.codec_context is not None]
    if not streams:
        raise VideoFault("unsupported", "no decoder knows the codec of the video stream")
    stream = max(streams, key=lambda s: s.width * s.height + 5_000_000 * bool(s.disposition & Disposition.default))
    if stream.width * stream.height > MAX_PIXELS:
        raise VideoFault("unsupported", f"frames of {stream.width}x{stream.height} are larger than {MAX_PIXELS} pixels")
    return prepared(stream)


def _instead(container: Any) -> str:
    kinds = (("audio", container.streams.audio), ("pictures", container.streams.video))
    found = " and ".join(name for name, streams in kinds if streams)
    return f", only {found}" if found else ""


def prepared(stream: Any) -> Any:
    """The stream, set up for decoding."""
    stream.codec_context.thread_count = 1  # the pipeline runs one decoder a core
    # FFmpeg would leave columns on the left that the file hides, where hiding them costs it the alignment of rows.
    stream.codec_context.flags |= Flags.unaligned
    return stream


def decode_packet(packet: Any) -> list[Any]:
    """The frames that a packet completes; none where its data is damaged (FFmpeg has logged that)."""
    try:
        return list(packet.decode())
    except InvalidDataError:
        return []


def decoded_frames(container: Any, stream: Any) -> Iterator[Any]:
    """Frames in presentation order from the container's current position on, damaged packets skipped."""
    for packet in container.demux(stream):
        yield from decode_packet(packet)


def probe(path: str, demuxer: str) -> VideoIndex:
    """Index a file by reading its packets; only the first frame is decoded, for its shape and orientation.

    Where packets do not tell the frames (no or broken timestamps), the whole file is decoded once instead.

    Raises VideoFault ("unsupported", "corrupt") or an error of PyAV's.
    """
    with open_container(path, demuxer) as container:
        stream = pick_stream(container)
        packets, first, changes = _read_packets(container, stream, _codec(stream))
        if first is None:
            raise VideoFault("corrupt", f"none of the {len(packets)} packets of the video stream can be decoded")
        shown = [p for p in packets if not p.discard]
        usable = _timestamps_usable(shown, demuxer, stream)
        unfit = _why_not_decord(container, stream, first, packets, changes) if usable else "no timestamps"
        if not unfit and _hides_columns(path, demuxer, stream, first):
            unfit = "it hides columns on the left"
        pts = np.sort(np.array([p.pts for p in shown], dtype=np.int64)) if usable else None
        index = replace(_untimed(path, demuxer, stream, first, packets), pts=pts, not_for_decord=unfit)
        if pts is None:
            return scan(index)
        last = max(shown, key=lambda p: p.pts or 0)
        return _timed(index, stream, container.start_time, pts, last.duration)


def _untimed(path: str, demuxer: str, stream: Any, first: Any, packets: Sequence[_Packet]) -> VideoIndex:
    """The index with the shape and the keyframes of the stream, and no times yet; ``first`` is its first frame."""
    orientation = _orientation(first)
    height, width = (first.width, first.height) if orientation.transpose else (first.height, first.width)
    keys = sorted(
        (p.pts, min(p.pts, p.dts) if p.dts is not None else p.pts) for p in packets if p.keyframe and p.pts is not None
    )
    return VideoIndex(
        path=path,
        demuxer=demuxer,
        stream=stream.index,
        codec=_codec(stream),
        width=width,
        height=height,
        orientation=orientation,
        timestamps=np.zeros(0),
        pts=None,
        keyframes=np.array([k[0] for k in keys], dtype=np.int64),
        seek_times=np.array([k[1] for k in keys], dtype=np.int64),
        fps=float(stream.average_rate or stream.guessed_rate or 25),
        duration_s=0.0,
        not_for_decord="",
    )


def scan(index: VideoIndex) -> VideoIndex:
    """The same index by decoding the whole file: for files whose packets do not tell which frames come out.

    Raises VideoFault("corrupt") where nothing can be decoded, or less than half of what the packets promised.
    """
    with open_container(index.path, index.demuxer) as container:
        stream = prepared(container.streams[index.stream])
        frames = [(frame.pts, frame.duration or 0) for frame in decoded_frames(container, stream)]
        if not frames or len(frames) < len(index.timestamps) // 2:
            raise VideoFault("corrupt", f"only {len(frames)} of {len(index.timestamps)} frames can be decoded")
        times = [pts for pts, _ in frames]
        index = replace(index, pts=None, not_for_decord=index.not_for_decord or "its packets do not tell its frames")
        if None in times or any(b < a for a, b in pairwise(times)):
            timestamps = np.arange(len(frames)) / index.fps
            return replace(index, timestamps=timestamps, duration_s=len(frames) / index.fps)
        return _timed(index, stream, container.start_time, np.array(times, dtype=np.int64), frames[-1][1])


def _timed(
    index: VideoIndex, stream: Any, start_time: int | None, pts: NDArray[np.int64], last_duration: int
) -> VideoIndex:
    """The index with timestamps and duration from presentation times in the stream's ticks."""
    tick: Fraction = stream.time_base
    origin = Fraction(start_time, 1_000_000) if start_time is not None else int(pts[0]) * tick
    if abs(int(pts[0]) * tick - origin) < Fraction(2, 1_000_000):
        origin = int(pts[0]) * tick  # the container's start is that of this stream, rounded to microseconds
    timestamps = np.array([float(int(t) * tick - origin) for t in pts])
    end = timestamps[-1] + (float(last_duration * tick) or 1 / index.fps)
    return replace(index, timestamps=timestamps, duration_s=float(end))


def _read_packets(container: Any, stream: Any, codec: str) -> tuple[list[_Packet], Any, bool]:
    """(every packet, the first decoded frame or None, whether the coded frames' parameters change on the way)."""
    packets: list[_Packet] = []
    first, changes = None, False
    for packet in container.demux(stream):
        if first is None:
            first = next(iter(decode_packet(packet)), None)
        if packet.size:
            packets.append(_Packet(packet.pts, packet.dts, packet.duration or 0, packet.is_keyframe, packet.is_discard))
            changes = changes or packet.has_sidedata("new_extradata")
            if packet.is_keyframe and codec in _DECORD_CODECS and not changes:
                changes = _new_parameters(bytes(packet), codec, stream.codec_context.extradata or b"")
    return packets, first, changes


def _new_parameters(data: bytes, codec: str, known: bytes) -> bool:
    """Whether a keyframe brings a parameter set (frame size and more) that is not the container's own."""
    wanted, mask, shift = _DECORD_CODECS[codec]
    start = 0
    while start + 5 <= len(data):
        length = int.from_bytes(data[start : start + 4], "big")
        unit = data[start + 4 : start + 4 + length]
        if not unit or len(unit) < length:
            return True  # not the form that is expected here: take no chances
        if (unit[0] >> shift) & mask == wanted and unit not in known:
            return True
        start += 4 + length
    return False


def _timestamps_usable(shown: Sequence[_Packet], demuxer: str, stream: Any) -> bool:
    """Whether each packet is one frame that is known by its presentation time."""
    if demuxer == "avi" and stream.codec_context.has_b_frames:
        return False  # AVI stores no presentation times: what the demuxer makes up for reordered frames is off
    pts = [p.pts for p in shown]
    dts = [p.dts for p in shown if p.dts is not None]
    return (
        bool(pts)
        and None not in pts
        and len(set(pts)) == len(pts)
        and all(a <= b for a, b in pairwise(dts))  # a jump back: a new time line begins
    )


def _why_not_decord(container: Any, stream: Any, first: Any, packets: Sequence[_Packet], changes: bool) -> str:
    """The first reason why decord might deliver wrong frames; each of these was seen to do so."""
    start = min(p.pts or 0 for p in packets)
    reasons = (
        (container.format.name.split(",")[0] not in ("mov", "matroska"), "it is neither MP4 nor Matroska"),
        (len(container.streams.video) != 1, "it has several video streams"),
        (_codec(stream) not in _DECORD_CODECS, "only the frame size of H.264 and HEVC is known to stay the same"),
        (start != 0 or any(p.discard for p in packets), "it does not start at 0 or has an edit list"),
        (_has_leading_frames(packets), "frames shown before a keyframe are stored behind it"),
        (_orientation(first) != Orientation(), "it is rotated"),
        (first.format.name != "yuv420p", f"its pixels are {first.format.name}"),
        (first.width % 2 or first.height % 2 or min(first.width, first.height) < 16, "its size is odd or tiny"),
        (changes, "its parameters change on the way"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def _hides_columns(path: str, demuxer: str, stream: Any, first: Any) -> bool:
    """Whether columns on the left are hidden, which FFmpeg shows where the stream is not ``prepared``, as in decord."""
    if stream.codec_context.coded_width == first.width:
        return False
    with open_container(path, demuxer) as plain:
        return bool(next(plain.decode(plain.streams[stream.index])).width != first.width)


def _has_leading_frames(packets: Sequence[_Packet]) -> bool:
    """Whether groups of pictures are open: a frame behind a keyframe, in the file, is shown before it."""
    keyframe = None
    for packet in packets:
        if packet.keyframe:
            keyframe = packet.pts
        elif keyframe is not None and packet.pts is not None and packet.pts < keyframe:
            return True
    return False


def _orientation(frame: Any) -> Orientation:
    """From the frame's display matrix. Raises VideoFault("unsupported") for angles that are no quarter turns."""
    side_data = frame.side_data.get("DISPLAYMATRIX")
    if side_data is None:
        return Orientation()
    # x' = a*x + c*y and y' = b*x + d*y, in 16.16 fixed point
    a, b, _, c, d = (int(v) for v in np.frombuffer(bytes(side_data), dtype="<i4", count=5))
    if a and d and not (b or c):
        return Orientation(False, flip_rows=d < 0, flip_columns=a < 0)
    if b and c and not (a or d):
        return Orientation(True, flip_rows=b < 0, flip_columns=c < 0)
    raise VideoFault("unsupported", "the video is turned by an angle that is no multiple of 90 degrees")


def _codec(stream: Any) -> str:
    """The codec's own name ("av1", "vp9"), not that of the library which decodes it ("libdav1d")."""
    return str(stream.codec_context.codec.canonical_name)
