"""Methods by hand, where golden cases do not reach: counts, divisions of a budget, ties and edges."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import gstep
from gstep.pruners import tango
from gstep.pruners.fastvid import count_qwen_tokens
from gstep.pruners.flashvid import merge_back
from gstep.pruners.holitom import choose_windows
from gstep.pruners.novelty import Novelty, compute_token_novelty
from gstep.pruners.segments import cut_segments
from gstep.pruners.tango import find_groups, rotate_directions
from gstep.pruners.vectors import normalize_rows
from gstep.pruners.vidcom2 import compute_frame_budgets
from tests.gstep.oracle import exact_tokens, oracle
from tests.gstep.synthetic import FLOATS, prune, video


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


def test_unit_of_any_magnitude_and_of_zero() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e-30, 4e-30]])
    assert torch.allclose(normalize_rows(rows), torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.6, 0.8]]))
    halves = normalize_rows(torch.tensor([[[60000.0, 60000.0]]]).half())  # whose squares are beyond 16 bits
    assert halves.dtype == torch.float32 and torch.allclose(halves, torch.full((1, 1, 2), 0.5**0.5))


def test_ottvid_keeps_the_budget_and_a_token_of_each_frame_where_it_can() -> None:
    for shape in ((6, 16, 8), (9, 3, 8), (5, 1, 8), (1, 12, 8)):
        tokens = video(*shape)
        for budget in range(1, shape[0] * shape[1] + 1):
            pruned = prune(tokens, method="ottvid", budget=budget)
            assert pruned.n_kept == budget
            if budget >= shape[0]:
                assert len((pruned.index // shape[1]).unique()) == shape[0]
    assert torch.equal(prune(tokens, 1.0, "ottvid").tokens, tokens.flatten(0, 1))


def test_tango_sections_are_those_of_the_official_code_at_its_width() -> None:
    """1196 channels of time, 1194 of row and of column; at the origin of all three nothing turns."""
    direction = torch.ones(2, 2, 3584, dtype=torch.float64)
    moved = rotate_directions(direction, (0.0, 1.0), columns=2) != direction
    assert not moved[0, 0].any()
    assert moved[1, 0].nonzero().flatten().tolist() == list(range(1196))
    assert moved[0, 1].nonzero().flatten().tolist() == list(range(2390, 3584))


def test_tango_groups_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, noise = video(23, 6).double(), torch.rand(23, generator=torch.Generator().manual_seed(0))
    for count, k in ((1, 7), (5, 3), (22, 40)):
        groups = []
        for block in (2**25, 1, 64):
            monkeypatch.setattr(tango, "_BLOCK", block)
            center, group = find_groups(rows, noise, count, k)
            groups.append((center.tolist(), group.tolist()))
        assert groups[1:] == groups[:1] * 2 and len(groups[0][0]) == count


def test_tango_keeps_each_index_once_where_centers_are_equal() -> None:
    tokens = video(1, 1, 8).expand(3, 20, 8)
    pruned = gstep.prune(
        tokens, 0.5, "tango", evidence={"token_attention": torch.rand(3, 20)}, grid=(1, 20), times=[0, 0, 0]
    )
    assert pruned.n_kept == 20  # all positions are static: r' = 1


def test_tango_takes_the_sinks_of_llava_onevision_for_unattended() -> None:
    tokens = video(2, 196, 8)
    attention = torch.rand(2, 196, generator=torch.Generator().manual_seed(0))
    attention[:, [11, 12, 27, 28, 41, 169]] = 9
    kept = {}
    for variant in ("llava", "qwen"):
        pruned = gstep.prune(
            tokens, 0.1, "tango", evidence={"token_attention": attention}, variant=variant, alpha=1.0, context=0.0
        )
        kept[variant] = len({11, 12, 27, 28, 41, 169} & set((pruned.index % 196).tolist()))
    assert kept == {"llava": 0, "qwen": 6}


def test_fastvid_cuts_at_the_lowest_and_below_a_threshold() -> None:
    similarity = [0.95, 0.5, 0.99, 0.8, 0.97]
    for least, threshold, ends in ((1, 0.4, [6]), (1, 0.9, [2, 4, 6]), (4, 0.9, [1, 2, 4, 6]), (9, 0.9, range(1, 7))):
        assert list(cut_segments(similarity, least, threshold)) == list(pairwise([0, *ends]))
    assert list(cut_segments([0.9, 0.9, 0.9], 2, 0.5)) == [(0, 1), (1, 4)]
    assert list(cut_segments([], 8, 0.9)) == [(0, 1)]


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


def test_evs_keeps_the_first_frame_and_the_largest_changes_and_says_how_much_room_that_needs() -> None:
    for budget in (1, 8, 9, 48):
        pruned = gstep.prune(video(6, 8, 12), method="evs", budget=budget)
        assert pruned.n_kept == max(8, budget) and pruned.index[:8].tolist() == list(range(8))
    for n_frames, ratio, expected in ((16, 0.05, 196), (16, 0.0625, 196), (32, 0.05, 313), (1, 0.25, 196)):
        assert gstep.make_pruner("evs").at_most(n_frames, 196, 8, ratio) == expected


def test_divprune_takes_the_farthest_from_the_most_isolated_on() -> None:
    tokens = exact_tokens(60, seed=5)
    pruned = gstep.prune(torch.from_numpy(tokens).reshape(6, 10, 12), method="divprune", budget=25)
    expected, _ = oracle(tokens, np.ones(60), 25, alpha=1.0, start="isolated")
    assert pruned.index[pruned.compute_selection_order()].tolist() == expected


def test_random_is_the_start_of_one_permutation() -> None:
    tokens = video(5, 13, 8)
    pruned = gstep.prune(tokens, method="random", budget=20, seed=7)
    expected = np.random.default_rng(7).permutation(65)[:20]
    assert pruned.index[pruned.compute_selection_order()].tolist() == expected.tolist()
    assert pruned.index.tolist() != gstep.prune(tokens, method="random", budget=20, seed=8).index.tolist()


def test_uniform_takes_the_centres_of_the_strata() -> None:
    for budget in range(1, 66):
        index = gstep.prune(video(5, 13, 2), method="uniform", budget=budget).index.tolist()
        assert index == [int(np.floor((k + 0.5) * 65 / budget)) for k in range(budget)]


def test_none_refuses_a_smaller_budget() -> None:
    with pytest.raises(ValueError, match="keeps all 6 tokens; got budget 5"):
        gstep.prune(video(2, 3, 4), method="none", budget=5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_tokens_novelty_is_its_distance_to_the_one_before(dtype: torch.dtype) -> None:
    for n_frames in (2, 8, 9, 20):  # frames are taken 8 at a time
        tokens = video(n_frames, 13, 24).to(dtype)
        exact, novelty = tokens.double(), compute_token_novelty(tokens)
        expected = 1 - torch.cosine_similarity(exact[1:], exact[:-1], dim=-1)
        assert novelty.dtype == torch.float64
        torch.testing.assert_close(novelty[1:], expected, rtol=0, atol=1e-12)
        assert (novelty[0] == novelty[1:].max()).all()


def test_it_does_not_depend_on_the_scale_of_tokens_or_on_what_comes_later() -> None:
    tokens = video(9, 13, 24).double()
    for scale in (1e-300, 1e-180, 1e160, 1e300):
        torch.testing.assert_close(
            compute_token_novelty(tokens * scale), compute_token_novelty(tokens), rtol=1e-12, atol=1e-12
        )
    assert torch.equal(compute_token_novelty(tokens)[1:5], compute_token_novelty(tokens[:5])[1:])


def test_the_density_is_its_equation() -> None:
    tokens = video(7, 13, 24)
    novelty, spatial = compute_token_novelty(tokens), gstep.prune(tokens, 1.0, "topk", fusion="spatial")
    assert spatial.density is not None
    expected = (novelty / (novelty.mean() + 1e-6) + 0.3).flatten() * spatial.density.double()
    pruned = gstep.prune(tokens, 1.0, "novelty", floor=0.3)
    assert pruned.density is not None and pruned.temporal_density is not None
    torch.testing.assert_close(pruned.density.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(pruned.temporal_density.double().mean().item(), 1.0, rtol=1e-5, atol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_tokens_are_taken_by_that_density_as_gstep_takes_them_by_its_own(alpha: float) -> None:
    tokens = exact_tokens(48, seed=3)
    tokens_TND = torch.from_numpy(tokens).reshape(6, 8, 12)
    pruned = gstep.prune(tokens_TND, method="novelty", budget=20, alpha=alpha)
    expected, _ = oracle(tokens, Novelty().density(tokens_TND)[0].numpy(), 20, alpha=alpha)
    assert pruned.index[pruned.compute_selection_order()].tolist() == expected


def arrivals(at: int, n_frames: int = 12, per_frame: int = 16, cut: int = 8) -> torch.Tensor:
    """A thing comes to place 3 in frame ``at`` and stays; the ground behind it changes in frame ``cut``; [T,N,D]."""
    rng = torch.Generator().manual_seed(0)
    before, after, thing = (torch.randn(count, 24, generator=rng) for count in (per_frame, per_frame, 1))
    tokens = torch.cat([before.repeat(cut, 1, 1), after.repeat(n_frames - cut, 1, 1)])
    tokens[at:, 3] = thing
    return tokens + 0.02 * torch.randn(tokens.shape, generator=rng)


def test_of_a_thing_that_comes_and_stays_the_first_sight_is_kept() -> None:
    for at in range(1, 6):
        tokens = arrivals(at)
        kept = set(gstep.prune(tokens, method="novelty", budget=32).index.tolist())  # what there is to see, once each
        assert 16 * at + 3 in kept
        assert {index % 16 for index in kept if index < 16 * 8} == set(range(16))
        # GSTEP takes it from beside the cut, where the frames change most.
        assert 16 * at + 3 not in gstep.prune(tokens, budget=32).index


def test_a_video_in_which_nothing_changes_keeps_its_first_frame() -> None:
    frame = video(1, 13, 24)
    still = gstep.prune(frame.repeat(6, 1, 1), method="novelty", budget=13)
    assert still.index.tolist() == list(range(13))
    assert still.temporal_density is not None and (still.temporal_density == 0).all()
    alone = gstep.prune(frame, method="novelty", budget=5)
    assert torch.equal(alone.index, gstep.prune(frame, budget=5).index)
    assert torch.equal(gstep.prune(frame.repeat(6, 1, 1), method="novelty", budget=5).index, alone.index)
