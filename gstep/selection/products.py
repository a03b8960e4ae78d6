"""Dot products of some pairs of rows out of many, on a CPU."""

from __future__ import annotations

import warnings
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Places = NDArray[np.int64]


def pair_products(a_XD: Tensor, b_YD: Tensor, row: Places, column: Places) -> NDArray[np.floating]:
    """Multiply ``a[row]`` and ``b[column]`` for each pair; ``row`` ascends.

    A product depends on its two rows alone, wherever they stand: copies of a token have the same, bit for bit.
    """
    if not _has_sampled_products():
        return _one_by_one(a_XD, b_YD, row, column)
    starts = np.zeros(len(a_XD) + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=len(a_XD)), out=starts[1:])
    pattern = torch.sparse_csr_tensor(
        torch.from_numpy(starts),
        torch.from_numpy(column),
        a_XD.new_zeros(len(column)),
        size=(len(a_XD), len(b_YD)),
        device=a_XD.device,
        check_invariants=False,
    )
    products: NDArray[np.floating] = torch.sparse.sampled_addmm(pattern, a_XD, b_YD.T, beta=0.0).values().numpy()
    return products


def _one_by_one(a_XD: Tensor, b_YD: Tensor, row: Places, column: Places, block: int = 256) -> NDArray[np.floating]:
    """Multiply the pairs where torch was built without sampled products: several times slower."""
    a_P, b_P, products = torch.from_numpy(row), torch.from_numpy(column), a_XD.new_empty(len(row))
    for start in range(0, len(row), block):
        part = slice(start, start + block)
        products[part] = (a_XD[a_P[part]] * b_YD[b_P[part]]).sum(dim=1)
    together: NDArray[np.floating] = products.numpy()
    return together


@cache
def _has_sampled_products() -> bool:
    """Return whether this build of torch has sampled products, without torch's warning that they are in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        try:
            one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
            first, place = torch.tensor([0, 1], device="cpu"), torch.tensor([0], device="cpu")
            pattern = torch.sparse_csr_tensor(first, place, one[0], size=(1, 1), device="cpu", check_invariants=False)
            return bool(torch.sparse.sampled_addmm(pattern, one, one, beta=0.0).values() == 1)
        except RuntimeError:
            return False
