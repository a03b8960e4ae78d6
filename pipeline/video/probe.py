"""The frame-by-frame index of a video file, usually made without decoding it; every decoder works from it.

Timestamps are seconds from the container's start time, which players show as zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import av
import numpy as np
from av.error import DecoderNotFoundError, PatchWelcomeError
from numpy.typing import NDArray

from pipeline.errors import VideoFault
from pipeline.rows import VideoRecord
from pipeline.video.damage import Hole, find_lost_stretches, find_skipped_holes, find_unlisted_hole
from pipeline.video.packets import PacketInfo, VideoPackets, read_packets
from pipeline.video.sampling import find_true_times


class Orientation(NamedTuple):
    """The rotation from stored frames to shown frames: first transposed, then flipped."""

    transpose: bool = False
    flip_rows: bool = False
    flip_columns: bool = False


_AS_STORED = Orientation()
_MAX_SKEW = math.tan(math.radians(0.5))  # of a picture that counts as upright
_HALF_MS = Fraction(1, 2000)
_RAW = ("h264", "hevc", "mpegvideo")  # demuxers of streams without a container
_MAX_FLV_RATE, _FLV_ROUNDING = 1000, Fraction(1, 10_000)  # the largest numerator, and the error of a rate
_WRAPPING = ("mpegts", "mpeg")  # demuxers of containers whose times wrap at 33 bits
_MAX_STEP = 2**32  # ticks between two of their packets; FFmpeg takes a jump back for a wrap, and adds 2**33


@dataclass(frozen=True)
class VideoIndex:
    """The index of a video stream: its F frames in the order in which they are shown.

    Attributes:
        demuxer: name of FFmpeg's demuxer; "" for a folder of frames.
        width: pixels of the first frame as shown (after rotation); later frames may have another size.
        height: as ``width``.
        pixel_format: FFmpeg's name for the first frame's pixel format.
        fps: average frames per second of the whole file.
        timestamps: [F] float64 seconds, ascending.
        duration_s: end of the last frame.
        tick_s: seconds per tick of the container's clock; 0 if timestamps are not rounded.
        pts: [F] int64 presentation times in ticks, by which decoded frames are identified; None if the file has no
            usable times, so that decoded frames can only be counted.
        keyframes: [K] int64 presentation times at which decoding can start, ascending.
        whole: True if frames come out at these ``pts`` only when all packets are decoded, since some are damaged.
        record: columns of the videos table that the file states and decoding does not need.
        packets: the open file, which the caller of ``probe`` closes; None for a folder of frames.
    """

    path: str
    demuxer: str
    stream: int
    codec: str
    width: int
    height: int
    pixel_format: str
    fps: float
    timestamps: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    duration_s: float = 0.0
    tick_s: float = 0.0
    orientation: Orientation = _AS_STORED
    pts: NDArray[np.int64] | None = None
    keyframes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    whole: bool = False
    holes: tuple[Hole, ...] = ()
    record: VideoRecord = field(default_factory=VideoRecord)
    packets: VideoPackets | None = field(default=None, repr=False, compare=False)

    def find_true_times(self) -> tuple[NDArray[np.float64], float, float]:
        """Return the timestamps, duration and tick without the container's rounding, by which frames are chosen."""
        return find_true_times(self.timestamps, self.duration_s, self.fps, self.tick_s)


class IndexMismatch(Exception):  # noqa: N818
    """The frames of a decoder do not match the index."""


def probe(path: str, demuxer: str) -> VideoIndex:
    """Index a file by reading its packets; only the first frame is decoded, for its shape and orientation.

    If packets do not determine the frames (no or broken timestamps), the whole file is decoded once instead. The index
    keeps the file open, and up to 256 MiB of packets in memory: close its ``packets``.

    Raises:
        VideoFault: "unsupported" if no stream can be decoded or the rotation is not a multiple of 90 degrees; "corrupt"
            if no frame comes out.
        FFmpegError: PyAV cannot open the file or has no decoder for it.
    """
    packets = read_packets(path, demuxer)
    try:
        return _index_packets(path, packets)
    except BaseException:
        packets.close()
        raise


