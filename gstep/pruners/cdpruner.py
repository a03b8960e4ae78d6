"""CDPruner: tokens that are relevant to a question and different from each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from gstep.evidence import SINGLE_PATCHES
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.checks import check_choice
from gstep.pruners.vectors import normalize_rows
from gstep.types import VisualTokens, budget_for

MODES = ("global", "per_frame")

#: A token counts as a repetition of the picks if less than this share of its squared length is outside their span: that
#: much is rounding noise of float32.
SPANNED = 1e-5


@dataclass(frozen=True, kw_only=True)
class CDPruner(Pruner):
    """A diverse set of tokens that are relevant to a question: greedy MAP inference of a determinantal point process.

    The kernel is q_i cos(i, j) q_j, where q is each token's relevance to the question (github.com/Theia-4869/CDPruner,
    llava/model/llava_arch.py).

    The selection ends when every other token is nearly a linear combination of the picks (``select_by_greedy_map``), so
    it may have fewer than B tokens, but never none. The official code continues on rounding noise.

    Attributes:
        mode: "global" (one selection over the video) or "per_frame" (at most max(1, floor(r*N)) tokens of each frame).
    """

    name: ClassVar[str] = "cdpruner"
    nested: ClassVar[bool] = False
    cacheable: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"image_embedding", "text_embedding"})
    sources: ClassVar[Mapping[str, str]] = MappingProxyType({"image_embedding": SINGLE_PATCHES})

    mode: str = "global"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        if self.mode == "global":
            return min(budget_for(retention_ratio, n_frames * per_frame), hidden)
        return n_frames * min(budget_for(retention_ratio, per_frame), hidden)

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        """Select greedily: in mode "global" ``budget`` tokens of the video, otherwise the share ``ratio`` per frame.

        There may be fewer. The indices are in order of selection, frame by frame in mode "per_frame". ``seed`` is not
        used.
        """
        per_frame = visual.tokens.shape[1]
        direction_TND = normalize_rows(visual.tokens)
        quality_TN = compute_relevance(visual.evidence["image_embedding"], visual.evidence["text_embedding"])
        if self.mode == "global":
            return Selection(index=select_by_greedy_map(direction_TND.flatten(0, 1), quality_TN.flatten(), budget))
        frames = [
            select_by_greedy_map(direction_ND, quality_N, budget_for(ratio, per_frame)) + frame * per_frame
            for frame, (direction_ND, quality_N) in enumerate(zip(direction_TND, quality_TN, strict=True))
        ]
        return Selection(index=torch.cat(frames))


def compute_relevance(image_TNE: Tensor, text_QE: Tensor) -> Tensor:
    """Compute each token's relevance q, [T,N] from just above 0 to about 1.

    q is minus the mean cosine with the text segments, as in the official code, rescaled. If all cosines are equal, q is
    1.
    """
    raw_TN = -(normalize_rows(image_TNE) @ normalize_rows(text_QE).T).mean(dim=-1)
    low, high = raw_TN.min(), raw_TN.max()
    return torch.where(high > low, (raw_TN - low + 1e-6) / torch.where(high > low, high - low, 1.0), 1.0)


def select_by_greedy_map(direction_MD: Tensor, quality_M: Tensor, budget: int) -> Tensor:
    """Select up to ``budget`` tokens, each of which increases the determinant the most.

    The first pick is the most relevant token that is not zero. A Cholesky factorization computes only the rows of the
    picks.

    Args:
        direction_MD: Unit tokens or zeros.
        quality_M: The relevance q of each token.

    Returns:
        Indices in order of selection, int64: at most min(budget, D, M), fewer if every other token has less than
        SPANNED of its squared length outside the picks' span. If all tokens are zero, only the most relevant one.
    """
    n_total, hidden = direction_MD.shape
    weight_M = quality_M.to(direction_MD.dtype).square()
    factor_BM = direction_MD.new_zeros(min(budget, hidden, n_total), n_total)
    residual_M = direction_MD.square().sum(dim=1)  # the share of each token's squared length outside the picks' span
    score_M = weight_M * residual_M
    picks = [torch.where(score_M.max() > 0, score_M.argmax(), weight_M.argmax()).view(1)]
    gains = [score_M.new_ones(1)]  # the first pick is always kept
    for step in range(len(factor_BM) - 1):
        last_1 = picks[-1]
        dot_M = torch.mv(direction_MD, direction_MD.index_select(0, last_1).squeeze(0))
        dot_M -= factor_BM[:step].T @ factor_BM[:step].index_select(1, last_1).squeeze(1)
        root_1 = residual_M.index_select(0, last_1).sqrt()
        factor_BM[step] = torch.where(root_1 > 0, dot_M / root_1, 0.0)
        residual_M = (residual_M - factor_BM[step].square()).index_fill(0, last_1, 0.0)
        residual_M = residual_M.masked_fill(residual_M < SPANNED, 0.0)
        gain_1, pick_1 = (weight_M * residual_M).max(dim=0, keepdim=True)
        picks.append(pick_1)
        gains.append(gain_1)
    # No step waits for a GPU, so the number of independent picks is known only now.
    return torch.cat(picks)[: int((torch.cat(gains) > 0).sum())]
