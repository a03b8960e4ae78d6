"""Methods with other parameters, a grid or times, and VisionZip, where golden cases do not reach."""

from typing import Any

import numpy as np
import pytest
import torch

import gstep
from gstep.density import make_gaussian_kernel, spatio_temporal_density
from gstep.pruners.fastvid import count_llava_tokens
from gstep.pruners.ottvid import divide_merges, plan_transport
from gstep.pruners.topk import TopK
from gstep.pruners.vcast import divide_budget
from gstep.pruners.visionzip import average_nearest, count_frame_tokens, find_densest
from tests.gstep.synthetic import evidence_for, prune, video


@pytest.mark.parametrize(
    "params",
    [{}, {"fusion": "spatial"}, {"sigma": 2, "boundary": "zero"}, {"smoothing": "box", "radius": 2}, {"eps": 1}],
    ids=str,
)
def test_topk_keeps_the_densest_by_its_parameters(params: dict[str, Any]) -> None:
    tokens = video(6, 9, 16)
    expected_TN, expected_T = spatio_temporal_density(tokens, **params)
    rho_M, temporal_T = TopK(**params).density(tokens)
    assert torch.equal(rho_M, expected_TN.flatten()) and torch.equal(temporal_T, expected_T)
    assert not params or not torch.equal(rho_M, TopK().density(tokens)[0])
    pruned = gstep.prune(tokens, method="topk", budget=10, **params)
    assert pruned.index.tolist() == sorted(np.argsort(-rho_M.numpy(), kind="stable")[:10].tolist())


def test_a_vanishing_sigma_smooths_nothing() -> None:
    assert make_gaussian_kernel(1e-300).tolist() == [0, 1, 0]
    assert make_gaussian_kernel(0.5).shape == (5,)  # up to three sigma on each side


def test_fastv_rounds() -> None:
    attention = torch.from_numpy(np.random.default_rng(0).permutation(64)).float()
    for ratio, kept in ((0.15, 10), (0.2, 13), (0.001, 1), (1.0, 64)):
        pruned = gstep.prune(video(4, 16, 8), ratio, "fastv", evidence={"llm_attention": attention})
        assert pruned.index.tolist() == sorted(attention.argsort(descending=True)[:kept].tolist())


def test_fastvid_llava_counts() -> None:
    # Six frames of K = 5 (2 anchors a frame): 12 anchors on the last frame and the one four before it.
    assert count_llava_tokens(6, 100, 5, 0.4, 4) == [(3, 0), (3, 6), (3, 0), (3, 0), (3, 0), (3, 6)]
    assert count_llava_tokens(3, 100, 2, 0.4, 4) == [(2, 0)] * 3  # C = 0
    assert count_llava_tokens(4, 10, 10, 0.4, 4) == [(6, 0), (6, 0), (6, 0), (6, 4)]  # 16 anchors do not fit
    assert count_llava_tokens(2, 10, 1, 1.0, 4) == [(0, 0), (0, 2)]


def test_flashvid_expands_the_budget() -> None:
    evidence = {"token_attention": torch.rand(2, 100, generator=torch.Generator().manual_seed(0))}
    for expansion, kept in ((1.0, 20), (1.25, 25), (99.0, 100)):
        pruned = gstep.prune(video(2, 100, 8), 0.2, "flashvid", evidence=evidence, expansion=expansion, alpha=1)
        assert pruned.n_kept == 2 * kept and pruned.merged is not None and not pruned.merged.any()


@pytest.mark.parametrize(
    ("divide", "weights", "count", "most", "expected"),
    [
        (divide_merges, [0.0, 0.0, 0.0], 7, 9, [3, 2, 2]),  # equal fractions: the earlier
        (divide_merges, [0.0, 10.0, 10.0], 6, 9, [6, 0, 0]),
        (divide_merges, [0.0, 10.0, 10.0], 6, 3, [3, 2, 1]),  # what does not fit is divided again
        # 1 each, 5.6 2.6 1.8 rounded down; 2 more to the largest fraction.
        (divide_budget, [0.56, 0.26, 0.18], 13, 20, [6, 3, 4]),
        (divide_budget, [0.8, 0.1, 0.1], 13, 7, [7, 4, 2]),  # the first is full; equal fractions: the earlier one
        (divide_budget, [0.9, 0.06, 0.04], 2, 20, [2, 0, 0]),  # less than one a frame: 1.8 0.12 0.08
    ],
)
def test_ottvid_divides_merges_and_vcast_a_budget(divide: Any, weights: list[float], count, most, expected) -> None:
    price = () if divide is divide_budget else (1.0,)
    assert list(divide(torch.tensor(weights, dtype=torch.float64), count, most, *price)) == expected