def _index_packets(path: str, packets: VideoPackets) -> VideoIndex:
    """Make the index of a file from its packets, or by decoding all of it unless ``_are_timestamps_usable``.

    Raises:
        VideoFault: "corrupt" if no frame comes out, "unsupported" for an odd angle of rotation.
        FFmpegError: FFmpeg has no decoder for the codec.
    """
    first = packets.decode_first_frame()
    if first is None:
        if isinstance(packets.fault, DecoderNotFoundError | PatchWelcomeError):
            raise packets.fault
        raise VideoFault("corrupt", f"none of the {len(packets.table)} packets of the video stream can be decoded")
    shown_packets = [p for p in packets.table if not p.hidden]
    orientation = read_orientation(first) or _AS_STORED
    height, width = (first.width, first.height) if orientation.transpose else (first.height, first.width)
    index = VideoIndex(
        path=path,
        demuxer=packets.demuxer,
        stream=packets.stream.index,
        codec=packets.codec,
        width=width,
        height=height,
        pixel_format=first.format.name,
        fps=float(_list_stated_rates(packets)[0]),
        orientation=orientation,
        record={
            "color_transfer": find_color_transfer(first, packets.stream),
            "sample_aspect_ratio": find_pixel_ratio(packets.stream, turned=orientation.transpose),
        },
        keyframes=np.array(sorted(p.pts for p in shown_packets if p.keyframe and p.pts is not None), dtype=np.int64),
        packets=packets,
    )
    if not _are_timestamps_usable(shown_packets, packets):
        return index_by_decoding(index)
    pts = np.sort(np.array([p.pts for p in shown_packets], dtype=np.int64))
    if packets.is_ranked:
        index = _count_times(replace(index, pts=pts), len(pts), [p.dts for p in shown_packets])
    else:
        index = _add_times(replace(index, pts=pts), packets, pts, max(shown_packets, key=lambda p: p.pts or 0).duration)
    return replace(index, holes=find_unlisted_hole(index, packets))


def index_by_decoding(index: VideoIndex) -> VideoIndex:
    """Return a new index of the frames that come out when the whole file is decoded.

    Times come from the decoded frames if they ascend; otherwise from those that do if the old index has times, or by
    counting at the stated rate. Holes are the old index's frames that do not come out, and what the container states
    beyond them; in AVI files without usable times, also gaps between decoded frames. Both indexes share the packets.

    Raises:
        VideoFault: "corrupt" if no frame comes out.
    """
    packets = index.packets
    assert packets is not None
    frames = [(frame.pts, frame.duration or 0) for frame in packets.decode_frames(0, len(packets.table))]
    if not frames:
        raise VideoFault("corrupt", f"none of the {len(index.timestamps)} frames of the video can be decoded")
    times = [pts for pts, _ in frames]
    known_pts = np.array([time for time in times if time is not None], np.int64)
    listed_index, index = index, replace(index, pts=None)
    ascends = len(known_pts) == len(times) and _is_ascending(known_pts.tolist(), index.demuxer)
    if not ascends and listed_index.pts is not None and len(known_pts) and not packets.is_ranked:
        # After an error, H.264 delivers some frames late, behind frames with later times.
        known_pts = pts = known_pts[np.append(True, known_pts[1:] > np.maximum.accumulate(known_pts)[:-1])]
        index = _add_times(replace(index, pts=pts, whole=True), packets, pts, frames[-1][1])
    elif not ascends:
        index = _count_times(index, len(frames))
    elif packets.is_ranked:
        index = replace(index, timestamps=listed_index.timestamps[known_pts])
    else:
        index = _add_times(index, packets, known_pts, frames[-1][1])
    if listed_index.pts is None:
        has_rate = index.demuxer == "avi"  # whose rate is constant
        between = find_skipped_holes(index.timestamps, index.fps) if has_rate else ()
        return replace(index, holes=(*between, *find_unlisted_hole(index, packets)))
    is_lost = ~np.isin(listed_index.pts, known_pts)
    lost = find_lost_stretches(listed_index.timestamps, is_lost, listed_index.duration_s)
    return replace(index, holes=(*lost, *listed_index.holes))


