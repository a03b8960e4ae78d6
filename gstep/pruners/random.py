"""Random: the control that every method has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from gstep.pruners.base import Pruner, Selection
from gstep.types import VisualTokens


@dataclass(frozen=True, kw_only=True)
class Random(Pruner):
    """The first B of a seeded permutation of the T*N tokens, which is the same on every device."""

    name: ClassVar[str] = "random"
    nested: ClassVar[bool] = True
    seeded: ClassVar[bool] = True

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        n_frames, per_frame, _ = visual.tokens.shape
        order_B = np.random.default_rng(seed).permutation(n_frames * per_frame)[:budget]
        return Selection(index=torch.from_numpy(order_B).to(visual.tokens.device, torch.int64))
