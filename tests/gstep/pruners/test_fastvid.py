"""FastVID where golden cases do not reach: segments, shares, noise, both variants."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import gstep
from gstep.pruners.fastvid import choose_tokens, count_llava_tokens, count_qwen_tokens
from gstep.pruners.segments import cut_segments
from tests.gstep.synthetic import prune, video


def test_fastvid_cuts_at_the_lowest_and_below_a_threshold() -> None:
    similarity = [0.95, 0.5, 0.99, 0.8, 0.97]
    for least, threshold, ends in ((1, 0.4, [6]), (1, 0.9, [2, 4, 6]), (4, 0.9, [1, 2, 4, 6]), (9, 0.9, range(1, 7))):
        assert list(cut_segments(similarity, least, threshold)) == list(pairwise([0, *ends]))
    assert list(cut_segments([0.9, 0.9, 0.9], 2, 0.5)) == [(0, 1), (1, 4)]
    assert list(cut_segments([], 8, 0.9)) == [(0, 1)]


def test_fastvid_llava_counts() -> None:
    # Six frames of K = 5 (2 anchors a frame): 12 anchors on the last frame and the one four before it.
    assert count_llava_tokens(6, 100, 5, 0.4, 4) == [(3, 0), (3, 6), (3, 0), (3, 0), (3, 0), (3, 6)]
    assert count_llava_tokens(3, 100, 2, 0.4, 4) == [(2, 0)] * 3  # C = 0
    assert count_llava_tokens(4, 10, 10, 0.4, 4) == [(6, 0), (6, 0), (6, 0), (6, 4)]  # 16 anchors do not fit
    assert count_llava_tokens(2, 10, 1, 1.0, 4) == [(0, 0), (0, 2)]


def test_fastvid_qwen_counts() -> None:
    # One inner segment: all of the segment's tokens go to its last frame.
    assert count_qwen_tokens(3, [2], 100, 5, 0.4, 4) == [(0, 0), (0, 0), (9, 6)]
    # Five of them: salient tokens to each, the odd one to the first; anchors to every second from the end.
    assert count_qwen_tokens(5, range(5), 100, 5, 0.4, 2) == [(3, 3), (3, 0), (3, 3), (3, 0), (3, 4)]
    assert count_qwen_tokens(6, [1, 5], 100, 3, 0.4, 1) == [(0, 0), (6, 3), (0, 0), (0, 0), (0, 0), (5, 4)]
    # No more than the frame has, half of it anchors.
    assert count_qwen_tokens(8, [7], 10, 5, 0.4, 4)[-1] == (5, 5)
    assert count_qwen_tokens(1, [0], 10, 1, 0.4, 4) == [(0, 1)]
    assert count_qwen_tokens(4, [3], 1, 1, 1.0, 4)[-1] == (0, 1)


@pytest.mark.parametrize("variant", ["llava", "qwen"])
def test_fastvid_of_few_frames_and_few_tokens(variant: str) -> None:
    """Where the official code ends with an error: T <= c, K = 1 (no salient token for qwen, no anchor for llava)."""
    for n_frames in (1, 2, 7, 8, 9):
        some, fewest = (prune(video(n_frames, 25, 16), ratio, "fastvid", variant=variant) for ratio in (0.2, 0.04))
        assert (some.n_kept, fewest.n_kept) == (5 * n_frames, n_frames)
        assert some.merged is not None and 0 < int(some.merged.sum()) <= 2 * n_frames
        assert fewest.merged is not None and fewest.merged.any() == (variant == "qwen")


@pytest.mark.parametrize("variant", ["llava", "qwen"])
def test_fastvid_noise_overrides_the_seed(variant: str) -> None:
    tokens = torch.eye(20).expand(4, 20, 20)  # all as dense and as far from each other: the noise decides
    attention = torch.arange(20.0).expand(4, 20)
    evidence: dict[str, Any] = {"token_attention": attention, "frame_feature": torch.eye(4)}

    def keep(seed: int) -> tuple[int, ...]:
        return tuple(gstep.prune(tokens, 0.5, "fastvid", evidence=evidence, seed=seed, variant=variant).index.tolist())

    drawn = [keep(seed) for seed in range(4)]
    assert len(set(drawn)) > 1
    evidence["noise"] = torch.from_numpy(np.random.default_rng(0).random(80))
    assert {keep(seed) for seed in range(4)} == {drawn[0]}
    evidence["noise"] = torch.zeros(79)
    with pytest.raises(ValueError, match=r"'noise' must be \[T\*N\] = \[80\] .*; got shape \[79\]"):
        keep(0)


@pytest.mark.parametrize(("every_frame_draws", "first"), [(True, 20), (False, 0)])
def test_fastvid_uses_the_noise_up_as_the_official_variants_do(every_frame_draws: bool, first: int) -> None:
    noise = torch.from_numpy(np.random.default_rng(1).random(40)).float()
    tokens = torch.eye(20).expand(2, 20, 20)
    kept = choose_tokens(tokens, torch.ones(2, 20), noise, [(0, 0), (0, 1)], every_frame_draws=every_frame_draws)
    assert [len(frame.anchors) for frame in kept] == [0, 1]
    assert kept[1].anchors.tolist() == [int(noise[first : first + 20].argmax())]


def test_fastvid_qwen_keeps_the_last_of_similar_frames() -> None:
    tokens = video(1, 40, 32).repeat(10, 1, 1) + 0.01 * video(10, 40, 32, seed=1)
    tokens[6:] += 3 * video(1, 40, 32, seed=2)
    pruned = prune(tokens, 0.1, "fastvid", variant="qwen", c=2)
    kept = torch.bincount(pruned.index // 40, minlength=10).tolist()
    assert [frame for frame, count in enumerate(kept) if count] == [5, 9]
    assert kept[5] == 4 * 6 and kept[9] == 4 * 4