def _add_times(index: VideoIndex, packets: VideoPackets, pts: NDArray[np.int64], last_duration: int) -> VideoIndex:
    """Return the index with timestamps, duration, rate and tick, computed from presentation times.

    Timestamps are seconds since the container's start, so the first need not be 0. They count from the first frame if
    the container states no start, or one within 2 microseconds of that frame. The duration is the end of the last frame
    on the same scale. The rate is a stated rate that agrees with the times, otherwise their mean.

    Args:
        pts: [F] presentation times in the stream's ticks, ascending.
        last_duration: that of the last frame in ticks; 0 stands for one frame at the rate.
    """
    tick: Fraction = packets.stream.time_base
    start_time = packets.start_time
    origin = Fraction(start_time, 1_000_000) if start_time is not None else int(pts[0]) * tick
    if abs(int(pts[0]) * tick - origin) < Fraction(2, 1_000_000):
        origin = int(pts[0]) * tick  # the container's start is the start of this stream, rounded to microseconds
    timestamps = np.array([float(int(t) * tick - origin) for t in pts])
    fps = _find_true_rate(_list_stated_rates(packets), len(pts), (int(pts[-1]) - int(pts[0])) * tick, tick)
    end = timestamps[-1] + (float(last_duration * tick) or 1 / fps)
    return replace(index, fps=fps, timestamps=timestamps, duration_s=float(end), tick_s=float(tick))


def _count_times(index: VideoIndex, n_frames: int, stored_times: Sequence[int | None] = ()) -> VideoIndex:
    """Return the index with timestamps and duration of ``n_frames`` frames at the stated rate.

    Args:
        stored_times: the decoding times of the packets in ticks. If there is one per frame and their steps differ
            (frames were left out), timestamps follow these steps, shifted by the frames that the decoder holds back.
    """
    times = np.arange(n_frames) / index.fps
    known_times = np.array([time for time in stored_times if time is not None])
    assert index.packets is not None
    tick: Fraction | None = index.packets.stream.time_base
    if tick and n_frames == len(known_times) > 1 and len(set(steps := np.diff(known_times).tolist())) > 1:
        delay = min(index.packets.stream.codec_context.reorder_depth, n_frames - 1)
        tail = known_times[-1] + min(steps) * np.arange(1, delay + 1)
        times = (np.concatenate([known_times[delay:], tail]) - known_times[delay]) * float(tick)
    return replace(index, timestamps=times, duration_s=float(times[-1] + 1 / index.fps))


def _list_stated_rates(packets: VideoPackets) -> list[Fraction]:
    """List the frames per second that the file states, the likeliest first; [25] if it states none."""
    average, guessed_rate = packets.stream.average_rate, packets.stream.guessed_rate
    rates = (guessed_rate, average) if packets.demuxer in _RAW else (average, guessed_rate)
    return [_restore_rate(rate) for rate in rates if rate] or [Fraction(25)]


def _restore_rate(rate: Fraction) -> Fraction:
    """Return a rate such as 24000/1001 for its rounded form in FLV (983/41, both at most 1000), or the rate itself."""
    original = Fraction(round(rate * 1001 / 1000) * 1000, 1001)
    is_rounded = rate.denominator > 1 and rate.numerator <= _MAX_FLV_RATE and abs(rate / original - 1) < _FLV_ROUNDING
    return original if is_rounded else rate


