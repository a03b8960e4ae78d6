"""Holes: stretches of a video that do not decode although its file lists or states them, and how large they may be."""

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

#: The share of a damaged clip that may be lost: frames are then chosen among the others. Above it the clip is corrupt.
MAX_LOST = 0.25
#: The same share if FFmpeg reports no errors: some codecs store frames that are not shown.
MAX_UNSHOWN = 0.5
# A single lost frame is not a hole: it may be the second field of a picture, or a frame that is never shown.
_MIN_LOST_FRAMES = 2
# Codecs whose decoder skips broken packets without logging an error.
_SILENT = ("av1",)


class Hole(NamedTuple):
    """A stretch of a video that does not decode.

    Attributes:
        start: the time of its first lost frame, in seconds.
        end: the time of the next frame that decodes, or the end of the video.
        listed: True if the file lists frames there; False if only a stated length or the file's size suggests them.
    """

    start: float
    end: float
    listed: bool = True

    def __str__(self) -> str:
        if self.listed:
            return f"from {self.start:.2f} s to {self.end:.2f} s"
        return f"behind {self.start:.2f} s, to about {self.end:.2f} s"


def find_lost_stretches(
    timestamps: NDArray[np.float64], is_lost: NDArray[np.bool_], duration_s: float
) -> tuple[Hole, ...]:
    """Group lost frames into holes, in order; a single lost frame is not a hole.

    Args:
        timestamps: [F] seconds of the listed frames, ascending.
        is_lost: [F], True for each frame that does not come out of the decoder.
        duration_s: end of the last listed frame.
    """
    starts = [*timestamps.tolist(), duration_s]
    runs = ([index for index, _ in run] for lost, run in groupby(enumerate(is_lost), lambda item: item[1]) if lost)
    return tuple(Hole(starts[run[0]], starts[run[-1] + 1]) for run in runs if len(run) >= _MIN_LOST_FRAMES)


def find_skipped_holes(timestamps: NDArray[np.float64], fps: float) -> tuple[Hole, ...]:
    """Find the gaps of at least two frames between decoded frames, in a file of constant rate that lists no times."""
    long = np.flatnonzero(np.diff(timestamps) > (_MIN_LOST_FRAMES + 0.5) / fps)
    return tuple(Hole(float(timestamps[i]) + 1 / fps, float(timestamps[i + 1])) for i in long)


def find_unlisted_hole(index: VideoIndex, packets: VideoPackets) -> tuple[Hole, ...]:
    """Return the hole behind the last listed frame if the video seems to continue there, otherwise ().

    The video continues if ``packets`` state or suggest an end that is more than two frames later.
    """
    end_s = packets.find_end(index.duration_s)
    goes_on = end_s - index.duration_s > _MIN_LOST_FRAMES / index.fps
    return (Hole(index.duration_s, end_s, listed=False),) if goes_on else ()


def check_decodable(index: VideoIndex, clip: tuple[float | None, float | None], warnings: int) -> tuple[Hole, ...]:
    """Return the holes that damage made in a clip, unless they are too large for it to be decoded.

    A clip is damaged if FFmpeg reported errors, if part of a file of stated length was not read, if its codec's decoder
    reports no errors (AV1), or if it has no frame. In a clip with frames, holes before the video's first frame do not
    count; nor do holes that the file does not list, unless FFmpeg reported errors or a part was not read.

    Args:
        clip: start and end in seconds; None for the video's start or end.
        warnings: the number of errors that FFmpeg logged while it read the file.

    Returns:
        The holes in the clip that count; an empty tuple if the clip is not damaged or does not start before its end.

    Raises:
        VideoFault: "corrupt" if more than a quarter of a damaged clip or half of another clip does not decode, or if
            there are errors or an unread part, and the clip has no frame although it starts before the video's end
            (unknown if the video goes on without a stated length).
    """
    start, stop = 0.0 if clip[0] is None else clip[0], math.inf if clip[1] is None else clip[1]
    if not start < stop:
        return ()  # which ``find_clip_range`` refuses
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
