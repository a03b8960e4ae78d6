"""How frames are sampled, in words, and the videos whose number of frames a limit changed: capped or filled up.

``--fps`` gives a number of frames by the length of a clip. ``--max-frames`` caps it, and a model's processor may fill
it up to a least number. A row says in ``frames_by_rate`` that a limit changed its frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TypedDict, cast

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.header import SamplingIdentity
from pipeline.errors import count_of, name_first
from pipeline.rows import VideoRecord, VideoRow, format_rate, sampled_fps
from pipeline.video.sampling import FRAME_RULES, TRUNCATE, Sampling, count_frames

MAX_EXAMPLES = 3  # ids of filled videos
RAISE = "--max-frames raises it, in a new cache"


class FrameLimits(TypedDict):
    """The videos of a cache that were sampled by ``--fps``, and whose number of frames a limit changed. JSON values.

    Attributes:
        fps: frames a second, as asked for.
        max_frames: the limit above which a video is capped; None without one.
        min_frames: the least number of frames, up to which a video is filled.
        n_capped: videos with fewer frames than ``fps`` gives.
        lowest_fps: the rate at which the longest of them was sampled; None without any.
        longest: its id; None without any.
        n_filled: videos with more frames than ``fps`` gives.
        filled: the ids of the first of them.
        n_unknown: videos of an older version, whose rows do not say whether a limit changed their frames.
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


def find_cap(sampling: SamplingIdentity) -> float:
    """Return the most frames that a video gets; infinity without a limit.

    A limit made a video's frames fewer if its ``frames_by_rate`` is above the cap, else more.
    """
    most = cast("int | None", sampling.get("max_frames"))
    return math.inf if most is None else most


def find_least(sampling: SamplingIdentity) -> int:
    """Return the least number of frames of a video that has so many; a lower ``--max-frames`` wins."""
    return int(min(cast(int, sampling.get("min_frames", 1)), find_cap(sampling)))


def plan_frames(sampling: Sampling, seconds: float) -> int:
    """Return the number of frames of a video that plays for so many seconds; it may have fewer."""
    if sampling.fps is None:
        return sampling.num_frames or 0
    n_frames = max(sampling.min_frames, count_frames(seconds, sampling.fps))
    return min(n_frames, sampling.max_frames or n_frames)


def describe_limits(limits: FrameLimits) -> Iterator[str]:
    """Yield a line for the capped videos, for the filled ones, and for those of which nothing is known, if any."""
    if limits["n_capped"]:
        capped = count_of(limits["n_capped"], "video")
        verb = "was" if limits["n_capped"] == 1 else "were"
        lowest = f"lowest rate {format_rate(limits['lowest_fps'])} frames per second, of {limits['longest']}"
        yield f"{capped} {verb} capped at {count_of(limits['max_frames'] or 0, 'frame')} ({lowest}); {RAISE}"
    if limits["n_filled"]:
        filled = f"{count_of(limits['n_filled'], 'short video')} got more frames than --fps {limits['fps']:g} gives"
        names = name_first(limits["filled"], limits["n_filled"])
        yield f"{filled}, since this model takes at least {limits['min_frames']} where a video has them ({names})"
    if limits["n_unknown"]:
        unknown = count_of(limits["n_unknown"], "row")
        yield f"{unknown} of an older version: whether a limit changed the number of frames is not known"


def count_limits(rows: Iterable[VideoRecord], sampling: SamplingIdentity) -> FrameLimits | None:
    """Count the ok videos of some rows whose number of frames a limit changed; None if frames do not go by a rate."""
    if sampling.get("fps") is None:
        return None
    by_rate = [(row.get("frames_by_rate"), row) for row in rows]
    limited = [(n, row) for n, row in by_rate if n]
    capped = [row for n, row in limited if n > find_cap(sampling)]
    longest = max(capped, key=lambda row: row["frames_by_rate"] or 0, default=None)
    filled = [row["video_id"] for n, row in limited if n <= find_cap(sampling)]
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
    """Make FrameLimits for sampling by a rate; ``longest`` is the row of the longest capped video, if there is any."""
    return {
        "fps": cast(float, sampling["fps"]),
        "max_frames": cast("int | None", sampling.get("max_frames")),
        "min_frames": find_least(sampling),
        "n_capped": n_capped,
        "lowest_fps": None if longest is None else sampled_fps(longest),
        "longest": None if longest is None else longest["video_id"],
        "n_filled": n_filled,
        "filled": filled,
        "n_unknown": n_unknown,
    }


def foresee_limits(sampling: SamplingIdentity, todo: pa.Table) -> Iterator[str]:
    """Yield which videos (TODO_SCHEMA) will get fewer or more frames than the rate gives, as far as that is known.

    Nothing for sampling without a rate. The length of a video is not known before it is decoded, but a clip of the list
    is no longer than from its start to its end.
    """
    if (fps := cast("float | None", sampling.get("fps"))) is None:
        return
    lengths = pc.subtract(todo["end_s"], pc.fill_null(todo["start_s"], 0.0))
    if (cap := find_cap(sampling)) < math.inf:
        longer = f"a video of more than {cap / fps:.4g} s is capped at {count_of(int(cap), 'frame')}; {RAISE}"
        yield longer + _count_clips(pc.greater(lengths, cap / fps))
    if (least := find_least(sampling)) > 1:
        shorter = f"a video of at most {(least - 1) / fps:.4g} s gets {least} frames if it has them, for this model"
        yield shorter + _count_clips(pc.less_equal(lengths, (least - 1) / fps))


def _count_clips(is_limited: pa.ChunkedArray) -> str:
    """Say how many clips are so long or short by their bounds; "" if none is known to be."""
    n_clips = pc.sum(is_limited).as_py() or 0
    return f"; {count_of(n_clips, 'clip')} by start and end, unless the video ends before" if n_clips else ""


def describe_sampling(sampling: SamplingIdentity) -> str:
    """Describe the sampling of a cache's identity in words; "not stated" where it has neither number nor rate."""
    snap = sampling.get("snap_to_keyframes_s")
    snapped = "" if snap is None else f"; moved to a keyframe within {snap:g} s"
    if (fps := sampling.get("fps")) is None:
        if (n_frames := cast("int | None", sampling.get("num_frames"))) is None:
            return "not stated"
        rule = str(sampling.get("rule", TRUNCATE))
        how = "evenly spread" if rule == TRUNCATE else FRAME_RULES.get(rule, rule)
        return f"{count_of(n_frames, 'frame')} a video (--num-frames): {how}{snapped}"
    limits = ["" if (most := sampling.get("max_frames")) is None else f", at most {most} a video (--max-frames)"]
    if (least := sampling.get("min_frames")) is not None:
        limits.append(f", at least {least} where a video has them")
    rate = f"{format_rate(cast(float, fps))} frame{'' if fps == 1 else 's'} a second (--fps)"
    return f"{rate}{''.join(limits)}{snapped}"


def describe_limit(row: VideoRow, sampling: SamplingIdentity) -> str:
    """Describe how a limit changed the frames of one video; "" if none did, or its row does not say it."""
    by_rate, n_frames = row.get("frames_by_rate"), len(row["frame_indices"])
    if not by_rate or sampling.get("fps") is None:
        return ""
    gives = f"--fps {sampling['fps']:g} gives {count_of(by_rate, 'frame')} of this clip"
    if by_rate > find_cap(sampling):
        return f"{gives}, capped at {sampling['max_frames']}; {RAISE}"
    return f"{gives}, filled up to {n_frames}: this model takes at least {find_least(sampling)} where a clip has them"
