"""Uniform: evenly spaced tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gstep.pruners.base import Pruner, Selection
from gstep.types import VisualTokens


@dataclass(frozen=True, kw_only=True)
class Uniform(Pruner):
    """Evenly spaced tokens, the center of each of B equal strata of the flat sequence: floor((k + 1/2) * M / B)."""

    name: ClassVar[str] = "uniform"
    nested: ClassVar[bool] = False

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        n_frames, per_frame, _ = visual.tokens.shape
        stratum_B = torch.arange(budget, device=visual.tokens.device)
        return Selection(index=(2 * stratum_B + 1) * (n_frames * per_frame) // (2 * budget))
