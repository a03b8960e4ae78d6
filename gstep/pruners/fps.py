"""FPS: farthest point sampling by distance alone, an ablation of GSTEP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gstep.pruners.base import Selection
from gstep.pruners.checks import check_choice, check_number
from gstep.pruners.density_based import DensityPruner
from gstep.selection.dispatch import select_fastest
from gstep.selection.reference import STARTS
from gstep.types import VisualTokens


@dataclass(frozen=True, kw_only=True)
class FPS(DensityPruner):
    """Farthest point sampling by distance alone: Eqs. (10)-(12) with alpha = 1.

    Attributes:
        start: The first token: "density" (largest rho, Eq. 9), "first" (index 0) or "isolated" (the token whose nearest
            neighbor is farthest away).
        beta: The constant inside the logarithm of Eq. (11), > 0.
    """

    name: ClassVar[str] = "fps"

    start: str = "density"
    beta: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("start", self.start, STARTS)
        self._set(beta=check_number("beta", self.beta, "above 0", lambda beta: beta > 0))

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        rho_M, temporal_T = self.density(visual.tokens)
        order_B = select_fastest(
            visual.tokens.flatten(0, 1), rho_M, budget, alpha=1.0, beta=self.beta, start=self.start
        )
        return Selection(order_B, rho_M, temporal_T)
