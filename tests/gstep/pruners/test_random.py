"""The random control."""

from __future__ import annotations

import numpy as np

import gstep
from tests.gstep.synthetic import video


def test_random_is_the_start_of_one_permutation() -> None:
    tokens = video(5, 13, 8)
    pruned = gstep.prune(tokens, method="random", budget=20, seed=7)
    expected = np.random.default_rng(7).permutation(65)[:20]
    assert pruned.index[pruned.selection_order()].tolist() == expected.tolist()
    assert pruned.index.tolist() != gstep.prune(tokens, method="random", budget=20, seed=8).index.tolist()
