"""FlashVID: pick attended and diverse tokens, and merge all other tokens from frame to frame, then within frames.

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

from gstep.density import scale_to_work_dtype, zero_small_distances
from gstep.evidence import LAST_LAYER
from gstep.pruners.base import Selection
from gstep.pruners.checks import check_integer, check_number
from gstep.pruners.segments import compute_adjacent_cosines, cut_segments, group_by_peaks, make_tie_noise
from gstep.pruners.sinks import SinkPruner
from gstep.pruners.vectors import compute_group_means, normalize_rows
from gstep.types import VisualTokens

_NEIGHBOURS = 7  # nearest tokens whose distances determine a token's density


@dataclass(frozen=True, kw_only=True)
class FlashVID(SinkPruner):
    """The stages of FlashVID before the language model, for LLaVA; its pruning inside the model is not implemented.

    Source: github.com/Fanziyang-v/FlashVID, flashvid/utils.py at 1d37422, with the selection of its LLaVA scripts.

    The video is cut into segments by the mean tokens of frames. A frame contributes K = ceil(N*r*expansion) tokens.
    ceil(K*alpha) of them are picked (``pick_diverse``) and stay unchanged; if these are all K, other tokens are
    dropped. Otherwise they are merged into similar tokens of the previous frame (``merge_back``), as long as K tokens
    per frame remain in the segment. The rest of the segment's budget is a share of the remaining tokens: each frame
    keeps ceil(X * share) density peaks of its X tokens, each replaced by the mean of the tokens nearest to it. If a
    segment is a single frame, its picked tokens are among the X, as in the official code. The total is near B.

    The official code may keep an index twice; here a picked peak of a single frame is not kept as a mean too, and if no
    token scores above 0, the next token is picked instead of an earlier pick. Where the official code fails (K = N, or
    ``temporal_threshold`` 1), nothing is merged from frame to frame.

    With ``mu_s``, the attention that weights distances is reduced by the sink scores of the segment, and may become
    negative. The code of SToP may pick a token twice; here the next token is picked.

    Attributes:
        expansion: The factor of the budget, > 0. The authors use 1.25 and prune the surplus inside the language model.
        alpha: The share of a frame's tokens that are picked, in [0, 1].
        temporal_threshold: A token more similar than this to a token of the previous frame is merged into it.
        segment_threshold: Segments are cut between neighboring frames whose similarity is lower.
        min_segment_num: The minimum number of segments, >= 1.
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
        """Raise ValueError for an invalid parameter, and convert numbers to floats or ints."""
        super().__post_init__()
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
        """Pick and merge the share ``ratio`` of the tokens, segment by segment; ``budget`` is not used.

        Each segment returns its picked tokens unchanged, then, unless these are its whole budget, each frame's
        remaining tokens after merging from frame to frame: all of them if the budget allows, otherwise means around
        density peaks. ``merged`` marks each kept token that differs from its input. ``seed`` breaks ties between
        density peaks without the evidence ``noise``.
        """
        per_frame = visual.tokens.shape[1]
        tokens_TND = scale_to_work_dtype(visual.tokens)
        direction_TND = normalize_rows(tokens_TND)
        noise = make_tie_noise(visual, seed)
        n_drawn = 0
        n_kept = self._frame_budget(per_frame, ratio)
        n_picks = math.ceil(n_kept * self.alpha)
        index, tokens = [], []
        similarity = compute_adjacent_cosines(tokens_TND.mean(dim=1))
        for start, end in cut_segments(similarity, self.min_segment_num, self.segment_threshold):
            input_LND = visual.tokens[start:end].to(tokens_TND.dtype)
            index_LN = torch.arange(start * per_frame, end * per_frame, device=input_LND.device).view(-1, per_frame)
            relevance_LN = tokens_TND[start:end] @ tokens_TND[start:end].mean(dim=(0, 1))
            attention_LN = self._suppress_sinks(visual.evidence["token_attention"][start:end])
            weight_LN = attention_LN.double() * relevance_LN
            is_pick_LN = pick_diverse(direction_TND[start:end], weight_LN, n_picks)
            index.append(index_LN[is_pick_LN])
            tokens.append(input_LND[is_pick_LN])
            if n_picks == n_kept:
                continue
            merged_LND, is_left_LN = merge_back(
                input_LND, direction_TND[start:end], ~is_pick_LN, self.temporal_threshold, n_kept * (end - start)
            )
            if end - start == 1:
                is_left_LN = torch.ones_like(is_left_LN)
            share = (n_kept - n_picks) * (end - start) / int(is_left_LN.sum())
            for index_N, merged_ND, is_left_N, is_pick_N in zip(
                index_LN, merged_LND, is_left_LN, is_pick_LN, strict=True
            ):
                # In float64, because noise of 1e-6 added to a density near 1 has only eight values in float32.
                index_X, rows_XD = index_N[is_left_N], merged_ND[is_left_N].double()
                if share < 1 and len(index_X):
                    noise_X = noise[n_drawn : n_drawn + len(index_X)]
                    n_drawn += len(index_X)
                    n_peaks = math.ceil(len(index_X) * share)
                    peak_C, group_X = group_by_peaks(rows_XD, noise_X, n_peaks, min(n_peaks, _NEIGHBOURS))
                    is_new_C = ~is_pick_N[is_left_N][peak_C]
                    index_X, rows_XD = (
                        index_X[peak_C][is_new_C],
                        compute_group_means(group_X, rows_XD, n_peaks)[0][is_new_C],
                    )
                index.append(index_X)
                tokens.append(rows_XD)
        index_B, tokens_BD = torch.cat(index), torch.cat(tokens)
        is_merged_B = (tokens_BD != visual.tokens.flatten(0, 1)[index_B]).any(dim=1)
        return Selection(index_B, tokens=tokens_BD, merged=is_merged_B)

    def _frame_budget(self, per_frame: int, ratio: float) -> int:
        """Compute K, the number of tokens that a frame contributes, from 1 to N."""
        return max(1, math.ceil(min(per_frame, per_frame * ratio * self.expansion)))


