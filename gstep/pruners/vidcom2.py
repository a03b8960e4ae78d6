"""VidCom2: the tokens that stand out, and more of them in frames that stand out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gstep.density import iter_row_slices, scale_to_work_dtype
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.vectors import normalize_rows
from gstep.types import VisualTokens

_WIDTHS = tuple(2.0**k for k in range(-3, 2))
_TEMPERATURE = 0.01


@dataclass(frozen=True, kw_only=True)
class VidCom2(Pruner):
    """Video compression commander (github.com/xuyang-liu16/VidCom2, token_compressor/vidcom2/vidcom2.py).

    The number of tokens is rounded for each frame and is at least 1, so the total is near B. Even a ratio of 1 does not
    keep all tokens: frames that are typical of the video are still pruned.
    """

    name: ClassVar[str] = "vidcom2"
    nested: ClassVar[bool] = False
    exact: ClassVar[bool] = False

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        n_total = n_frames * per_frame
        return min(n_total, math.floor(retention_ratio * n_total + 1e-9) + n_frames)  # a frame rounds up by 1 at most

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        video_TN, frame_TN = compute_similarities(visual.tokens)
        rank_TN = torch.argsort(torch.argsort(video_TN + frame_TN, dim=1, stable=True), dim=1)
        is_kept_TN = rank_TN < compute_frame_budgets(video_TN, ratio)[:, None]
        return Selection(index=is_kept_TN.flatten().nonzero().squeeze(1))


def find_calm_channels(tokens_TND: Tensor) -> Tensor:
    """Return the max(1, D // 2) channels of lowest variance, ascending; ties go to the lower channel."""
    hidden = tokens_TND.shape[-1]
    tokens_MD = tokens_TND.reshape(-1, hidden)
    sum_D = torch.zeros(hidden, dtype=torch.float64, device=tokens_MD.device)
    for rows in iter_row_slices(tokens_MD):
        sum_D += tokens_MD[rows].double().sum(dim=0)
    mean_D = sum_D / len(tokens_MD)
    spread_D = torch.zeros_like(sum_D)
    for rows in iter_row_slices(tokens_MD):
        spread_D += (tokens_MD[rows] - mean_D).square().sum(dim=0)
    return torch.argsort(spread_D, stable=True)[: max(1, hidden // 2)].sort().values


def compute_similarities(tokens_TND: Tensor) -> tuple[Tensor, Tensor]:
    """Compute each token's similarity to its video and to its frame, two tensors [T,N] float64; low means distinctive.

    They are the ``sum_gaussian_kernels`` with the mean direction, over the channels of ``find_calm_channels``.
    """
    tokens_TND = scale_to_work_dtype(tokens_TND)
    direction_TND = normalize_rows(tokens_TND[..., find_calm_channels(tokens_TND)])
    frame_T1D = direction_TND.double().mean(dim=1, keepdim=True)
    video_1D = frame_T1D.mean(dim=0)
    return sum_gaussian_kernels(direction_TND, video_1D.expand_as(frame_T1D)), sum_gaussian_kernels(
        direction_TND, frame_T1D
    )


def sum_gaussian_kernels(direction_TND: Tensor, centre_T1D: Tensor) -> Tensor:
    """Sum exp(-|x - m|^2 / 2w) over w = 1/8, 1/4, ..., 2, for each token x and its frame's center m: [T,N] float64."""
    width_W = torch.tensor(_WIDTHS, dtype=torch.float64, device=direction_TND.device)
    sums = []
    for frames in iter_row_slices(direction_TND):
        distance_XN = (direction_TND[frames] - centre_T1D[frames]).square().sum(dim=-1)
        sums.append(torch.exp(-distance_XN[..., None] / (2 * width_W)).sum(dim=-1))
    return torch.cat(sums)


def compute_frame_budgets(video_TN: Tensor, ratio: float) -> Tensor:
    """Compute the number of tokens to keep of each frame, [T] int64 from 1 to N, with a sum near r*T*N.

    A frame keeps the share r * (1 + w - 1/T), at most 1, where w is the softmax of -(the frame's mean of ``video_TN``)
    / 0.01, so that frames less similar to the video keep more.
    """
    share_T = torch.softmax(-video_TN.mean(dim=1) / _TEMPERATURE, dim=0)
    scale_T = (ratio * (1 + share_T - share_T.mean())).clamp(max=1.0)
    return torch.round(scale_T * video_TN.shape[1]).long().clamp(min=1)
