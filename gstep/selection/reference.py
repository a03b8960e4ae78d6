"""Density-guided farthest point sampling, Eqs. (9)-(12), in its readable form: one matrix-vector product per pick.

How far picks agree on different processors, in this form and in the fast forms:

- Distances, ``compute_density_weight`` and ties by index decide the picks, through sums, products and comparisons in
  float64, which are the same everywhere. Logarithms, whose rounding depends on the library and the CPU, are used only
  for a tiny alpha or an extreme beta.
- ``compute_density_weight`` is rho + beta itself at alpha = 0.5, and 1 at alpha = 1. Otherwise it is a power, whose
  last bit depends on the library: another processor may swap tokens of different rho whose keys agree to about 1e-15.
- Dot products are exact if float32 holds all their partial sums, as with small integers. Otherwise their last bits
  depend on the order of summation (about 1e-7 of a distance), and near-ties may be decided differently.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gstep.density import iter_row_slices, scale_extreme_rows, zero_small_distances

STARTS = ("density", "first", "isolated")

# BLAS rounds the last rows differently from all other rows if they do not fill a block of rows. Padding with zero rows
# to this multiple keeps copies of a token at bit-equal distances, so that their ties go to the lowest index.
_ROW_MULTIPLE = 16
_ISOLATION_BLOCK = 256
_KEYS = (1e-290, 1e290)  # the range in which a key neither underflows nor overflows
NO_DISTANCE = 4.0  # larger than any cosine distance


def find_largest(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` largest scores along the last axis, highest score first: [..., count] int64.

    Ties go to the lowest index. If the axis is shorter than ``count``, all its indices are returned.
    """
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


def invert_norms(norm: Tensor) -> Tensor:
    """Compute 1 / norm, with 0 for a norm of 0."""
    return norm.reciprocal().masked_fill(norm == 0, 0.0)


def compute_inverse_roots(square: Tensor) -> Tensor:
    """Compute 1 / sqrt(square) in float64, with 0 for 0.

    The square root is correctly rounded on every processor, unlike Tensor.sqrt on a CPU.
    """
    square = square.double()
    return invert_norms(torch.from_numpy(np.sqrt(square.numpy())) if square.is_cpu else square.sqrt())


def compute_inverse_norms(tokens_MD: Tensor) -> Tensor:
    """Compute 1 / L2 norm of each row, [M] float64; 0 for a zero row."""
    norms = [
        torch.linalg.vector_norm(tokens_MD[rows], dim=-1, dtype=torch.float64) for rows in iter_row_slices(tokens_MD)
    ]
    return invert_norms(torch.cat(norms))


def compute_distances(pick_1: Tensor, tokens_MD: Tensor, inverse_norm_M: Tensor) -> Tensor:
    """Compute 1 - cosine of every token with the pick, [M] float64, 0 below ZERO_DISTANCE: the inner term of Eq. (10).

    Args:
        pick_1: The pick's index, [1] int64.
        inverse_norm_M: ``compute_inverse_norms`` of the tokens. A zero token has distance 1 to every token.
    """
    dot_M = torch.mv(tokens_MD, tokens_MD.index_select(0, pick_1).squeeze(0))
    return zero_small_distances(1 - dot_M * (inverse_norm_M * inverse_norm_M.index_select(0, pick_1)))


def find_isolated_token(tokens_MD: Tensor, block: int = _ISOLATION_BLOCK) -> Tensor:
    """Find the token whose nearest neighbor is farthest away: [1] int64, ties to the lowest index.

    All pairs are compared, ``block`` rows at a time. Each pair is measured only once, so that two tokens that are each
    other's nearest neighbors tie exactly.
    """
    inverse_M = compute_inverse_norms(tokens_MD)
    nearest_M = torch.full_like(inverse_M, torch.inf)
    for start in range(0, len(tokens_MD), block):
        rows = slice(start, start + block)
        dot = tokens_MD[rows] @ tokens_MD[start:].T
        distance = zero_small_distances(1 - dot * (inverse_M[rows, None] * inverse_M[start:]))
        distance.diagonal().fill_(torch.inf)
        nearest_M[rows] = torch.minimum(nearest_M[rows], distance.amin(dim=1))
        nearest_M[start:] = torch.minimum(nearest_M[start:], distance.amin(dim=0))
    return nearest_M.argmax(dim=0, keepdim=True)


