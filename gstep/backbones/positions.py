"""How well positions in time, which count evenly from patch to patch, fit the frames that were taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gstep.backbones.base import ModelExtra


class PositionFaults(NamedTuple):
    """The temporal patches of a video whose positions tell their times wrongly; None where positions tell no times.

    Attributes:
        uneven: patches that lie a whole position or more from where even spacing puts them.
        shared: patches at the position of the patch before, since there are fewer positions than patches.
    """

    uneven: int | None
    shared: int | None


def position_faults(extra: ModelExtra, timestamps: Sequence[float], *, even: bool) -> PositionFaults:
    """Count the patches whose positions in time do not tell their times.

    Positions are those of get_rope_index of transformers (models/qwen2_5_vl/modeling_qwen2_5_vl.py), which multiplies
    the number of a patch by one interval for all of a video. It stays so; this says what comes of it.

    Args:
        timestamps: seconds of each sampled frame.
        even: whether the frames were taken at even times, so that what was on screen may have come up earlier.
    """
    if "tokens_per_second" not in extra:
        return PositionFaults(None, None)
    starts = np.asarray(timestamps[:: extra["temporal_patch_size"]], np.float64)
    interval = extra["tokens_per_second"] * extra["second_per_grid_ts"]
    counted = np.arange(len(starts)) * interval
    shared = int((np.diff(np.floor(counted)) == 0).sum())
    span = float(starts[-1] - starts[0])
    if even or not span:
        return PositionFaults(0, shared)
    fitting = (starts - starts[0]) / span * counted[-1]
    return PositionFaults(int((np.abs(fitting - counted) >= 1).sum()), shared)
