"""FlashVID: pick tokens that are attended to and differ, merge the others from frame to frame, then within frames.

Shapes: L frames of one segment, X tokens of a frame that may be merged within it, C density peaks among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from gstep.density import floor_distance, working_copy
from gstep.evidence import LAST_LAYER
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.checks import check_integer, check_number
from gstep.pruners.segments import adjacent_cosines, cut, group_by_peaks, tie_noise
from gstep.pruners.vectors import assigned_mean, unit
from gstep.types import VisualTokens

_NEIGHBOURS = 7  # nearest tokens whose mean distance makes a token's density


@dataclass(frozen=True, kw_only=True)
class FlashVID(Pruner):
    """The outer stages of FlashVID, for LLaVA; its pruning inside of the language model is not here.

    Source: github.com/Fanziyang-v/FlashVID, flashvid/utils.py at 1d37422, with the selection of its LLaVA scripts.

    The video is cut into segments by the mean tokens of frames. A frame brings K = ceil(N*r*expansion) tokens, of which
    ceil(K*alpha) are picked (``pick``) and stay as they are. The others are merged into similar tokens of the frame
    before (``merge_back``), as far as the segment keeps K a frame. The rest of the budget is a share of what is left
    then: of each frame's X tokens ceil(X * share) density peaks, each the mean of the tokens nearest to it. In a frame
    that is a segment by itself, as in the official code, picked tokens are among them. The count is near B.

    The official code may keep a place twice; here it is kept once. A peak of a lone frame that is picked is not kept as
    a mean too, and where no token scores above 0 the next one is picked instead of an old one again. Where that code
    fails (K = N, or ``temporal_threshold`` 1) nothing is merged from frame to frame.

    Attributes:
        expansion: the factor of the budget; the authors keep 1.25 here, and prune the surplus inside of the language
            model.
        alpha: the share of a frame's tokens that are picked, in [0, 1].
        temporal_threshold: tokens that are more similar than this to a token of the frame before are merged into it.
        segment_threshold: frames are cut apart where neighbours are less similar than this.
        min_segment_num: the least number of segments.
    """

    name: ClassVar[str] = "flashvid"
    nested: ClassVar[bool] = False
    merges: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    optional: ClassVar[frozenset[str]] = frozenset({"noise"})
    needs: ClassVar[frozenset[str]] = frozenset({"token_attention"})
    sources: ClassVar[Mapping[str, str]] = MappingProxyType({"token_attention": LAST_LAYER})

    expansion: float = 1.0
    alpha: float = 0.7
    temporal_threshold: float = 0.8
    segment_threshold: float = 0.9
    min_segment_num: int = 8

    def __post_init__(self) -> None:
        cosines = {"temporal_threshold": self.temporal_threshold, "segment_threshold": self.segment_threshold}
        self._set(
            expansion=check_number("expansion", self.expansion, "above 0", lambda x: x > 0),
            alpha=check_number("alpha", self.alpha, "in [0, 1]", lambda x: 0 <= x <= 1),
            min_segment_num=check_integer("min_segment_num", self.min_segment_num, 1),
            **{name: check_number(name, value, "in [-1, 1]", lambda x: abs(x) <= 1) for name, value in cosines.items()},
        )

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        return n_frames * min(per_frame, self._frame_budget(per_frame, retention_ratio) + 1)  # each frame may round up

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        per_frame = visual.tokens.shape[1]
        tokens_TND = working_copy(visual.tokens)
        direction_TND, noise, used = unit(tokens_TND), tie_noise(visual, seed), 0
        kept = self._frame_budget(per_frame, ratio)
        n_picked = math.ceil(kept * self.alpha)
        index, tokens = [], []
        similarity = adjacent_cosines(tokens_TND.mean(dim=1))
        for start, end in cut(similarity, self.min_segment_num, self.segment_threshold):
            raw_LND = visual.tokens[start:end].to(tokens_TND.dtype)
            place_LN = torch.arange(start * per_frame, end * per_frame, device=raw_LND.device).view(-1, per_frame)
            relevance_LN = tokens_TND[start:end] @ tokens_TND[start:end].mean(dim=(0, 1))
            weight_LN = visual.evidence["token_attention"][start:end].double() * relevance_LN
            picked_LN = pick(direction_TND[start:end], weight_LN, n_picked)
            index.append(place_LN[picked_LN])
            tokens.append(raw_LND[picked_LN])
            if n_picked == kept:
                continue
            grown_LND, left_LN = merge_back(
                raw_LND, direction_TND[start:end], ~picked_LN, self.temporal_threshold, kept * (end - start)
            )
            if end - start == 1:
                left_LN = torch.ones_like(left_LN)
            share = (kept - n_picked) * (end - start) / int(left_LN.sum())
            for place_N, grown_ND, left_N, picked_N in zip(place_LN, grown_LND, left_LN, picked_LN, strict=True):
                # In float64, since in float32 noise of 1e-6 beside a density near 1 has eight values.
                place_X, rows_XD = place_N[left_N], grown_ND[left_N].double()
                if share < 1 and len(place_X):
                    noise_X = noise[used : used + len(place_X)]
                    used += len(place_X)
                    n_peaks = math.ceil(len(place_X) * share)
                    peak_C, group_X = group_by_peaks(rows_XD, noise_X, n_peaks, min(n_peaks, _NEIGHBOURS))
                    new_C = ~picked_N[left_N][peak_C]
                    place_X, rows_XD = place_X[peak_C][new_C], assigned_mean(group_X, rows_XD, n_peaks)[0][new_C]
                index.append(place_X)
                tokens.append(rows_XD)
        index_B, tokens_BD = torch.cat(index), torch.cat(tokens)
        changed_B = (tokens_BD != visual.tokens.flatten(0, 1)[index_B]).any(dim=1)
        return Selection(index_B, tokens=tokens_BD, merged=changed_B)

    def _frame_budget(self, per_frame: int, ratio: float) -> int:
        """Return K, the tokens that a frame brings, at most N."""
        return max(1, math.ceil(min(per_frame, per_frame * ratio * self.expansion)))


def pick(direction_LND: Tensor, weight_LN: Tensor, count: int) -> Tensor:
    """Pick ``count`` tokens of each frame that weigh much and lie far from each other: [L,N] bool.

    A token's score is its weight times its cosine distance to the nearest token that is picked; the first token picked
    has the largest weight times distance to its nearest neighbour.
    """
    distance_LNN = floor_distance(1 - direction_LND @ direction_LND.mT)
    score_LNN = distance_LNN * weight_LN[:, None]  # [:, i, j] scores j by its distance to i
    # The smallest score of all is that with the token itself.
    score_LN = score_LNN.topk(min(2, score_LNN.shape[1]), dim=1, largest=False).values[:, -1]
    nearest_LN = torch.full_like(score_LN, torch.inf)
    picked_LN = torch.zeros_like(score_LN, dtype=torch.bool)
    for _ in range(count):
        best_L1 = score_LN.argmax(dim=1, keepdim=True)
        picked_LN.scatter_(1, best_L1, True)
        nearest_LN = torch.minimum(nearest_LN, score_LNN.take_along_dim(best_L1[:, :, None], dim=1).squeeze(1))
        score_LN = nearest_LN.masked_fill(picked_LN, -torch.inf)
    return picked_LN


def merge_back(
    tokens_LND: Tensor, direction_LND: Tensor, free_LN: Tensor, threshold: float, least: int
) -> tuple[Tensor, Tensor]:
    """Merge free tokens into the most similar free ones of the frame before: all tokens [L,N,D], and which are left.

    A token is merged if it is more similar than ``threshold``, the most similar ones alone where fewer than ``least``
    tokens of the segment would stay. Trees grow along the frames: a token's sum goes on to the token that it is merged
    into. What is left is divided by 1 + the number of tokens merged into it directly, as the official code does, though
    the sums have more terms in deeper trees.
    """
    cosine_UNN = direction_LND[1:] @ direction_LND[:-1].mT
    cosine_UNN = cosine_UNN.masked_fill(~(free_LN[1:, :, None] & free_LN[:-1, None]), -1)
    similar_UN, parent_UN = cosine_UNN.clamp(max=1).max(dim=-1)
    merges_LN = pad(similar_UN > threshold, (0, 0, 1, 0))
    room = merges_LN.numel() - least
    if int(merges_LN.sum()) > room:
        bound = similar_UN.flatten().sort(descending=True).values[room - 1] if room > 0 else 1
        merges_LN = pad(similar_UN > bound, (0, 0, 1, 0))
    grown_LND = tokens_LND.clone()
    terms_LN = torch.ones_like(grown_LND[..., 0])
    for frame in range(len(grown_LND) - 1, 0, -1):
        parent_N = parent_UN[frame - 1].masked_fill(~merges_LN[frame], -1)
        mean_ND, children_N = assigned_mean(parent_N, grown_LND[frame], len(parent_N))
        grown_LND[frame - 1] += mean_ND * children_N[:, None]
        terms_LN[frame - 1] += children_N
    return grown_LND / terms_LN[..., None], free_LN & ~merges_LN
