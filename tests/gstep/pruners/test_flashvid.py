"""FlashVID by hand, and where its golden cases do not reach."""

from itertools import pairwise

import pytest
import torch

import gstep
from gstep.pruners.flashvid import merge_back, pick_diverse
from gstep.pruners.vectors import normalize_rows
from tests.gstep.synthetic import prune, video


def test_flashvid_picks_what_weighs_much_far_from_what_is_picked() -> None:
    degrees = torch.tensor([[0.0, 30.0, 90.0, 180.0]]).deg2rad()
    direction = torch.stack([degrees.cos(), degrees.sin()], dim=-1)
    for weight, order in (
        ([1.0, 1.0, 1.0, 1.0], [3, 0, 2, 1]),  # 180 is the loneliest; then 2, 1 and 0.13 from what is picked
        ([1.0, 9.0, 1.0, 1.0], [1, 3, 2, 0]),  # 9 x 0.13 is the most
        ([-1.0, -1.0, 1.0, -1.0], [2, 1, 0, 3]),  # none is picked twice where all the others score below 0
    ):
        picked = [pick_diverse(direction, torch.tensor([weight]), count)[0] for count in range(5)]
        assert [int((after & ~before).nonzero()) for before, after in pairwise(picked)] == order


def test_flashvid_divides_by_what_is_merged_into_a_token_directly() -> None:
    """Frame 1's token a is merged into frame 0's, and two of frame 2 into a; b is nowhere near."""
    a, b = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    tokens = torch.stack([torch.stack([a, b]), torch.stack([2 * a, -b]), torch.stack([3 * a, 4 * a])])
    free = torch.ones(3, 2, dtype=torch.bool)
    merged, left = merge_back(tokens, normalize_rows(tokens), free, 0.8, min_tokens=1)
    assert left.tolist() == [[True, True], [False, True], [False, False]]
    assert torch.equal(merged[0, 0], (1 + 2 + 3 + 4) * a / 2) and torch.equal(merged[0, 1], b)
    free[1, 0] = False  # picked: no part of a tree
    merged, left = merge_back(tokens, normalize_rows(tokens), free, 0.8, min_tokens=1)
    assert left.tolist() == [[True, True], [False, True], [True, True]]
    assert torch.equal(merged[left], tokens[left])


def test_flashvid_merges_the_most_similar_where_too_few_would_stay() -> None:
    tokens = torch.tensor([[[1.0, 0.0]], [[1.0, 0.1]], [[1.0, 0.4]], [[1.0, 0.5]]])
    free = torch.ones(4, 1, dtype=torch.bool)
    left = [merge_back(tokens, normalize_rows(tokens), free, 0.5, least)[1].flatten().tolist() for least in (1, 2, 4)]
    assert left == [
        [True, False, False, False],
        [True, True, True, False],  # 2 may go, and what is as similar as the second stays
        [True, True, True, True],
    ]


@pytest.mark.parametrize("params", [{}, {"min_segment_num": 1, "segment_threshold": -1.0}])
def test_flashvid_keeps_each_place_once_at_any_ratio(params: dict[str, float]) -> None:
    """Where the official code keeps a place twice (lone frames) or fails (all tokens; nothing similar enough)."""
    tokens = video(6, 25, 16)
    for ratio in (0.04, 0.3, 0.9, 1.0):
        for threshold in (0.2, 1.0):
            pruned = prune(tokens, ratio, "flashvid", temporal_threshold=threshold, **params)
            assert pruned.n_kept <= min(150, 150 * ratio + 12)
            assert pruned.n_kept >= 150 * ratio * (1 if params else 0.75)  # at most the peaks of lone frames are fewer
    assert prune(tokens, 1.0, "flashvid", min_segment_num=1, segment_threshold=-1.0).index.tolist() == list(range(150))


def test_flashvid_expands_the_budget() -> None:
    evidence = {"token_attention": torch.rand(2, 100)}
    for expansion, kept in ((1.0, 20), (1.25, 25), (99.0, 100)):
        pruned = gstep.prune(video(2, 100, 8), 0.2, "flashvid", evidence=evidence, expansion=expansion, alpha=1)
        assert pruned.n_kept == 2 * kept and pruned.merged is not None and not pruned.merged.any()
