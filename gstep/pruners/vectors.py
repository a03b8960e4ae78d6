"""Directions of tokens, and means of groups, for methods that compare tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from gstep.density import scale_to_work_dtype


def normalize_rows(rows: Tensor) -> Tensor:
    """Divide each row of the last axis by its L2 norm, in the work dtype (float32 for 16 bits); zero rows stay zero."""
    rows = scale_to_work_dtype(rows)
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64).to(rows.dtype)
    return rows / torch.where(norm > 0, norm, 1.0)


def compute_group_means(nearest_X: Tensor, rows_XD: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """Compute the mean of each group's rows, [G,D], and the number of its rows, [G] int64; an empty group has mean 0.

    ``nearest_X`` is each row's group in [0, n_groups); any other number, such as -1, means no group.
    """
    member_GX = nearest_X == torch.arange(n_groups, device=nearest_X.device)[:, None]
    count_G = member_GX.sum(dim=1)
    weight_GX = member_GX.to(rows_XD.dtype) / count_G.clamp(min=1)[:, None]
    return weight_GX @ rows_XD, count_G
