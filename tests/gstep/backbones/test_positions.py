"""What Qwen2.5-VL's positions in time make of frames that are uneven, or denser than there are positions."""

import numpy as np
import torch

from gstep.backbones import ModelSource
from gstep.backbones.positions import PositionFaults, count_position_faults
from gstep.language import Visual, prompt_builder


def extra_of(second_per_grid_ts, tokens_per_second=2):
    return {
        "second_per_grid_ts": second_per_grid_ts,
        "tokens_per_second": tokens_per_second,
        "temporal_patch_size": 2,
        "video_grid_thw": [0, 2, 2],
        "spatial_merge_size": 2,
    }


def test_patches_share_positions_above_tokens_per_second():
    """At 8 frames a second and 2 positions, 16 patches lie on 8."""
    assert count_position_faults({"grid": [2, 2]}, [0.0, 1.0], even=False) == PositionFaults(
        None, None
    )  # no such positions
    for fps, seconds, shared in ((1, 8, 0), (4, 8, 0), (8, 4, 8), (16, 4, 24)):
        times = np.arange(fps * seconds) / fps
        assert count_position_faults(extra_of(2 / fps), times.tolist(), even=True) == PositionFaults(0, shared)


def test_the_positions_that_are_counted_are_those_of_the_prompt():
    """Here 16 patches of one token, built into a prompt as any video is."""
    extra = {**extra_of(0.25), "video_grid_thw": [16, 2, 2], "grid": [1, 1]}
    visual = Visual(torch.zeros(16, 64), torch.arange(16), n_frames=16, tokens_per_frame=1, extra=extra)
    prompt = prompt_builder(ModelSource.resolve("tiny-qwen2-5-vl")).build("p", [visual])
    ((start, end),) = prompt.spans
    at = prompt.positions[0, start:end]
    assert len(at) == 16 and 16 - len(at.unique()) == 8
    assert count_position_faults(extra, (np.arange(32) / 8).tolist(), even=True) == PositionFaults(0, 8)


def test_uneven_frames_are_counted_where_they_are_a_position_off():
    falling = np.linspace(0, 3, 32) ** 2  # as of a file whose rate falls
    rounded = np.floor(np.linspace(0, 249, 32)) / 25  # as frames of a file at 25 a second are
    for times, even in ((np.linspace(0, 10, 32), False), (rounded, False), (falling, True), (np.zeros(32), False)):
        assert count_position_faults(extra_of(2 * 10 / 32), times.tolist(), even=even) == PositionFaults(0, 0)
    fitting = falling[::2] / falling[30] * 15 * 1.25
    uneven = sum(abs(fitting[t] - 1.25 * t) >= 1 for t in range(16))
    assert count_position_faults(extra_of(2 * 10 / 32), falling.tolist(), even=False) == PositionFaults(uneven, 0)
    assert uneven > 0
