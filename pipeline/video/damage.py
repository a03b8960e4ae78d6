"""Stretches of a video that its file lists and that do not decode, and when they make a video corrupt."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import VideoFault

if TYPE_CHECKING:
    from pipeline.video.packets import VideoPackets
    from pipeline.video.probe import VideoIndex

#: The share of a clip that may not decode: its frames are then chosen among the others. Beyond it a clip is corrupt.
MAX_LOST = 0.25
#: Likewise where FFmpeg reports no errors: some codecs store frames that are not shown.
MAX_UNSHOWN = 0.5
# A single frame that does not come out is no hole: the second field of a picture, or a frame that is never shown.
_MIN_LOST_FRAMES = 2
# Codecs whose decoder passes over broken packets without a word.
_SILENT = ("av1",)


class Hole(NamedTuple):
    """A stretch that does not decode: from its first frame to the next frame that does, or to the end; seconds."""

    start: float
    end: float
    #: Whether the file lists frames there; otherwise it only states that it is so long.
    listed: bool = True

    def __str__(self) -> str:
        if self.listed:
            return f"from {self.start:.2f} s to {self.end:.2f} s"
        return f"behind {self.start:.2f} s, to about {self.end:.2f} s"


def find_lost_stretches(
    timestamps: NDArray[np.float64], is_lost: NDArray[np.bool_], duration_s: float
) -> tuple[Hole, ...]:
    """Return the holes that several lost frames in a row make; a single lost frame is no hole.

    Args:
        timestamps: [F] seconds of the listed frames, ascending.
        is_lost: [F], whether a frame does not come out of the decoder.
        duration_s: end of the last listed frame, seconds.
    """
    starts = [*timestamps.tolist(), duration_s]
    runs = ([index for index, _ in run] for lost, run in groupby(enumerate(is_lost), lambda item: item[1]) if lost)
    return tuple(Hole(starts[run[0]], starts[run[-1] + 1]) for run in runs if len(run) >= _MIN_LOST_FRAMES)


def find_skipped_holes(timestamps: NDArray[np.float64], fps: float) -> tuple[Hole, ...]:
    """Return the holes between decoded frames, at [F] seconds, of a file of constant rate that lists no times."""
    long = np.flatnonzero(np.diff(timestamps) > (_MIN_LOST_FRAMES + 0.5) / fps)
    return tuple(Hole(float(timestamps[i]) + 1 / fps, float(timestamps[i + 1])) for i in long)


def find_unlisted_hole(index: VideoIndex, packets: VideoPackets) -> tuple[Hole, ...]:
    """Return the hole behind the last frame of a video that seems to go on, by its ``packets``."""
    end_s = packets.find_end(index.duration_s)
    goes_on = end_s - index.duration_s > _MIN_LOST_FRAMES / index.fps
    return (Hole(index.duration_s, end_s, listed=False),) if goes_on else ()


def check_decodable(index: VideoIndex, clip: tuple[float | None, float | None], warnings: int) -> tuple[Hole, ...]:
    """Return the holes that damage made in a clip, small enough for its frames to be chosen among the others.

    Holes up to MAX_UNSHOWN of the clip are no damage if FFmpeg reported no errors. A loss in front of the first frame
    is no damage: a recording may begin anywhere. But a clip without any frame counts as damaged in any case, as far as
    the file lists or states it.

    Args:
        clip: start and end in seconds; None for the video's start or end.
        warnings: errors that FFmpeg logged while it read the file.

    Raises VideoFault("corrupt") where more than MAX_LOST of a damaged clip does not decode, or MAX_UNSHOWN of another
    clip. A clip without a frame is corrupt too if FFmpeg reported errors.
    """
    start, stop = 0.0 if clip[0] is None else clip[0], math.inf if clip[1] is None else clip[1]
    if not start < stop:
        return ()  # which ``clip_range`` refuses
    last = max([index.duration_s, *(hole.end for hole in index.holes)])
    end = min(stop, last)
    inside = tuple(hole for hole in index.holes if hole.start < end and hole.end > start)
    has_frames = bool(((index.timestamps >= start) & (index.timestamps < end)).any())
    # The packets of a video that seems to go on behind the last frame that its file lists.
    packets = None if all(hole.listed for hole in index.holes) else index.packets
    is_open_ended = packets is not None and packets.stated_s is None
    if packets is not None and packets.has_unread and not is_open_ended:
        warnings = warnings or 1  # the video is shorter than its container states, and the rest was not read
    is_damaged = bool(warnings) or index.codec in _SILENT or not has_frames
    holes_inside = inside
    if has_frames:
        behind = tuple(hole for hole in inside if hole.start > index.timestamps[0])
        holes_inside = tuple(hole for hole in behind if hole.listed or warnings)
    lost_s = sum(min(hole.end, end) - max(hole.start, start) for hole in holes_inside)
    where = "the video" if clip == (None, None) else f"the clip [{start:g} s, {end:g} s)"
    if holes_inside and lost_s > (MAX_LOST if is_damaged else MAX_UNSHOWN) * (end - start):
        largest = max(holes_inside, key=lambda hole: hole.end - hole.start)
        raise VideoFault("corrupt", f"{lost_s:.2f} s of {where} do not decode: the file is damaged {largest}")
    if warnings and not has_frames and start < (stop if is_open_ended else end):
        errors = f"the file is damaged (FFmpeg reported {warnings} errors)"
        raise VideoFault("corrupt", f"no frame of {where} of a video of {index.duration_s:.2f} s can be read: {errors}")
    return holes_inside if is_damaged else ()
