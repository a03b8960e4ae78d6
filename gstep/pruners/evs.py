"""EVS: the first frame, and the tokens that changed the most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gstep.pruners.base import Pruner, Selection
from gstep.pruners.novelty import compute_token_novelty
from gstep.selection.reference import find_largest
from gstep.types import VisualTokens


@dataclass(frozen=True, kw_only=True)
class EVS(Pruner):
    """Efficient video sampling (arXiv 2510.14624) on tokens instead of pixels, as inference servers implement it.

    A token's change is its cosine distance to the token at the same position of the previous frame. The first frame is
    kept whole, and the tokens of largest change in the whole video fill the rest of the budget; ties go to the lowest
    index. The method therefore keeps max(N, B) tokens, at least a share of 1 / T.
    """

    name: ClassVar[str] = "evs"
    nested: ClassVar[bool] = False
    exact: ClassVar[bool] = False

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        return max(per_frame, super().at_most(n_frames, per_frame, hidden, retention_ratio))

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        per_frame = visual.tokens.shape[1]
        change_M = compute_token_novelty(visual.tokens)[1:].flatten()
        index_C = per_frame + find_largest(change_M, max(0, budget - per_frame))
        return Selection(torch.cat([torch.arange(per_frame, device=index_C.device), index_C]))
