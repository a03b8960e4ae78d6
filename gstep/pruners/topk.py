"""TopK: the tokens of largest density, an ablation of GSTEP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gstep.pruners.base import Selection
from gstep.pruners.density_based import DensityPruner
from gstep.selection.reference import find_largest
from gstep.types import VisualTokens


@dataclass(frozen=True, kw_only=True)
class TopK(DensityPruner):
    """The B tokens of largest rho (Eq. 8), in descending order; ties go to the lowest index."""

    name: ClassVar[str] = "topk"

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        rho_M, temporal_T = self.density(visual.tokens)
        return Selection(find_largest(rho_M, budget), rho_M, temporal_T)
