"""KeepAll: the unpruned control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gstep.pruners.base import Pruner, Selection
from gstep.pruners.checks import check_integer
from gstep.types import VisualTokens


@dataclass(frozen=True, kw_only=True)
class KeepAll(Pruner):
    """All tokens in ascending index, at any retention ratio: the nominal ratio is always 1.0.

    A budget other than T*N raises ValueError.
    """

    name: ClassVar[str] = "none"
    nested: ClassVar[bool] = False

    def nominal_ratio(self, retention_ratio: float) -> float:
        super().nominal_ratio(retention_ratio)
        return 1.0

    def resolve_budget(
        self, n_total: int, retention_ratio: float = 0.25, budget: int | None = None
    ) -> tuple[int, float]:
        if budget is not None and check_integer("budget", budget, 1, n_total) != n_total:
            raise ValueError(f"method 'none' keeps all {n_total} tokens; got budget {budget}")
        return super().resolve_budget(n_total, retention_ratio, budget)

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        return Selection(index=torch.arange(budget, device=visual.tokens.device))