def pick_diverse(direction_LND: Tensor, weight_LN: Tensor, count: int) -> Tensor:
    """Pick ``count`` tokens of each frame with large weights and large distances from each other: [L,N] bool.

    A token's score is the smallest product of its weight and its cosine distance to a picked token. The first pick has
    the largest second-smallest product over all tokens, itself included: for a positive weight, that with its nearest
    neighbor. Ties go to the lowest index.
    """
    distance_LNN = zero_small_distances(1 - direction_LND @ direction_LND.mT)
    score_LNN = distance_LNN * weight_LN[:, None]  # [:, i, j] scores j by its distance to i
    # The smallest score is the token's score with itself, so the second smallest is used.
    score_LN = score_LNN.topk(min(2, score_LNN.shape[1]), dim=1, largest=False).values[:, -1]
    nearest_LN = torch.full_like(score_LN, torch.inf)
    is_pick_LN = torch.zeros_like(score_LN, dtype=torch.bool)
    for _ in range(count):
        best_L1 = score_LN.argmax(dim=1, keepdim=True)
        is_pick_LN.scatter_(1, best_L1, True)
        nearest_LN = torch.minimum(nearest_LN, score_LNN.take_along_dim(best_L1[:, :, None], dim=1).squeeze(1))
        score_LN = nearest_LN.masked_fill(is_pick_LN, -torch.inf)
    return is_pick_LN


def merge_back(
    tokens_LND: Tensor, direction_LND: Tensor, is_free_LN: Tensor, threshold: float, min_tokens: int
) -> tuple[Tensor, Tensor]:
    """Merge free tokens into the most similar free token of the previous frame; the arguments are not modified.

    Merges form trees along the frames: a token's sum is added to its parent. A remaining token is divided by 1 + the
    number of its direct children, as in the official code, although the sums of deeper trees have more terms.

    Args:
        is_free_LN: True for tokens that may be merged or merged into.
        threshold: A token is merged if its similarity is higher.
        min_tokens: If fewer of the segment's L*N tokens would remain, only similarities above that of rank L*N -
            min_tokens are merged.

    Returns:
        All tokens after merging, [L,N,D], and [L,N] bool, True for free tokens that were not merged into another.
    """
    cosine_UNN = direction_LND[1:] @ direction_LND[:-1].mT
    cosine_UNN = cosine_UNN.masked_fill(~(is_free_LN[1:, :, None] & is_free_LN[:-1, None]), -1)
    similarity_UN, parent_UN = cosine_UNN.clamp(max=1).max(dim=-1)
    is_merged_LN = pad(similarity_UN > threshold, (0, 0, 1, 0))
    max_merges = is_merged_LN.numel() - min_tokens
    if int(is_merged_LN.sum()) > max_merges:
        bound = similarity_UN.flatten().sort(descending=True).values[max_merges - 1] if max_merges > 0 else 1
        is_merged_LN = pad(similarity_UN > bound, (0, 0, 1, 0))
    merged_LND = tokens_LND.clone()
    n_terms_LN = torch.ones_like(merged_LND[..., 0])
    for frame in range(len(merged_LND) - 1, 0, -1):
        parent_N = parent_UN[frame - 1].masked_fill(~is_merged_LN[frame], -1)
        mean_ND, n_children_N = compute_group_means(parent_N, merged_LND[frame], len(parent_N))
        merged_LND[frame - 1] += mean_ND * n_children_N[:, None]
        n_terms_LN[frame - 1] += n_children_N
    return merged_LND / n_terms_LN[..., None], is_free_LN & ~is_merged_LN
