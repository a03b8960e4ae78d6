"""Descriptions of how frames are sampled, and counts of the videos whose number of frames a limit changed.

With ``--fps``, ``--max-frames`` caps the number of frames, and a model's processor may fill it up to a minimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TypedDict, cast

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.header import SamplingIdentity
from pipeline.errors import format_count, list_first_names
from pipeline.rows import VideoRecord, VideoRow, compute_sampled_fps, format_rate
from pipeline.video.sampling import FRAME_RULES, TRUNCATE, Sampling, count_frames

MAX_EXAMPLES = 3  # ids of filled videos
RAISE = "--max-frames raises it, in a new cache"


class FrameLimits(TypedDict):
    """Counts of the videos of a cache sampled with ``--fps`` whose number of frames a limit changed. JSON values.

    Attributes:
        max_frames: the limit above which a video is capped; None without a limit.
        min_frames: the minimum up to which a video is filled.
        n_capped: videos with fewer frames than ``fps`` gives.
        lowest_fps: the rate at which the longest capped video was sampled; None if there is none.
        longest: the id of that video.
        n_filled: videos with more frames than ``fps`` gives.
        filled: the ids of the first 3 filled videos.
        n_unknown: rows of an older version, which do not state whether a limit changed their frames.
    """

    fps: float
    max_frames: int | None
    min_frames: int
    n_capped: int
    lowest_fps: float | None
    longest: str | None
    n_filled: int
    filled: list[str]
    n_unknown: int


def get_max_frames(sampling: SamplingIdentity) -> float:
    """Return the maximum number of frames per video; infinity without a limit."""
    max_frames = cast("int | None", sampling.get("max_frames"))
    return math.inf if max_frames is None else max_frames


def get_min_frames(sampling: SamplingIdentity) -> int:
    """Return the minimum number of frames for videos that have enough frames; it is never above ``max_frames``."""
    return int(min(cast(int, sampling.get("min_frames", 1)), get_max_frames(sampling)))


def plan_frames(sampling: Sampling, seconds: float) -> int:
    """Return the number of frames to sample from a video of this length, if it has enough frames."""
    if sampling.fps is None:
        return sampling.num_frames or 0
    n_frames = max(sampling.min_frames, count_frames(seconds, sampling.fps))
    return min(n_frames, sampling.max_frames or n_frames)


def describe_limits(limits: FrameLimits) -> Iterator[str]:
    """Yield a sentence each about the capped, the filled and the unknown videos; none for a count of 0."""
    if limits["n_capped"]:
        capped = format_count(limits["n_capped"], "video")
        verb = "was" if limits["n_capped"] == 1 else "were"
        lowest = f"lowest rate {format_rate(limits['lowest_fps'])} frames per second, of {limits['longest']}"
        yield f"{capped} {verb} capped at {format_count(limits['max_frames'] or 0, 'frame')} ({lowest}); {RAISE}"
    if limits["n_filled"]:
        filled = f"{format_count(limits['n_filled'], 'short video')} got more frames than --fps {limits['fps']:g} gives"
        names = list_first_names(limits["filled"], limits["n_filled"])
        yield f"{filled}, since this model takes at least {limits['min_frames']} where a video has them ({names})"
    if limits["n_unknown"]:
        unknown = format_count(limits["n_unknown"], "row")
        yield f"{unknown} of an older version: whether a limit changed the number of frames is not known"


def count_limits(rows: Iterable[VideoRecord], sampling: SamplingIdentity) -> FrameLimits | None:
    """Count the videos whose number of frames a limit changed; None unless the cache is sampled with ``fps``.

    An ok row is capped if its ``frames_by_rate`` is above ``max_frames``, unknown if it is None, unchanged if it is 0,
    and filled otherwise. The longest video has the largest ``frames_by_rate``.
    """
    if sampling.get("fps") is None:
        return None
    by_rate = [(row.get("frames_by_rate"), row) for row in rows]
    limited = [(n, row) for n, row in by_rate if n]
    capped = [row for n, row in limited if n > get_max_frames(sampling)]
    longest = max(capped, key=lambda row: row["frames_by_rate"] or 0, default=None)
    filled = [row["video_id"] for n, row in limited if n <= get_max_frames(sampling)]
    n_unknown = sum(n is None for n, _ in by_rate)
    return make_limits(sampling, len(capped), longest, len(filled), filled[:MAX_EXAMPLES], n_unknown)


def make_limits(
    sampling: SamplingIdentity,
    n_capped: int,
    longest: VideoRow | None,
    n_filled: int,
    filled: list[str],
    n_unknown: int,
) -> FrameLimits:
    """Build a FrameLimits for a cache sampled with ``fps``.

    ``longest`` is the row of the longest capped video; None if there is none.
    """
    return {
        "fps": cast(float, sampling["fps"]),
        "max_frames": cast("int | None", sampling.get("max_frames")),
        "min_frames": get_min_frames(sampling),
        "n_capped": n_capped,
        "lowest_fps": None if longest is None else compute_sampled_fps(longest),
        "longest": None if longest is None else longest["video_id"],
        "n_filled": n_filled,
        "filled": filled,
        "n_unknown": n_unknown,
    }


def describe_future_limits(sampling: SamplingIdentity, todo: pa.Table) -> Iterator[str]:
    """Yield sentences about the videos that will get fewer or more frames than ``fps`` gives; none without ``fps``.

    They state the lengths at which limits apply, and count the clips in ``todo`` (TODO_SCHEMA) that reach these lengths
    by their start and end. Other lengths are unknown before decoding.
    """
    if (fps := cast("float | None", sampling.get("fps"))) is None:
        return
    lengths = pc.subtract(todo["end_s"], pc.fill_null(todo["start_s"], 0.0))
    if (cap := get_max_frames(sampling)) < math.inf:
        longer = f"a video of more than {cap / fps:.4g} s is capped at {format_count(int(cap), 'frame')}; {RAISE}"
        yield longer + _count_clips(pc.greater(lengths, cap / fps))
    if (least := get_min_frames(sampling)) > 1:
        shorter = f"a video of at most {(least - 1) / fps:.4g} s gets {least} frames if it has them, for this model"
        yield shorter + _count_clips(pc.less_equal(lengths, (least - 1) / fps))


def _count_clips(is_limited: pa.ChunkedArray) -> str:
    """Return the end of a sentence with the number of True values in a mask of clips; "" for 0."""
    n_clips = pc.sum(is_limited).as_py() or 0
    return f"; {format_count(n_clips, 'clip')} by start and end, unless the video ends before" if n_clips else ""


def describe_sampling(sampling: SamplingIdentity) -> str:
    """Describe the sampling entry of a cache's identity; "not stated" if it has neither num_frames nor fps."""
    snap = sampling.get("snap_to_keyframes_s")
    snapped = "" if snap is None else f"; moved to a keyframe within {snap:g} s"
    if (fps := sampling.get("fps")) is None:
        if (n_frames := cast("int | None", sampling.get("num_frames"))) is None:
            return "not stated"
        rule = str(sampling.get("rule", TRUNCATE))
        how = "evenly spread" if rule == TRUNCATE else FRAME_RULES.get(rule, rule)
        return f"{format_count(n_frames, 'frame')} per video (--num-frames): {how}{snapped}"
    limits = [
        "" if (max_frames := sampling.get("max_frames")) is None else f", at most {max_frames} per video (--max-frames)"
    ]
    if (min_frames := sampling.get("min_frames")) is not None:
        limits.append(f", at least {min_frames} where a video has them")
    rate = f"{format_rate(cast(float, fps))} frame{'' if fps == 1 else 's'} per second (--fps)"
    return f"{rate}{''.join(limits)}{snapped}"


def describe_limit(row: VideoRow, sampling: SamplingIdentity) -> str:
    """Describe how a limit changed the number of frames of an ok video; "" if none did or the row does not state it."""
    by_rate = row.get("frames_by_rate")
    n_frames = len(row["frame_indices"])
    if not by_rate or sampling.get("fps") is None:
        return ""
    gives = f"--fps {sampling['fps']:g} gives {format_count(by_rate, 'frame')} of this clip"
    if by_rate > get_max_frames(sampling):
        return f"{gives}, capped at {sampling['max_frames']}; {RAISE}"
    return (
        f"{gives}, filled up to {n_frames}: this model takes at least {get_min_frames(sampling)} where a clip has them"
    )
