"""A check for temporal positions, which advance by a constant step, against the real times of the frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gstep.backbones.base import ModelExtra


class PositionFaults(NamedTuple):
    """The number of temporal patches whose temporal position is wrong; both are None if positions do not encode times.

    Attributes:
        uneven: patches whose real time is at least one position away from their evenly spaced position.
        shared: patches with the same integer position as the patch before, because the step is below one position.
    """

    uneven: int | None
    shared: int | None


def count_position_faults(extra: ModelExtra, timestamps: Sequence[float], *, even: bool) -> PositionFaults:
    """Count the temporal patches of a video whose positions do not match their times.

    Positions follow get_rope_index of transformers, which multiplies a patch's index by a constant interval.

    Args:
        extra: the video's facts; only Qwen2.5-VL has the keys that make positions depend on time.
        timestamps: seconds of each sampled frame, at least one.
        even: True if frames were sampled at evenly spaced times; no patch then counts as uneven.

    Returns:
        The counts; (None, None) without ``tokens_per_second`` in ``extra``. If all patches have the same time, none is
        uneven.
    """
    if "tokens_per_second" not in extra:
        return PositionFaults(None, None)
    starts = np.asarray(timestamps[:: extra["temporal_patch_size"]], np.float64)
    interval = extra["tokens_per_second"] * extra["second_per_grid_ts"]
    position = np.arange(len(starts)) * interval
    shared = int((np.diff(np.floor(position)) == 0).sum())
    span = float(starts[-1] - starts[0])
    if even or not span:
        return PositionFaults(0, shared)
    expected = (starts - starts[0]) / span * position[-1]
    return PositionFaults(int((np.abs(expected - position) >= 1).sum()), shared)
