"""EVS: the first frame, and the tokens that changed most since the frame before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gstep.pruners.base import Pruner, Selection
from gstep.pruners.novelty import token_novelty
from gstep.selection.reference import largest
from gstep.types import VisualTokens


@dataclass(frozen=True, kw_only=True)
class EVS(Pruner):
    """Efficient video sampling (arXiv 2510.14624), as servers deploy it: on tokens, not on pixels.

    A token's change is its cosine distance to the token at the same position a frame before; the paper takes the L1
    distance of pixels. The first frame is kept whole, and the largest changes of the whole video fill the budget, ties
    by ascending index.

    It keeps max(N, B) tokens: never less than the first frame, a share of at least 1 / T. With 16 temporal patches (32
    frames on Qwen) the minimum is 6.25 %.
    """

    name: ClassVar[str] = "evs"
    nested: ClassVar[bool] = False
    exact: ClassVar[bool] = False

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        return max(per_frame, super().at_most(n_frames, per_frame, hidden, retention_ratio))

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        per_frame = visual.tokens.shape[1]
        change_M = token_novelty(visual.tokens)[1:].flatten()
        index_C = per_frame + largest(change_M, max(0, budget - per_frame))
        return Selection(torch.cat([torch.arange(per_frame, device=index_C.device), index_C]))
