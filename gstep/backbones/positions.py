"""The check of positions in time, which advance evenly from patch to patch, against the times of the sampled frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gstep.backbones.base import ModelExtra


class PositionFaults(NamedTuple):
    """The number of temporal patches of a video with wrong positions in time; None if positions do not encode times.

    Attributes:
        uneven: patches whose time lies at least a whole position from their evenly spaced position.
        shared: patches at the position of the patch before, because there are fewer positions than patches.
    """

    uneven: int | None
    shared: int | None


def position_faults(extra: ModelExtra, timestamps: Sequence[float], *, even: bool) -> PositionFaults:
    """Count the patches whose positions in time do not fit their times.

    Positions follow get_rope_index of transformers (models/qwen2_5_vl/modeling_qwen2_5_vl.py), which multiplies the
    index of a patch by a constant interval. This function does not change positions; it reports the error.

    Args:
        timestamps: seconds of each sampled frame.
        even: True if frames were sampled at even times. No patch is then uneven: a timestamp is the time at which a
            frame appeared on screen, which may lie before its sampling time.
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
