"""GSTEP: global spatio-temporal density pruning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gstep.pruners.base import Selection
from gstep.pruners.checks import check_number
from gstep.pruners.density_based import DensityPruner
from gstep.selection.dispatch import select_fastest
from gstep.types import VisualTokens


@dataclass(frozen=True, kw_only=True)
class GSTEP(DensityPruner):
    """Density-guided farthest point sampling over all tokens of the video, Eqs. (2)-(12).

    The first token is the one of largest density rho. Each further token maximizes U = alpha * log(l + beta) + (1 -
    alpha) * log(rho + beta), where l is its cosine distance to the nearest selected token. Ties go to the lowest index.

    Attributes:
        alpha: The weight of distance against density in Eq. (11), in [0, 1]. With 0, the B tokens of largest rho are
            kept.
        beta: The constant inside the logarithms of Eq. (11), > 0.
    """

    name: ClassVar[str] = "gstep"

    alpha: float = 0.5
    beta: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        alpha = check_number("alpha", self.alpha, "in [0, 1]", lambda alpha: 0 <= alpha <= 1)
        self._set(alpha=alpha, beta=check_number("beta", self.beta, "above 0", lambda beta: beta > 0))

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        rho_M, temporal_T = self.density(visual.tokens)
        order_B = select_fastest(visual.tokens.flatten(0, 1), rho_M, budget, alpha=self.alpha, beta=self.beta)
        return Selection(order_B, rho_M, temporal_T)
