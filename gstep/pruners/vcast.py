"""V-CAST: more tokens for frames at which the video turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gstep.density import compute_frame_means, iter_row_slices, scale_to_work_dtype
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.checks import check_number
from gstep.pruners.vectors import normalize_rows
from gstep.types import VisualTokens

_EPS = 1e-6  # as in the official code: the minimum norm in a divisor, and added to the range of norms


@dataclass(frozen=True, kw_only=True)
class VCAST(Pruner):
    """Video curvature-aware pruning (arXiv 2603.27650; github.com/xinyouu/V-CAST, compressor/v_cast).

    The authors' code keeps round(r*M) tokens, and at least one per frame. This method keeps exactly B, so that frames
    may have none if B < T. A single frame is pruned too, while their code keeps it whole.

    Attributes:
        tau: The temperature of the softmax that divides the budget among frames, > 0. Lower values give more tokens to
            frames at which the video turns.
    """

    name: ClassVar[str] = "vcast"
    nested: ClassVar[bool] = False

    tau: float = 0.7

    def __post_init__(self) -> None:
        self._set(tau=check_number("tau", self.tau, "above 0", lambda tau: tau > 0))

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        """Select ``budget`` tokens, divided among frames by curvature; ``ratio`` and ``seed`` are not used.

        Each frame keeps its tokens of highest ``score_tokens``, ties to the lowest index. The indices ascend.
        """
        tokens_TND = scale_to_work_dtype(visual.tokens)
        centre_TD = normalize_rows(compute_frame_means(tokens_TND))
        weight_T = torch.softmax(compute_curvature(centre_TD) / self.tau, dim=0)
        budget_T = divide_budget(weight_T, budget, tokens_TND.shape[1])
        order_TN = score_tokens(tokens_TND, centre_TD).argsort(dim=1, descending=True, stable=True)
        is_kept_TN = order_TN.argsort(dim=1) < budget_T[:, None]
        return Selection(index=is_kept_TN.flatten().nonzero().squeeze(1))


def compute_curvature(centre_TD: Tensor) -> Tensor:
    """Compute how much the video turns at each frame: 1 - cosine of the steps to and from its center, [T] in [0, 2].

    The first and the last frame, which lack a step, get 1.
    """
    turn_T = torch.ones_like(centre_TD[:, 0])
    step_SD = centre_TD.diff(dim=0)
    norm_S = torch.linalg.vector_norm(step_SD, dim=-1).clamp(min=_EPS)
    turn_T[1:-1] -= (step_SD[1:] * step_SD[:-1]).sum(dim=-1) / (norm_S[1:] * norm_S[:-1])
    return turn_T


def divide_budget(weight_T: Tensor, budget: int, per_frame: int) -> Tensor:
    """Divide the budget among frames by weight, [T] int64: at least 1 each if B >= T, and at most N each.

    The remainder from rounding down and from full frames goes to the frame with the largest fraction until it is full,
    then to the next one, and so on.

    Args:
        weight_T: The frames' shares, with sum 1.
    """
    n_frames = len(weight_T)
    min_each = 1 if budget >= n_frames else 0
    share_T = weight_T * (budget - min_each * n_frames)
    whole_T = torch.floor(share_T + 1e-9)  # a share may lie a rounding error below an integer
    budget_T = min_each + whole_T.long().clamp(max=per_frame - min_each)
    order_T = (share_T - whole_T).argsort(descending=True, stable=True)
    free_T = per_frame - budget_T[order_T]
    surplus_T = budget - budget_T.sum() - (free_T.cumsum(0) - free_T)  # before each frame's turn
    budget_T[order_T] += torch.minimum(free_T, surplus_T.clamp(min=0))
    return budget_T


def score_tokens(tokens_TND: Tensor, centre_TD: Tensor) -> Tensor:
    """Score each token, [T,N] float64: 1 - cosine to its frame's center, plus its norm rescaled to [0, 1] in its frame.

    Args:
        centre_TD: The frames' centers as unit vectors.
    """
    cosine_TN = centre_TD.new_empty(tokens_TND.shape[:2])
    norm_TN = torch.empty_like(cosine_TN)
    for frames in iter_row_slices(tokens_TND):
        part_TND = tokens_TND[frames].double()
        norm_TN[frames] = torch.linalg.vector_norm(part_TND, dim=-1)
        cosine_TN[frames] = (part_TND * centre_TD[frames, None]).sum(dim=-1) / norm_TN[frames].clamp(min=_EPS)
    low_T1, high_T1 = norm_TN.amin(dim=1, keepdim=True), norm_TN.amax(dim=1, keepdim=True)
    return 1 - cosine_TN + (norm_TN - low_T1) / (high_T1 - low_T1 + _EPS)
