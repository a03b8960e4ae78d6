"""What methods do with their parameters, with a grid and with times, where golden cases do not have them."""

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
    ("price", "merges", "most", "expected"),
    [
        ([0.0, 0.0, 0.0], 7, 9, [3, 2, 2]),  # equal fractions: the earlier
        ([0.0, 10.0, 10.0], 6, 9, [6, 0, 0]),
        ([0.0, 10.0, 10.0], 6, 3, [3, 2, 1]),  # what does not fit is divided again
    ],
)
def test_ottvid_divides_merges(price: list[float], merges: int, most: int, expected: list[int]) -> None:
    assert divide_merges(torch.tensor(price, dtype=torch.float64), merges, most, 1.0) == expected


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


@pytest.mark.parametrize(
    ("weights", "budget", "per_frame", "expected"),
    [
        ([0.56, 0.26, 0.18], 13, 20, [6, 3, 4]),  # 1 each, 5.6 2.6 1.8 rounded down; 2 more to the largest fraction
        ([0.8, 0.1, 0.1], 13, 7, [7, 4, 2]),  # the first is full; equal fractions: the earlier one
        ([0.9, 0.06, 0.04], 2, 20, [2, 0, 0]),  # less than one a frame: 1.8 0.12 0.08
    ],
)
def test_vcast_divides_a_budget(weights: list[float], budget: int, per_frame: int, expected: list[int]) -> None:
    assert divide_budget(torch.tensor(weights, dtype=torch.float64), budget, per_frame).tolist() == expected


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
