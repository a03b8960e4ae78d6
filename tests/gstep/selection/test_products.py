"""Products of pairs, with torch's sparse kernel and without."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gstep.selection import products
from gstep.selection.lazy import lazy_density_guided_fps
from tests.gstep.selection.videos import density, video


def test_products_of_pairs_without_the_sparse_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a, b = torch.from_numpy(rng.normal(size=(2, 300, 65))).float()
    row, column = np.sort(rng.integers(0, 300, 700)), rng.integers(0, 300, 700)
    expected = (a[row].double() * b[column].double()).sum(dim=1).numpy()
    assert np.abs(products.pair_products(a, b, row, column) - expected).max() < 1e-5
    tokens = video("low rank").flatten(0, 1)
    rho = density(tokens[None])
    with_it = lazy_density_guided_fps(tokens, rho, 100)
    monkeypatch.setattr(products, "_has_sampled_products", lambda: False)
    assert np.abs(products.pair_products(a, b, row, column) - expected).max() < 1e-5
    assert len(products.pair_products(a, b, row[:0], column[:0])) == 0
    assert set(lazy_density_guided_fps(tokens, rho, 100).tolist()) == set(with_it.tolist())