def _find_true_rate(stated_rates: Sequence[Fraction], n_frames: int, span: Fraction, tick: Fraction) -> float:
    """Return the frames per second of a file by its timestamps.

    This is the first stated rate that agrees with them within a tick or half a millisecond, whichever is longer.
    Otherwise it is the mean rate; for a single frame, the first stated rate.

    Args:
        span: seconds from the first to the last timestamp.
    """
    if n_frames < 2 or not span:
        return float(stated_rates[0])
    agrees = (rate for rate in stated_rates if abs((n_frames - 1) / rate - span) <= max(tick, _HALF_MS))
    return float(next(agrees, (n_frames - 1) / span))


def _are_timestamps_usable(shown_packets: Sequence[PacketInfo], packets: VideoPackets) -> bool:
    """Return True if presentation times are all known and distinct, and decoding times never jump back.

    False without packets, and if FFmpeg made the times up and headers gave no ranks.
    """
    if packets.lacks_times and not packets.is_ranked:
        return False
    pts = [p.pts for p in shown_packets]
    dts = [p.dts for p in shown_packets if p.dts is not None]
    return bool(pts) and None not in pts and len(set(pts)) == len(pts) and _is_ascending(dts, packets.demuxer)


def _is_ascending(times: Sequence[int], demuxer: str) -> bool:
    """Return True if times, in ticks, never jump back, as they do where recordings were joined.

    In MPEG transport and program streams, FFmpeg turns such a jump into a large step forward, which counts too.
    """
    max_step = _MAX_STEP if demuxer in _WRAPPING else math.inf
    return all(0 <= b - a < max_step for a, b in pairwise(times))


def read_orientation(frame: av.VideoFrame) -> Orientation | None:
    """Return the rotation that a frame's display matrix states; None without a matrix.

    A rotation within half a degree of a quarter turn counts as one. A matrix of zeros gives no rotation.

    Raises:
        VideoFault: "unsupported" for other angles.
    """
    side_data = frame.side_data.get("DISPLAYMATRIX")
    if side_data is None:
        return None
    # x' = a*x + c*y and y' = b*x + d*y, in 16.16 fixed point
    a, b, _, c, d = (int(v) for v in np.frombuffer(bytes(side_data), dtype="<i4", count=5))
    across, along = min(abs(a), abs(d)), min(abs(b), abs(c))
    if max(abs(b), abs(c)) <= across * _MAX_SKEW:  # all zeros are written by mistake, and turn nothing
        return Orientation(False, flip_rows=d < 0, flip_columns=a < 0)
    if max(abs(a), abs(d)) <= along * _MAX_SKEW:
        return Orientation(True, flip_rows=b < 0, flip_columns=c < 0)
    raise VideoFault("unsupported", "the video is rotated by an angle that is not a multiple of 90 degrees")


# H.273 number -> FFmpeg's name of the transfer characteristic, as ffprobe shows it.
_TRANSFERS = {
    1: "bt709",
    4: "gamma22",
    5: "gamma28",
    6: "smpte170m",
    7: "smpte240m",
    8: "linear",
    9: "log100",
    10: "log316",
    11: "iec61966-2-4",
    12: "bt1361e",
    13: "iec61966-2-1",
    14: "bt2020-10",
    15: "bt2020-12",
    16: "smpte2084",
    17: "smpte428",
    18: "arib-std-b67",
}


def find_color_transfer(frame: av.VideoFrame, stream: av.VideoStream) -> str | None:
    """Return FFmpeg's name of the transfer function that the stream or its first frame states; None if neither does."""
    codes = (int(stream.codec_context.color_trc), int(frame.color_trc))
    return next((_TRANSFERS[number] for number in codes if number in _TRANSFERS), None)


def find_pixel_ratio(stream: av.VideoStream, *, turned: bool) -> str | None:
    """Return the width:height ratio of a pixel as shown, such as "16:15"; None if the file does not state it.

    Args:
        turned: True if rows of the stored frame are shown as columns.
    """
    ratio: Fraction | None = stream.sample_aspect_ratio or stream.codec_context.sample_aspect_ratio
    if not ratio:
        return None
    ratio = 1 / ratio if turned else ratio
    return f"{ratio.numerator}:{ratio.denominator}"
