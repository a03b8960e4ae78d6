"""Baselines where golden cases do not reach: FastV, VidCom2, CDPruner, HoliTom, FlashVID, and what they share."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import gstep
from gstep.pruners.flashvid import merge_back
from gstep.pruners.holitom import choose_windows
from gstep.pruners.vectors import normalize_rows
from gstep.pruners.vidcom2 import compute_frame_budgets
from tests.gstep.synthetic import prune, video


def test_vidcom2_rounds_half_to_even_and_keeps_at_least_one() -> None:
    typical = torch.ones(3, 10, dtype=torch.float64)
    assert compute_frame_budgets(typical, 0.25).tolist() == [2, 2, 2]
    assert compute_frame_budgets(typical, 0.35).tolist() == [4, 4, 4]
    assert compute_frame_budgets(typical, 0.001).tolist() == [1, 1, 1]
    assert compute_frame_budgets(torch.cat([typical, typical[:1] - 1]), 1.0).tolist() == [8, 8, 8, 10]


def test_cdpruner_ends_where_tokens_repeat_each_other() -> None:
    """B above D, B above the number of different tokens, tokens that are all zero."""
    assert prune(video(6, 10, 8), 1.0, "cdpruner").n_kept == 8
    assert prune(video(6, 10, 8), 1.0, "cdpruner", mode="per_frame").n_kept == 6 * 8
    copies = video(1, 5, 32).expand(6, 5, 32)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        index = prune(copies.to(dtype), 0.5, "cdpruner").index
        assert sorted((index % 5).tolist()) == [0, 1, 2, 3, 4]
    images = torch.nn.functional.one_hot(torch.tensor([[0, 0, 1, 0]]), 4).float()
    evidence = {"image_embedding": images, "text_embedding": -images[:, 2]}
    assert gstep.prune(torch.zeros(1, 4, 8), 1.0, "cdpruner", evidence=evidence).index.tolist() == [2]


def test_cdpruner_embeddings_must_be_of_one_size() -> None:
    evidence = {"image_embedding": torch.ones(2, 3, 5), "text_embedding": torch.ones(2, 4)}
    with pytest.raises(ValueError, match=r"'text_embedding' must be \[Q,De\] = \[Q, 5\] .*; got shape \[2, 4\]"):
        gstep.prune(video(2, 3, 4), method="cdpruner", evidence=evidence)


def divisions(n_frames: int, longest: int) -> Iterator[list[tuple[int, int]]]:
    if n_frames == 0:
        yield []
    for size in range(1, min(n_frames, longest) + 1):
        for before in divisions(n_frames - size, longest):
            yield [*before, (n_frames - size, n_frames)]


def test_windows_save_the_most_that_any_division_does() -> None:
    rng = np.random.default_rng(0)
    for longest in (1, 2, 3, 9):
        for _ in range(10):
            still = torch.from_numpy(rng.random((6, 5)) < 0.7)
            windows, saved = choose_windows(still, longest)

            def count(division: list[tuple[int, int]], still: torch.Tensor = still) -> int:
                return sum(int(still[a : b - 1].all(dim=0).sum()) * (b - a - 1) for a, b in division if b - a > 1)

            assert saved == count(windows) == max(map(count, divisions(7, longest)))
            assert [frame for a, b in windows for frame in range(a, b)] == list(range(7))


def test_a_still_video_keeps_a_token_at_any_budget() -> None:
    tokens = torch.ones(3, 16, 4)
    pruned = gstep.prune(tokens, budget=1, method="holitom", evidence={"token_attention": torch.ones(3, 16)})
    assert pruned.n_kept == 1


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


def test_unit_of_any_magnitude_and_of_zero() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e-30, 4e-30]])
    assert torch.allclose(normalize_rows(rows), torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.6, 0.8]]))
    halves = normalize_rows(torch.tensor([[[60000.0, 60000.0]]]).half())  # whose squares are beyond 16 bits
    assert halves.dtype == torch.float32 and torch.allclose(halves, torch.full((1, 1, 2), 0.5**0.5))
