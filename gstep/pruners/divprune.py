"""DivPrune: tokens that are far from each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gstep.pruners.base import Pruner, Selection
from gstep.selection.dispatch import select_fastest
from gstep.types import VisualTokens


@dataclass(frozen=True, kw_only=True)
class DivPrune(Pruner):
    """Max-min diversity by cosine distance (arXiv 2503.02175): farthest point sampling from the most isolated token.

    The selection equals ``fps`` with ``start="isolated"``. The authors keep round(r*M) tokens; here it is floor(r*M),
    as in every nested method, so that a cache can serve smaller ratios.
    """

    name: ClassVar[str] = "divprune"
    nested: ClassVar[bool] = True

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        tokens_MD = visual.tokens.flatten(0, 1)
        no_density_M = tokens_MD.new_zeros(len(tokens_MD))
        return Selection(select_fastest(tokens_MD, no_density_M, budget, alpha=1.0, start="isolated"))
