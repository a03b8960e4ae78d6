"""The controls and ablations: random, uniform, none, topk and fps."""

import numpy as np
import pytest
import torch

import gstep
from gstep.selection.reference import STARTS
from tests.gstep.oracle import exact_tokens, oracle
from tests.gstep.synthetic import video


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


def test_topk_is_the_densest() -> None:
    tokens = video(5, 13, 8)
    density = gstep.prune(tokens, 1.0, "topk", fusion="spatial", sigma=2).density
    assert density is not None and gstep.prune(tokens, 1.0, "none").density is None
    pruned = gstep.prune(tokens, method="topk", budget=10, fusion="spatial", sigma=2)
    assert pruned.index.tolist() == sorted(np.argsort(-density.numpy(), kind="stable")[:10].tolist())


@pytest.mark.parametrize("start", STARTS)
def test_picks_are_the_farthest_points_from_every_start(start: str) -> None:
    tokens = exact_tokens(48, seed=3)
    tokens_TND = torch.from_numpy(tokens).reshape(6, 8, 12)
    rho = gstep.prune(tokens_TND, 1.0, "fps").density
    assert rho is not None
    pruned = gstep.prune(tokens_TND, method="fps", budget=20, start=start)
    expected, _ = oracle(tokens, rho.double().numpy(), 20, alpha=1.0, start=start)
    assert pruned.index[pruned.compute_selection_order()].tolist() == expected
