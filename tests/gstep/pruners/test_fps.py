"""Plain farthest point sampling: density decides its start alone."""

from __future__ import annotations

import pytest
import torch

import gstep
from gstep.selection.reference import STARTS
from tests.gstep.oracle import exact_tokens, oracle


@pytest.mark.parametrize("start", STARTS)
def test_picks_are_the_farthest_points_from_every_start(start: str) -> None:
    tokens = exact_tokens(48, seed=3)
    tokens_TND = torch.from_numpy(tokens).reshape(6, 8, 12)
    rho = gstep.prune(tokens_TND, 1.0, "fps").density
    assert rho is not None
    pruned = gstep.prune(tokens_TND, method="fps", budget=20, start=start)
    expected, _ = oracle(tokens, rho.double().numpy(), 20, alpha=1.0, start=start)
    assert pruned.index[pruned.selection_order()].tolist() == expected
