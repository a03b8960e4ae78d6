"""VisionZip: the tokens that a frame's encoder attends to, and a few sums of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from gstep.density import work_dtype
from gstep.evidence import LAST_LAYER
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.vectors import assigned_mean, largest, unit
from gstep.types import VisualTokens

#: Kept tokens of a frame of 196 (LLaVA-OneVision), as published; other shares and sizes are rounded.
PUBLISHED_PER_FRAME = {0.25: 50, 0.20: 40, 0.15: 30, 0.10: 20}
_PUBLISHED_SIZE = 196


@dataclass(frozen=True, kw_only=True)
class VisionZip(Pruner):
    """VisionZip frame by frame (github.com/cokeshao/HoliTom, visionzip/llava_arch.py, for LLaVA-OneVision).

    A frame keeps K tokens (``kept_of_frame``): floor(K * 54/64) dominant ones unchanged, and K less those contextual
    ones: evenly strided targets among the remaining tokens, each plus the mean of the tokens nearest to it by key. The
    method's own prompt has a frame's dominant tokens first, then its contextual ones: ``PrunedTokens.order``, which
    ``merged`` alone gives back, both kinds being in ascending index.
    """

    name: ClassVar[str] = "visionzip"
    nested: ClassVar[bool] = False
    merges: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    reorders: ClassVar[bool] = True
    sources: ClassVar[Mapping[str, str]] = MappingProxyType({"token_attention": LAST_LAYER, "token_key": LAST_LAYER})
    needs: ClassVar[frozenset[str]] = frozenset(sources)

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        return n_frames * kept_of_frame(per_frame, retention_ratio)

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        n_frames, size, _ = visual.tokens.shape
        kept = kept_of_frame(size, ratio)
        n_dominant = kept * 54 // 64  # the published split: 54 dominant and 10 contextual tokens of 64
        ranked_TN = largest(visual.evidence["token_attention"], size)
        dominant_TS = ranked_TN[:, :n_dominant].sort(dim=1).values
        rest_TX = ranked_TN[:, n_dominant:].sort(dim=1).values  # in spatial order again, for even strides
        target_C = evenly_strided(size - n_dominant, kept - n_dominant, rest_TX.device)
        local_TK = torch.cat([dominant_TS, rest_TX[:, target_C]], dim=1)
        start_T1 = torch.arange(n_frames, device=local_TK.device)[:, None] * size
        merged_K = torch.arange(kept, device=local_TK.device) >= n_dominant
        return Selection(
            index=(start_T1 + local_TK).flatten(),
            tokens=torch.cat(list(_zipped(visual, dominant_TS, rest_TX, target_C))),
            merged=merged_K.repeat(n_frames),
        )


def kept_of_frame(size: int, ratio: float) -> int:
    """K, the tokens kept of a frame of ``size``: the published table for 196, else max(2, round(size * ratio)).

    At most ``size``. Two is the least because one token is contextual.
    """
    if size == _PUBLISHED_SIZE:
        for share, kept in PUBLISHED_PER_FRAME.items():
            if abs(ratio - share) < 1e-9:
                return kept
    return min(size, max(2, round(size * ratio)))


def evenly_strided(size: int, count: int, device: torch.device) -> Tensor:
    """[count] int64: every (size // count)-th place of ``size``, from the first on."""
    return torch.arange(count, device=device) * max(1, size // count)


def _zipped(visual: VisualTokens, dominant_TS: Tensor, rest_TX: Tensor, target_C: Tensor) -> Iterator[Tensor]:
    """The kept tokens [K,D] of one frame after the other, float32 (float64 of float64)."""
    frames = zip(visual.tokens, visual.evidence["token_key"], dominant_TS, rest_TX, strict=True)
    for stored_ND, key_NE, dominant_S, rest_X in frames:
        tokens_ND = stored_ND.to(work_dtype(stored_ND))
        contextual_CD = add_nearest(tokens_ND[rest_X], unit(key_NE[rest_X]), target_C)
        yield torch.cat([tokens_ND[dominant_S], contextual_CD])


def add_nearest(tokens_XD: Tensor, key_XE: Tensor, target_C: Tensor) -> Tensor:
    """Each target plus the mean of the other tokens whose nearest target, by cosine of unit keys, it is: [C,D]."""
    other_X = torch.ones(len(tokens_XD), dtype=torch.bool, device=tokens_XD.device)
    other_X[target_C] = False
    nearest_Y = (key_XE[other_X] @ key_XE[target_C].T).argmax(dim=1)
    # Added, not averaged in, as the official code does: such a token is longer than those that went into it.
    mean_CD, _ = assigned_mean(nearest_Y, tokens_XD[other_X], len(target_C))
    return tokens_XD[target_C] + mean_CD
