"""Tools of the methods that compare tokens: directions, and averages of groups."""

from __future__ import annotations

import torch
from torch import Tensor

from gstep.density import working_copy


def unit(rows: Tensor) -> Tensor:
    """Divide each row of the last axis by its L2 norm, in the work dtype (float32 for 16 bits); zero rows stay zero."""
    rows = working_copy(rows)
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64).to(rows.dtype)
    return rows / torch.where(norm > 0, norm, 1.0)


def assigned_mean(nearest_X: Tensor, rows_XD: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """Compute the mean of each group's rows, [G,D] (0 for an empty group), and the number of its rows, [G].

    ``nearest_X`` has each row's group, -1 for no group. The means are a product with weights: the sums of a scatter
    would depend on the order in which a GPU's threads arrive.
    """
    member_GX = nearest_X == torch.arange(n_groups, device=nearest_X.device)[:, None]
    count_G = member_GX.sum(dim=1)
    weight_GX = member_GX.to(rows_XD.dtype) / count_G.clamp(min=1)[:, None]
    return weight_GX @ rows_XD, count_G
