"""The densest tokens."""

from __future__ import annotations

import numpy as np

import gstep
from tests.gstep.synthetic import video


def test_topk_is_the_densest() -> None:
    tokens = video(5, 13, 8)
    rho = gstep.prune(tokens, method="none", retention_ratio=1.0)
    assert rho.density is None
    full = gstep.prune(tokens, 1.0, "topk", fusion="spatial", sigma=2)
    assert full.density is not None
    pruned = gstep.prune(tokens, method="topk", budget=10, fusion="spatial", sigma=2)
    assert pruned.index.tolist() == sorted(np.argsort(-full.density.numpy(), kind="stable")[:10].tolist())