def choose_first_token(start: str, tokens_MD: Tensor, density_M: Tensor) -> Tensor:
    """Return the first pick, [1] int64: the most isolated token, token 0 ("first") or the densest (any other value)."""
    if start == "isolated":
        return find_isolated_token(tokens_MD)
    if start == "first":
        return torch.zeros(1, dtype=torch.int64, device=tokens_MD.device)
    return density_M.argmax(dim=0, keepdim=True)


def compute_density_weight(density_M: Tensor, alpha: float, beta: float) -> Tensor | None:
    """Compute w = (rho + beta) ** ((1 - alpha) / alpha), the density's factor in the key (l + beta) * w.

    The key is exp(U / alpha) for U of Eq. (11), so the token of highest key has the highest U.

    Returns:
        [M] float64; None if alpha is 0, or if keys could leave [1e-290, 1e290], as with a tiny alpha or an extreme
        beta.
    """
    exponent = (1 - alpha) / alpha if alpha > 0 else math.inf
    if math.isinf(exponent):
        return None
    weight_M = (density_M.double() + beta) ** exponent
    smallest, largest = torch.stack(torch.aminmax(weight_M)).tolist()
    in_range = smallest * beta > _KEYS[0] and largest * (NO_DISTANCE + beta) < _KEYS[1]
    return weight_M if in_range else None


def density_guided_fps(
    tokens_MD: Tensor,
    density_M: Tensor,
    budget: int,
    *,
    alpha: float = 0.5,
    beta: float = 1e-6,
    start: str = "density",
) -> Tensor:
    """Select ``budget`` tokens by Eqs. (9)-(12): [B] int64 flat indices in order of selection.

    Ties go to the lowest index. The selection for a smaller budget is the beginning of this one. alpha = 0 with the
    density start gives the top B by rho. Logarithms, which could make different values equal, are used only for alpha
    below about 0.02 or an extreme beta.

    Args:
        tokens_MD: Finite tokens of any float dtype. No argument is checked.
        density_M: rho >= 0 of each token.
        budget: B, in [1, M].
        alpha: The weight of distance against density in Eq. (11), in [0, 1].
        beta: Keeps the logarithms of Eq. (11) finite, > 0.
        start: The first pick: "density" (largest rho, Eq. 9), "first" (index 0) or "isolated" (farthest nearest
            neighbor).
    """
    if alpha == 0 and start == "density":
        return find_largest(density_M, budget)
    n_tokens = len(tokens_MD)
    tokens_MD = scale_extreme_rows(tokens_MD)
    pick_1 = choose_first_token(start, tokens_MD, density_M)
    rows_PD = pad(tokens_MD, (0, 0, 0, -n_tokens % _ROW_MULTIPLE)) if n_tokens % _ROW_MULTIPLE else tokens_MD
    inverse_P = compute_inverse_norms(rows_PD)
    # Picked tokens and padding score -inf.
    density_term_P = torch.full_like(inverse_P, -torch.inf)
    weight_M = compute_density_weight(density_M, alpha, beta)
    density_term_P[:n_tokens] = (1 - alpha) * torch.log(density_M.double() + beta) if weight_M is None else weight_M
    distance_P = torch.full_like(inverse_P, torch.inf)
    order_B = torch.empty(budget, dtype=torch.int64, device=tokens_MD.device)
    for step in range(budget):
        if step > 0:
            distance_P = torch.minimum(distance_P, compute_distances(pick_1, rows_PD, inverse_P))  # Eq. (10)
            if weight_M is None:
                score_P = alpha * torch.log(distance_P + beta) + density_term_P  # Eq. (11)
            else:
                score_P = (distance_P + beta) * density_term_P  # exp(Eq. (11) / alpha)
            pick_1 = score_P.argmax(dim=0, keepdim=True)  # Eq. (12)
        order_B[step : step + 1] = pick_1
        density_term_P.index_fill_(0, pick_1, -torch.inf)
    return order_B
