"""The rules that choose the frames of a clip: evenly spread, or by time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import VideoFault

TRUNCATE, ROUND_EVEN = "truncate", "round-even"
#: Name of a rule of uniform sampling -> its description for users.
FRAME_RULES: Mapping[str, str] = {
    TRUNCATE: "positions are truncated, as in lmms-eval for LLaVA-OneVision; a short video repeats frames",
    ROUND_EVEN: "positions are rounded, and an even number of frames is taken, no more than there are (qwen-vl-utils)",
}
# How a Qwen processor samples a clip that gives fewer frames by time than its minimum.
ROUNDED, STEPPED = "rounded", "stepped"
#: The version of the rule by which ``fps`` takes frames. A cache cannot mix rows made by different versions.
TIME_RULE = 2
#: The version of the rules by which a file is decoded to frames. A cache may mix rows made by several versions: each
#: run records its version, and reports if the cache's last run had another one.
DECODING_RULES = 2
#: The kinds of files whose frames or times differ from those of the previous version.
CHANGED_BY_RULES = (
    "transport streams of several PIDs, AVI and raw streams with B-frames, packets that show no frame, frame sizes "
    "that change, colors above 8 bits"
)
# Times are quotients of integers; a frame at 0.1 s must count as on screen at 0.1 s. No video has frames this close.
_EPSILON = 1e-6
_TICKS = 2  # by which rounding may move a timestamp: its own, the first frame's, and the demuxer's interpolation
_MS, _HALF_MS = 0.001, 0.0005  # clip bounds are often in milliseconds (shot detectors, subtitles, tables)


@dataclass(frozen=True)
class Sampling:
    """The rule for choosing frames: ``num_frames`` spread evenly over the clip, or ``fps`` frames per second.

    Attributes:
        num_frames: the number of frames; None with ``fps``.
        fps: frames per second; None with ``num_frames``.
        max_frames: only with ``fps``: if it gives more frames, this many are spread evenly instead, over the frames if
            their rate is constant, otherwise over time. None for no limit.
        rule: only with ``num_frames``: a name in FRAME_RULES, which says how positions between two frames are rounded
            and what happens to a video with too few frames.
        snap_to_keyframes_s: a chosen frame moves to a keyframe within this many seconds; None moves none.
        min_frames: only with ``fps``: if it gives fewer frames, this many are spread over the clip's frames, as far as
            it has them.
        min_rule: how they are spread: ROUNDED as in Qwen3VLVideoProcessor.sample_frames, or STEPPED as in
            Qwen2VLVideoProcessor's, which takes an even number.

    Raises:
        ValueError: not exactly one of ``num_frames`` and ``fps`` is given, a number is not positive, or a rule is
            unknown or does not fit.
    """

    num_frames: int | None = 32
    fps: float | None = None
    max_frames: int | None = 768
    rule: str = TRUNCATE
    snap_to_keyframes_s: float | None = None
    min_frames: int = 1
    min_rule: str = ROUNDED

    def __post_init__(self) -> None:
        """Raise ValueError if a field is invalid or two of them contradict each other."""
        if self.rule not in FRAME_RULES:
            raise ValueError(f"rule must be one of {', '.join(FRAME_RULES)}, got {self.rule!r}")
        if self.rule != TRUNCATE and self.fps is not None:
            raise ValueError(f"the rule {self.rule} applies only to num_frames; it cannot be combined with fps")
        if (self.num_frames is None) == (self.fps is None):
            raise ValueError("give exactly one of num_frames and fps, and set the other to None")
        if self.num_frames is not None and self.num_frames < 1:
            raise ValueError(f"num_frames must be at least 1, got {self.num_frames}")
        if self.fps is not None and not (math.isfinite(self.fps) and self.fps > 0):
            raise ValueError(f"fps must be a positive number, got {self.fps}")
        if self.max_frames is not None and self.max_frames < 1:
            raise ValueError(f"max_frames must be at least 1, got {self.max_frames}")
        if self.min_frames < 1 or self.min_rule not in (ROUNDED, STEPPED):
            raise ValueError(
                f"min_frames must be at least 1, by a known rule; got {self.min_frames}, {self.min_rule!r}"
            )
        if self.snap_to_keyframes_s is not None and not 0 < self.snap_to_keyframes_s < math.inf:
            raise ValueError(f"snap_to_keyframes_s must be a positive number, got {self.snap_to_keyframes_s}")


def find_clip_range(
    timestamps: NDArray[np.float64],
    start_s: float | None,
    end_s: float | None,
    duration_s: float,
    tick_s: float = 0.0,
) -> tuple[int, int]:
    """Return the range of frames (first, stop) whose timestamps lie in [start_s, end_s), within ``find_tolerances``.

    Args:
        start_s: None for the start of the video.
        end_s: may exceed the video's end; None for that end.
        tick_s: seconds per tick of the container's clock; 0 if timestamps are not rounded.

    Raises:
        VideoFault: "unsupported" if the clip is empty, starts at a negative or infinite time or behind the video's end,
            or contains no frame.
    """
    clip = (
        f"the clip [{_format_seconds(start_s, '0')}, {_format_seconds(end_s, 'end')}) of a video of {duration_s:.3f} s"
    )
    start, end = -math.inf if start_s is None else start_s, math.inf if end_s is None else end_s
    if not (start < end) or (start_s is not None and not 0 <= start_s < math.inf):
        raise VideoFault("unsupported", f"{clip} must start at 0 s or later and end after its start")
    if start >= duration_s:
        raise VideoFault("unsupported", f"{clip} starts behind the end of the video")
    latest = timestamps + find_tolerances(timestamps, tick_s)
    first, stop = (int(i) for i in np.searchsorted(latest, [start, end]))
    if first >= stop:
        raise VideoFault("unsupported", f"{clip} holds no frame")
    return first, stop


def find_tolerances(timestamps: NDArray[np.float64], tick_s: float) -> NDArray[np.float64]:
    """Return the tolerance of each timestamp, [F] seconds: times within it mean that frame.

    The tolerance is half a millisecond plus half a tick (none if timestamps are not rounded), but less than half the
    distance to the nearest frame with another timestamp. The half tick shrinks to zero if that frame is closer than two
    ticks: frames that are one tick apart, as in AVI, are counted in ticks.

    Args:
        timestamps: [F] seconds, ascending; several frames may share one.
    """
    steps = np.diff(timestamps, prepend=-math.inf, append=math.inf)
    before, after = steps[:-1], steps[1:]
    if not (after > 0).all():  # frames with equal timestamps have the same neighbors
        _, inverse = np.unique(timestamps, return_inverse=True)
        distinct = np.append(before[before > 0], math.inf)
        before, after = distinct[inverse], distinct[inverse + 1]
    nearest = np.minimum(before, after)
    return np.minimum(np.clip(nearest - tick_s, 0.0, tick_s) / 2 + _HALF_MS + _EPSILON, 0.49 * nearest)


def is_even(timestamps: NDArray[np.float64], tick_s: float) -> bool:
    """Return True if frames have a constant rate, apart from rounding by two ticks of ``tick_s`` seconds or 1 ms.

    Fewer than three frames always do.
    """
    if len(timestamps) < 3:
        return True
    step = (timestamps[-1] - timestamps[0]) / (len(timestamps) - 1)
    return _is_near(timestamps, timestamps[0] + step * np.arange(len(timestamps)), step, tick_s)


def find_true_times(
    timestamps: NDArray[np.float64], duration_s: float, fps: float, tick_s: float
) -> tuple[NDArray[np.float64], float, float]:
    """Return timestamps, duration and tick without the container's rounding, so that containers give the same frames.

    If the rate varies, the arguments are returned unchanged. Otherwise the timestamps are evenly spaced from the first
    one; the duration is the end of the last frame if the given one only differs by rounding; and the tick is 0 if the
    first timestamp is 0.

    Args:
        timestamps: [F] seconds, ascending, at least one.
    """
    even = timestamps[0] + np.arange(len(timestamps)) / fps
    if not _is_near(timestamps, even, 1 / fps, tick_s):
        return timestamps, duration_s, tick_s
    end = float(even[-1] + 1 / fps)
    is_rounded = abs(duration_s - end) <= max(_TICKS * tick_s, _MS) + _EPSILON
    # If the first frame is behind the container's start, its own time is rounded.
    return even, end if is_rounded else duration_s, tick_s if timestamps[0] else 0.0


def _is_near(timestamps: NDArray[np.float64], even: NDArray[np.float64], step: float, tick_s: float) -> bool:
    """Return True if each timestamp is within two ticks or 1 ms, but at most half a ``step``, of its ``even`` time."""
    return bool(np.abs(timestamps - even).max() <= min(max(_TICKS * tick_s, _MS) + _EPSILON, step / 2))


def find_clip_rate(
    timestamps: NDArray[np.float64],
    fps: float,
    start_s: float | None,
    end_s: float | None,
    duration_s: float,
    tick_s: float = 0.0,
) -> float:
    """Return the frames per second of a clip: the file's ``fps``, or the clip's frames per second if the rate varies.

    Raises:
        VideoFault: "unsupported" if the rate varies and the clip is not valid or contains no frame.
    """
    if is_even(timestamps, tick_s):
        return fps
    first, stop = find_clip_range(timestamps, start_s, end_s, duration_s, tick_s)
    start, end = _find_bounds(timestamps, start_s, end_s, duration_s)
    return (stop - first) / (end - start)


def choose_frames(
    timestamps: NDArray[np.float64],
    sampling: Sampling,
    start_s: float | None = None,
    end_s: float | None = None,
    duration_s: float | None = None,
    tick_s: float = 0.0,
) -> NDArray[np.int64]:
    """Return the frames to use: [T] int64 indices, ascending; an index may repeat.

    With ``num_frames``, ``sampling.rule`` decides: by default the integer ``linspace`` over the clip's frames that
    lmms-eval uses for LLaVA-OneVision.

    With ``fps``, for k = 0, 1, ..., the frame on screen at start + k / fps is taken: the last one whose timestamp is
    not later (within ``find_tolerances``). The first frame may therefore have appeared just before the clip starts. No
    frame at or behind the end of the clip is taken. Then ``min_frames`` and ``max_frames`` apply, but not
    ``snap_to_keyframes_s``.

    Args:
        timestamps: [F] seconds of every frame of the file in the order in which they are shown, ascending.
        start_s: start of the clip; None for the start of the video.
        end_s: end of the clip, not included; None for the end of the video.
        duration_s: end of the last frame; by default its timestamp plus the mean distance between frames.
        tick_s: seconds per tick of the container's clock; 0 if timestamps are not rounded.

    Raises:
        VideoFault: "unsupported" if the video or the clip has no frame, or the clip is not valid (``find_clip_range``).
    """
    if len(timestamps) == 0:
        raise VideoFault("unsupported", "the video holds no frame")
    if duration_s is None:
        duration_s = float(timestamps[-1]) + float(timestamps[-1] - timestamps[0]) / max(1, len(timestamps) - 1)
        duration_s = np.nextafter(duration_s, math.inf)
    first, stop = find_clip_range(timestamps, start_s, end_s, duration_s, tick_s)
    if sampling.fps is None:
        assert sampling.num_frames is not None
        spread = _spread_frames if sampling.rule == TRUNCATE else _round_frames
        return spread(first, stop, sampling.num_frames)
    start, end = _find_bounds(timestamps, start_s, end_s, duration_s)
    fps = sampling.fps
    max_frames = sampling.max_frames
    count = count_frames(end - start, fps)
    if max_frames is not None and count > max_frames:
        if is_even(timestamps, tick_s):
            return _spread_frames(first, stop, max_frames)
        count, fps = max_frames, max_frames / (end - start)
    tolerance = find_tolerances(timestamps, tick_s)
    times = start + np.arange(count) / fps
    times = times[: max(1, int(np.searchsorted(times, end - min(tolerance[stop - 1], 0.5 / fps))))]
    indices = np.searchsorted(timestamps - tolerance, times, side="right").astype(np.int64) - 1
    indices = indices[indices < stop]
    min_frames = min(sampling.min_frames, max_frames or sampling.min_frames, stop - first)
    return indices if len(indices) >= min_frames else _fill_frames(indices, first, stop, min_frames, sampling.min_rule)


def count_frames_by_rate(
    n_frames: int,
    timestamps: NDArray[np.float64],
    sampling: Sampling,
    start_s: float | None,
    end_s: float | None,
    duration_s: float,
) -> int | None:
    """Return how many frames ``sampling.fps`` alone would give if a limit changed their number.

    Args:
        n_frames: the number of frames that ``choose_frames`` chose.

    Returns:
        None without ``fps``, 0 if no limit applied, otherwise the number, at most 2^31 - 1.
    """
    if sampling.fps is None:
        return None
    start, end = _find_bounds(timestamps, start_s, end_s, duration_s)
    n_by_rate = count_frames(end - start, sampling.fps)
    max_frames = sampling.max_frames
    is_limited = n_frames > n_by_rate or (max_frames is not None and n_by_rate > max_frames)
    return min(n_by_rate, 2**31 - 1) if is_limited else 0


def count_frames(seconds: float, fps: float) -> int:
    """Return the number of frames that ``fps`` takes in a number of seconds, without limits; at least 1."""
    return max(1, math.ceil(min(seconds * fps, 1e15) - _EPSILON))


def _find_bounds(
    timestamps: NDArray[np.float64], start_s: float | None, end_s: float | None, duration_s: float
) -> tuple[float, float]:
    """Return the start and end, in seconds, of the overlap of the clip with the time in which frames are shown."""
    start = float(timestamps[0]) if start_s is None else max(start_s, float(timestamps[0]))
    return start, duration_s if end_s is None else min(end_s, duration_s)


def snap_frames(
    indices: NDArray[np.int64], timestamps: NDArray[np.float64], keyframes: NDArray[np.int64], within_s: float
) -> NDArray[np.int64]:
    """Move chosen frames to keyframes at most ``within_s`` seconds away; return [T] indices, ascending.

    Pairs are matched by distance, the nearest first. A keyframe takes one frame; a frame without a free keyframe stays.

    Args:
        indices: [T] indices of the chosen frames, ascending; not modified.
        timestamps: [F] seconds of every frame, ascending.
        keyframes: [K] indices of the keyframes to move to, ascending.
    """
    times = timestamps[keyframes]
    frame_times = timestamps[indices]
    first, stop = (
        np.searchsorted(times, frame_times + side, "right" if side > 0 else "left") for side in (-within_s, within_s)
    )
    pairs = [(abs(frame_times[i] - times[k]), i, k) for i in range(len(indices)) for k in range(first[i], stop[i])]
    result = indices.copy()
    moved = set[int]()
    used_keyframes = set[int]()
    for _, i, key in sorted(pairs):
        if i not in moved and key not in used_keyframes:
            moved.add(i)
            used_keyframes.add(key)
            result[i] = keyframes[key]
    return np.sort(result)


def _spread_frames(first: int, stop: int, count: int) -> NDArray[np.int64]:
    """Return ``count`` evenly spaced frames of [first, stop), truncated to integers; frames may repeat."""
    return first + np.linspace(0, stop - first - 1, count, dtype=int).astype(np.int64)


def _round_frames(first: int, stop: int, count: int) -> NDArray[np.int64]:
    """Return evenly spaced frames of [first, stop): ``count`` or all, rounded down to an even number, but at least 2.

    A single frame is repeated. Positions are rounded as ``torch.linspace(...).round()`` does in float32, as in
    vision_process.py of qwen-vl-utils 0.0.14: from the start up to the middle, from the end behind it.
    """
    count = max(2, min(count, stop - first) // 2 * 2)
    last = np.float32(stop - first - 1)
    step = last / np.float32(count - 1)
    positions = np.arange(count // 2, dtype=np.float32)
    halves = (step * positions, (last - step * positions)[::-1])
    return first + np.rint(np.concatenate(halves)).astype(np.int64)


def _fill_frames(indices: NDArray[np.int64], first: int, stop: int, min_frames: int, rule: str) -> NDArray[np.int64]:
    """Return ``min_frames`` frames of [first, stop) by a Qwen processor's rule, or ``indices`` if these are no fewer.

    STEPPED rounds an odd ``min_frames`` down. The rules are those of sample_frames in transformers 5.24:
    np.linspace(...).round() in models/qwen3_vl/video_processing_qwen3_vl.py, torch.arange(0, n, n / count).int() in
    models/qwen2_vl/video_processing_qwen2_vl.py.
    """
    if rule == STEPPED:
        min_frames = min_frames // 2 * 2
        positions = np.arange(min_frames) * ((stop - first) / max(1, min_frames))
        spread = positions.astype(np.float32).astype(np.int64)
    else:
        spread = np.linspace(0, stop - first - 1, min_frames).round().astype(np.int64)
    return first + spread if len(spread) > len(indices) else indices


def _format_seconds(value: float | None, none: str) -> str:
    """Format seconds for a message; None gives the text ``none``."""
    return none if value is None else f"{value:g} s"
