"""Novelty: GSTEP's sampling with a density that prefers new tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gstep.density import (
    compute_frame_features,
    compute_working_scale,
    convert_products_to_distances,
    copy_to_float64,
    normalize_by_mean,
)
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.checks import check_number
from gstep.selection.dispatch import select_fastest
from gstep.types import VisualTokens

_FRAMES = 8  # frames that are compared at a time, each with the frame before it
_ELEMENTS = 2**19  # elements of float64 tokens of which two copies fit a core's cache


@dataclass(frozen=True, kw_only=True)
class Novelty(Pruner):
    """Density-guided farthest point sampling, Eqs. (9)-(12) of GSTEP, with another density; a method of this project.

    With h_{t,i} the token at position i of frame t and s_{t,i} its spatial density (Eq. 3)::

        n_{t,i} = 1 - cos(h_{t,i}, h_{t-1,i}) for t > 1, and max n for t = 1
        rho_{t,i} = (n_{t,i} / mean(n) + floor) * s_{t,i}

    With GSTEP, if an object appears and stays, all frames with it count the same. Here, an object has its largest
    density where it appears, and sampling by distance skips later tokens that resemble it. A single frame, or a video
    without changes, is ranked by s alone.

    Attributes:
        alpha: The weight of distance against density in Eq. (11), in [0, 1].
        beta: The constant inside the logarithms of Eq. (11), > 0.
        floor: The novelty of a token that did not change at all, relative to the mean novelty, >= 0.
    """

    name: ClassVar[str] = "novelty"
    nested: ClassVar[bool] = True

    alpha: float = 0.5
    beta: float = 1e-6
    floor: float = 0.05

    def __post_init__(self) -> None:
        alpha = check_number("alpha", self.alpha, "in [0, 1]", lambda alpha: 0 <= alpha <= 1)
        beta = check_number("beta", self.beta, "above 0", lambda beta: beta > 0)
        self._set(
            alpha=alpha, beta=beta, floor=check_number("floor", self.floor, "0 or more", lambda floor: floor >= 0)
        )

    def density(self, tokens_TND: Tensor) -> tuple[Tensor, Tensor]:
        """Compute rho of every token, [M] float64, and each frame's mean of n / mean(n), [T] float64."""
        novelty_TN = normalize_by_mean(compute_token_novelty(tokens_TND))
        _, spatial_TN = compute_frame_features(tokens_TND)
        return ((novelty_TN + self.floor) * spatial_TN).reshape(-1), novelty_TN.mean(dim=1)

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        rho_M, novelty_T = self.density(visual.tokens)
        order_B = select_fastest(visual.tokens.flatten(0, 1), rho_M, budget, alpha=self.alpha, beta=self.beta)
        return Selection(order_B, rho_M, novelty_T)


def compute_token_novelty(tokens_TND: Tensor) -> Tensor:
    """Compute n, the cosine distance to the token at the same position of the previous frame: [T,N] float64 in [0, 2].

    All tokens of the first frame get the largest distance in the video, or 1 in a video of one frame. Distances below
    ZERO_DISTANCE are 0.
    """
    n_frames, per_frame, hidden = tokens_TND.shape
    n_places = per_frame if tokens_TND.is_cuda else max(1, _ELEMENTS // ((_FRAMES + 1) * hidden))
    novelty_TN = tokens_TND.new_ones(n_frames, per_frame, dtype=torch.float64)
    # Squares of 16-bit and float32 tokens neither overflow nor vanish in float64.
    scale = compute_working_scale(tokens_TND) if tokens_TND.dtype == torch.float64 else 1.0
    for start in range(0, n_frames - 1, _FRAMES):
        frames = slice(start, min(start + _FRAMES + 1, n_frames))
        for first in range(0, per_frame, n_places):
            places = slice(first, first + n_places)
            part_TRD = copy_to_float64(tokens_TND[frames, places])
            novelty_TN[start + 1 : frames.stop, places] = _compute_distances(
                part_TRD if scale == 1.0 else part_TRD.mul_(scale)
            )
    if n_frames > 1:
        novelty_TN[0] = novelty_TN[1:].max()
    return novelty_TN


def _compute_distances(tokens_TRD: Tensor) -> Tensor:
    """Compute the cosine distance of each token to the token at the same position of the next frame, [T-1,R]."""
    norm_TR = torch.linalg.vector_norm(tokens_TRD, dim=-1)
    return convert_products_to_distances((tokens_TRD[1:] * tokens_TRD[:-1]).sum(dim=-1), norm_TR[1:], norm_TR[:-1])