def test_ottvid_transports_all_mass_at_the_lowest_cost_and_stays_finite_at_any_eps() -> None:
    mass = torch.softmax(torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), dim=1)
    cost = torch.rand(1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = plan_transport(mass, cost, 0.05, 2000)[0]
    assert torch.allclose(plan.sum(dim=1), mass[0]) and torch.allclose(plan.sum(dim=0), mass[1], atol=1e-6)
    assert (plan * cost[0]).sum() < (mass[0][:, None] * mass[1] * cost[0]).sum()
    for eps in (0.005, 10.0):  # the smallest that is accepted stays finite at costs of 0 and 1
        assert plan_transport(mass, cost.round(), eps, 200).isfinite().all()


def test_ottvid_drops_what_is_too_far_and_keeps_the_count() -> None:
    tokens = video(1, 16, 8).repeat(5, 1, 1) + 0.5 * video(5, 16, 8, seed=1)
    kept = [prune(tokens, 0.25, "ottvid", theta=theta) for theta in (0.0, 0.1, 1.0)]
    assert [pruned.n_kept for pruned in kept] == [20, 20, 20]
    n_merged = [int(pruned.merged.sum()) for pruned in kept if pruned.merged is not None]
    assert n_merged[0] == 0 < n_merged[1] < n_merged[2]


def test_tango_looks_at_the_grid_and_at_times() -> None:
    tokens = video(1, 12, 16).repeat(6, 1, 1) + video(6, 12, 16, seed=1)
    pruner = gstep.make_pruner("tango", tau=-1.0)
    evidence = evidence_for(pruner, tokens)
    usual = gstep.prune(tokens, 0.3, pruner, evidence=evidence)
    same = gstep.prune(tokens, 0.3, pruner, evidence=evidence, grid=(3, 4), times=range(6))
    assert torch.equal(usual.tokens, same.tokens)
    for places in ({"grid": (1, 12)}, {"times": [0.1 * t for t in range(6)]}):
        other = gstep.prune(tokens, 0.3, pruner, evidence=evidence, **places)
        assert not torch.equal(usual.index, other.index)


def test_tango_tau_follows_the_ratio_and_variants_differ_in_evidence() -> None:
    tokens = video(1, 30, 16).repeat(6, 1, 1) + 0.6 * video(6, 30, 16, seed=1)  # cosines about 0.73
    taus = [(0.1, 0.65, 0.8), (0.2, 0.8, 0.65)]
    for ratio, own, other in taus:
        usual, same, unlike = (prune(tokens, ratio, "tango", **params) for params in ({}, {"tau": own}, {"tau": other}))
        assert torch.equal(usual.tokens, same.tokens) and not torch.equal(usual.tokens, unlike.tokens)
    llava, qwen = (gstep.make_pruner("tango", variant=variant) for variant in ("llava", "qwen"))
    assert dict(llava.sources) == {"token_attention": "pooling_head"}
    assert dict(qwen.sources) == {"token_attention": "merged_queries"}


def test_visionzip_per_frame() -> None:
    cases = [(196, 0.25, 50), (196, 0.15, 30), (196, 0.5, 98), (100, 0.25, 25), (16, 0.1, 2), (16, 0.001, 2)]
    for size, ratio, kept in (*cases, (1, 0.5, 1), (1, 1.0, 1), (49, 1.0, 49)):
        assert count_frame_tokens(size, ratio) == kept


def test_visionzip_sums_end_at_the_largest_number() -> None:
    tokens = torch.full((1, 8, 4), 60000.0, dtype=torch.float16)
    pruned = prune(tokens, method="visionzip", budget=2)
    assert pruned.merged is not None
    assert (pruned.tokens[pruned.merged] == torch.finfo(torch.float16).max).all()


def test_visionzip_share_of_dominant_tokens() -> None:
    """Of four kept ones: three by the published split, two by half; and one is contextual whatever the share."""
    for share, n_dominant in ((None, 3), (0.5, 2), (0, 0), (1 - 1e-12, 3)):
        pruned = prune(video(2, 16, 4), 0.25, "visionzip", dominant_share=share)
        assert pruned.merged is not None
        assert pruned.merged.view(2, 4).sum(dim=1).tolist() == [4 - n_dominant] * 2


# Two long tokens, and three on each side of the origin whose cosines are 0.8 and 0.28 (those to the other side: -0.28,
# -0.8 and -1).
UP, MIDDLE, DOWN = [1.6, 1.2], [5.0, 0.0], [4.0, -3.0]
BACK_UP, BACK, BACK_DOWN = [-4.0, 3.0], [-5.0, 0.0], [-0.8, -0.6]
FRAME = [UP, [0.0, 9.0], MIDDLE, DOWN, BACK_UP, [10.0, 0.0], BACK, BACK_DOWN]


def mean(*rows: list[float]) -> list[float]:
    average: list[float] = torch.tensor(rows, dtype=torch.float64).mean(dim=0).tolist()
    return average


def directions(*degrees: float) -> torch.Tensor:
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def test_visionzip_qwen_by_hand() -> None:
    """Four of eight: two long ones, and the middle of each side. The second frame is the first one backwards."""
    tokens = torch.tensor([FRAME, FRAME[::-1]])
    pruned = gstep.prune(tokens, 0.5, "visionzip", variant="qwen", neighbours=2)
    assert pruned.index.tolist() == [1, 2, 5, 6, *(8 + place for place in (1, 2, 5, 6))]
    assert pruned.merged is not None
    assert pruned.merged.tolist() == [False, True, False, True, True, False, True, False]
    front, back = mean(UP, MIDDLE, DOWN), mean(BACK_UP, BACK, BACK_DOWN)
    expected = [[0.0, 9.0], front, [10.0, 0.0], back, back, [10.0, 0.0], front, [0.0, 9.0]]
    assert torch.allclose(pruned.tokens, torch.tensor(expected))


def test_visionzip_qwen_ties_go_to_the_lowest_index() -> None:
    """With all five others as neighbours the six are equally dense: the sum of their directions is zero."""
    pruned = gstep.prune(torch.tensor([FRAME]), 0.5, "visionzip", variant="qwen")
    assert pruned.index.tolist() == [0, 1, 2, 5]
    # BACK is nearer to UP (-0.8) than to MIDDLE (-1), and DOWN nearer to MIDDLE (0.8) than to UP (0.28).
    expected = [mean(UP, BACK_UP, BACK), [0.0, 9.0], mean(MIDDLE, DOWN, BACK_DOWN), [10.0, 0.0]]
    assert torch.allclose(pruned.tokens, torch.tensor(expected))
    equal = gstep.prune(video(1, 1, 8).expand(2, 37, 8), 0.25, "visionzip", variant="qwen")
    assert equal.index.tolist() == [*range(9), *range(37, 46)]


def test_visionzip_qwen_frames_do_not_touch_each_other() -> None:
    tokens = video(5, 30, 16)
    whole = gstep.prune(tokens, 0.2, "visionzip", variant="qwen")
    assert whole.compute_selection_order().tolist() == list(range(len(whole.index)))  # prompts in ascending index
    alone = [gstep.prune(frame[None], 0.2, "visionzip", variant="qwen") for frame in tokens]
    assert torch.equal(whole.tokens, torch.cat([pruned.tokens for pruned in alone]))


# Recorded from compress_features of the official code (core.py at a85d485) on video(*shape, seed=7).double(): indices,
# which of the kept rows differ from the token at their index, and the mean of each row.
def test_visionzip_qwen_keeps_what_the_official_code_keeps() -> None:
    tokens, index = video(3, 20, 8, seed=7), [1, 6, 9, 12, 16, 24, 25, 31, 32, 34, 42, 43, 45, 51, 52]
    means = [0.139034, 0.558406, 0.076713, -0.132918, 0.328639, 0.317614, 0.489036, -0.596874]
    means += [0.147363, 0.480586, 0.993521, 0.028278, 0.096038, 0.153385, 0.599387]
    pruned = gstep.prune(tokens, 0.25, "visionzip", variant="qwen")
    assert pruned.index.tolist() == index
    assert pruned.merged is not None and pruned.merged.nonzero().flatten().tolist() == [0, 2, 5, 8, 11, 13]
    assert torch.equal((pruned.tokens != tokens.flatten(0, 1)[index]).any(dim=1), pruned.merged)
    assert torch.allclose(pruned.tokens.mean(dim=1), torch.tensor(means), atol=2e-6)


def test_visionzip_qwen_counts() -> None:
    for size, ratio, kept, contextual in (
        *[(20, 0.25, 5, 2), (20, 0.15, 3, 2), (20, 0.1, 2, 1), (49, 0.25, 12, 5), (90, 0.7, 63, 26)],
        *[(20, 0.05, 1, 0), (20, 0.001, 1, 0), (1, 0.25, 1, 0), (1, 1.0, 1, 0), (2, 1.0, 2, 1), (9, 1.0, 9, 4)],
    ):
        pruned = gstep.prune(video(3, size, 8), ratio, "visionzip", variant="qwen")
        assert pruned.n_kept == 3 * kept == gstep.make_pruner("visionzip", variant="qwen").at_most(3, size, 8, ratio)
        assert pruned.merged is not None
        assert pruned.merged.view(3, kept).sum(dim=1).tolist() == [contextual] * 3


def test_visionzip_qwen_keeps_the_longest_where_it_keeps_one_and_changes_none_where_it_keeps_all() -> None:
    tokens = video(4, 9, 8)
    pruned = gstep.prune(tokens, 0.12, "visionzip", variant="qwen")
    assert (pruned.index % 9).tolist() == tokens.norm(dim=2).argmax(dim=1).tolist()
    assert torch.equal(pruned.tokens, tokens.flatten(0, 1)[pruned.index])
    parallel = video(2, 1, 8) * torch.arange(1.0, 10.0)[:, None]  # each is as near to one as to another
    assert torch.equal(gstep.prune(parallel, 1.0, "visionzip", variant="qwen").tokens, parallel.flatten(0, 1))


def test_visionzip_densest_counts_no_token_as_its_own_neighbour() -> None:
    """A pair that is close beats a token in the middle of three others at a distance, until it needs more company."""
    direction = directions(0, 20, 35, 50, 200, 205)
    assert find_densest(direction, 2, neighbours=1).tolist() == [4, 5]
    assert find_densest(direction, 1, neighbours=2).tolist() == [2]
    assert find_densest(direction, 2, neighbours=2).tolist() == [1, 2]
    # A zero token has cosine 0 with everything, which is more than two opposite ones have on average.
    opposite = torch.cat([directions(0, 180), torch.zeros(1, 2)])
    assert find_densest(opposite, 1, neighbours=2).tolist() == [2]


def test_visionzip_rounding_decides_no_tie() -> None:
    """The second pair is nearer by a part in 10^14, and the second anchor to what lies in the middle."""
    assert find_densest(directions(0, 10, 90, 100 - 1e-11), 2, neighbours=1).tolist() == [0, 1]
    direction = directions(0, 20 - 1e-11, 10)
    means = average_nearest(direction, direction, torch.tensor([0, 1]))
    assert means.tolist() == [mean(*direction[[0, 2]].tolist()), direction[1].tolist()]


def test_visionzip_of_equal_anchors_the_first_gets_everything() -> None:
    tokens = torch.tensor([[1.0, 0.0], [1.0, 0.0], [4.0, 3.0], [0.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    direction = torch.nn.functional.normalize(tokens, dim=1)
    means = average_nearest(tokens, direction, torch.tensor([0, 1, 4]))
    # The zero token, of cosine 0 with every anchor, goes to the first one too.
    assert means.tolist() == [mean(*tokens[:4].tolist()), [1.0, 0.0], [-1.0, 0.0]]
