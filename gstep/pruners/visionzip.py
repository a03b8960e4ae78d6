"""VisionZip: the dominant tokens of each frame, and contextual tokens into which others are merged.

Shapes: K kept tokens of one frame, S dominant and C contextual tokens, X plain tokens (not dominant).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from gstep.density import get_work_dtype, iter_row_slices, scale_to_work_dtype
from gstep.evidence import LAST_LAYER
from gstep.pruners.base import Selection
from gstep.pruners.checks import check_choice, check_integer, check_number
from gstep.pruners.sinks import SinkPruner, compute_sink_scores, find_sinks, move_off_sinks
from gstep.pruners.vectors import compute_group_means, normalize_rows
from gstep.selection.reference import find_largest
from gstep.types import VisualTokens, budget_for

VARIANTS = ("llava", "qwen")
_DOMINANT = {"llava": 54 / 64, "qwen": 0.6}  # as published: 54 dominant and 10 contextual tokens of 64
_SOURCES: Mapping[str, Mapping[str, str]] = {
    "llava": MappingProxyType({"token_attention": LAST_LAYER, "token_key": LAST_LAYER}),
    "qwen": MappingProxyType({}),
}

#: The published numbers of tokens to keep of a frame of 196 (LLaVA-OneVision); other shares and sizes are rounded.
PUBLISHED_PER_FRAME = {0.25: 50, 0.20: 40, 0.15: 30, 0.10: 20}
_PUBLISHED_SIZE = 196

_DIGITS = 9  # decimals of compared cosines, so that the first of equal tokens wins whatever the order of summation


@dataclass(frozen=True, kw_only=True)
class VisionZip(SinkPruner):
    """The tokens of each frame with the highest attention or norm, and a few tokens into which the others are merged.

    Source: github.com/cokeshao/HoliTom, visionzip/llava_arch.py, for variant llava; github.com/xuyang-liu16/VidCom2,
    branch qwen, token_compressor/visionzip at a85d485, for variant qwen.

    Variant llava: a frame keeps K tokens (``count_frame_tokens``). floor(K * 54/64) are dominant, by attention, and
    unchanged; the others of the K are contextual: evenly strided targets among the plain tokens, to each of which the
    mean of the plain tokens whose keys are nearest is added. In the method's own prompt (``PrunedTokens.order``), a
    frame's dominant tokens come first, then its contextual tokens, each in ascending index.

    Variant qwen: a frame keeps K = max(1, floor(r*N)) tokens. max(1, floor(0.6*K)) are dominant, by largest L2 norm,
    and unchanged; the others of the K are contextual. Anchors are the plain tokens of highest mean cosine to their five
    nearest plain tokens. Each plain token, anchors included, goes to the anchor of largest cosine, and each anchor
    becomes the mean of its group. If all plain tokens are anchors, they stay unchanged, but ``merged`` is True. The
    first of equal anchors gets the whole group and the others stay unchanged, as in the official code. An earlier rule
    of that repository (d6235c5), from the time of its scores on Qwen3-VL-8B, is not implemented.

    With ``mu_s``, for llava only, sinks are ranked lower among the dominant tokens, and contextual targets that are
    among the 20 largest sinks move to the next position that is not. The code of SToP compares row numbers among the
    plain tokens with positions in the frame, and moves targets even if ``mu_s`` is 0; here positions are compared.

    Attributes:
        variant: The rules for LLaVA-OneVision ("llava") or for Qwen ("qwen").
        dominant_share: The share of K that is dominant, in [0, 1); None means 54/64 (llava) or 0.6 (qwen).
        neighbours: For qwen, the number of nearest tokens whose mean cosine is a token's density.
    """

    name: ClassVar[str] = "visionzip"
    nested: ClassVar[bool] = False
    merges: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    reorders: ClassVar[bool] = True
    family_parameter: ClassVar[str | None] = "variant"

    variant: str = "llava"
    dominant_share: float | None = None
    neighbours: int = 5

    def __post_init__(self) -> None:
        """Check the parameters, convert numbers, and replace ``dominant_share`` None by the variant's value.

        Raises:
            ValueError: A parameter is invalid, or ``mu_s`` is not 0 for variant qwen.
        """
        super().__post_init__()
        variant = check_choice("variant", self.variant, VARIANTS)
        self._check_llava(variant)
        share = _DOMINANT[variant] if self.dominant_share is None else self.dominant_share
        self._set(
            dominant_share=check_number("dominant_share", share, "in [0, 1)", lambda x: 0 <= x < 1),
            neighbours=check_integer("neighbours", self.neighbours, 1),
        )

    @property
    def sources(self) -> Mapping[str, str]:
        return _SOURCES[self.variant]

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(self.sources)

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        return n_frames * self._frame_budget(per_frame, retention_ratio)

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        """Select and merge the share ``ratio`` of each frame; ``budget`` and ``seed`` are not used.

        K tokens of each frame are kept. At most K - 1 of them are dominant, and in variant qwen at least 1 (so the only
        one if K is 1), whatever ``dominant_share`` is. Variant llava needs the evidence token_attention and token_key;
        variant qwen uses only the tokens.
        """
        assert self.dominant_share is not None
        n_kept = self._frame_budget(visual.tokens.shape[1], ratio)
        # 1e-9 is added because 100 * 0.29 is just below 29 in binary.
        n_dominant = min(n_kept - 1, math.floor(n_kept * self.dominant_share + 1e-9))
        if self.variant == "llava":
            return self._select_by_attention(visual, n_kept, n_dominant)
        return _select_by_norm(visual.tokens, n_kept, max(1, n_dominant), self.neighbours)

    def _select_by_attention(self, visual: VisualTokens, n_kept: int, n_dominant: int) -> Selection:
        """Select and merge the tokens of each frame by variant llava.

        The selection has the frames in order; each frame has its ``n_dominant`` tokens of highest attention first, then
        ``n_kept - n_dominant`` contextual tokens, marked as merged, both in ascending index.
        """
        n_frames, size, _ = visual.tokens.shape
        attention_TN = visual.evidence["token_attention"]
        order_TN = find_largest(self._suppress_sinks(attention_TN), size)
        dominant_TS = order_TN[:, :n_dominant].sort(dim=1).values
        plain_TX = order_TN[:, n_dominant:].sort(dim=1).values  # in spatial order again, for even strides
        target_C = make_strided_indices(size - n_dominant, n_kept - n_dominant, plain_TX.device)
        target_TC = target_C.expand(n_frames, -1)
        if self.mu_s:
            is_sink_TX = find_sinks(compute_sink_scores(attention_TN))[plain_TX].tolist()
            targets = [move_off_sinks(target_C.tolist(), is_sink_X) for is_sink_X in is_sink_TX]
            target_TC = torch.tensor(targets, device=plain_TX.device)
        local_TK = torch.cat([dominant_TS, plain_TX.gather(1, target_TC)], dim=1)
        start_T1 = torch.arange(n_frames, device=local_TK.device)[:, None] * size
        merged_K = torch.arange(n_kept, device=local_TK.device) >= n_dominant
        return Selection(
            index=(start_T1 + local_TK).flatten(),
            tokens=torch.cat(list(_iter_merged_frames(visual, dominant_TS, plain_TX, target_TC))),
            merged=merged_K.repeat(n_frames),
        )

    def _frame_budget(self, size: int, ratio: float) -> int:
        """Compute K, the number of tokens to keep of a frame of ``size`` tokens, by the variant's rule."""
        return count_frame_tokens(size, ratio) if self.variant == "llava" else budget_for(ratio, size)


def _select_by_norm(tokens_TND: Tensor, n_kept: int, n_dominant: int, neighbours: int) -> Selection:
    """Select and merge the tokens of each frame by variant qwen, in ascending index.

    In each frame, ``n_dominant`` tokens are selected by norm, and ``n_kept - n_dominant`` are contextual, marked as
    merged.
    """
    size = tokens_TND.shape[1]
    index, tokens, merged = [], [], []
    for frame, tokens_ND in enumerate(tokens_TND):
        index_K, tokens_KD = merge_frame_by_norm(tokens_ND, n_dominant, n_kept - n_dominant, neighbours)
        order_K = index_K.argsort()
        index.append(frame * size + index_K[order_K])
        tokens.append(tokens_KD[order_K])
        merged.append(order_K >= n_dominant)
    return Selection(torch.cat(index), tokens=torch.cat(tokens), merged=torch.cat(merged))


def count_frame_tokens(size: int, ratio: float) -> int:
    """Compute K of variant llava for a frame of ``size`` tokens: round(size * ratio), or the published number.

    For 196 tokens at 25, 20, 15 and 10 %, these are 50, 40, 30 and 20. K is at least 2, because one token is
    contextual, but at most ``size``.
    """
    if size == _PUBLISHED_SIZE:
        for share, n_kept in PUBLISHED_PER_FRAME.items():
            if abs(ratio - share) < 1e-9:
                return n_kept
    return min(size, max(2, round(size * ratio)))


def make_strided_indices(size: int, count: int, device: torch.device) -> Tensor:
    """Return ``count`` indices from 0 on with stride max(1, size // count), int64."""
    return torch.arange(count, device=device) * max(1, size // count)


def _iter_merged_frames(
    visual: VisualTokens, dominant_TS: Tensor, plain_TX: Tensor, target_TC: Tensor
) -> Iterator[Tensor]:
    """Yield the kept tokens [K,D] of each frame in the work dtype: dominant tokens, then merged contextual tokens."""
    frames = zip(visual.tokens, visual.evidence["token_key"], dominant_TS, plain_TX, target_TC, strict=True)
    for input_ND, key_NE, dominant_S, plain_X, target_C in frames:
        tokens_ND = input_ND.to(get_work_dtype(input_ND))
        contextual_CD = add_nearest(tokens_ND[plain_X], normalize_rows(key_NE[plain_X]), target_C)
        yield torch.cat([tokens_ND[dominant_S], contextual_CD])


def add_nearest(tokens_XD: Tensor, key_XE: Tensor, target_C: Tensor) -> Tensor:
    """Add to each target the mean of the tokens for which it is the nearest target, by cosine of their keys: [C,D].

    ``key_XE`` are unit keys, and ``target_C`` the targets' row numbers. A target without such tokens is unchanged.
    """
    is_source_X = torch.ones(len(tokens_XD), dtype=torch.bool, device=tokens_XD.device)
    is_source_X[target_C] = False
    nearest_Y = (key_XE[is_source_X] @ key_XE[target_C].T).argmax(dim=1)
    # The official code adds the mean instead of averaging, so a merged token is longer than the tokens it is made of.
    mean_CD, _ = compute_group_means(nearest_Y, tokens_XD[is_source_X], len(target_C))
    return tokens_XD[target_C] + mean_CD


def merge_frame_by_norm(
    tokens_ND: Tensor, n_dominant: int, n_contextual: int, neighbours: int
) -> tuple[Tensor, Tensor]:
    """Select and merge one frame by variant qwen.

    Dominant tokens are those of highest norm. The ``n_contextual`` other tokens of highest density (``find_densest``)
    are each replaced by the mean of the tokens nearest to them. If no other token is left, they stay unchanged.

    Returns:
        The indices in the frame [K], dominant tokens first, highest norm first, then contextual tokens in ascending
        index; and their tokens [K,D].
    """
    rows_ND = scale_to_work_dtype(tokens_ND.double())
    order_N = find_largest(torch.linalg.vector_norm(rows_ND, dim=1), len(rows_ND))
    dominant_S, plain_X = order_N[:n_dominant], order_N[n_dominant:].sort().values
    if n_contextual in (0, len(plain_X)):  # nothing to merge
        index_K = torch.cat([dominant_S, plain_X[:n_contextual]])
        return index_K, tokens_ND[index_K]
    direction_XD = normalize_rows(rows_ND[plain_X])
    anchor_C = find_densest(direction_XD, n_contextual, neighbours)
    contextual_CD = average_nearest(tokens_ND[plain_X].double(), direction_XD, anchor_C).to(tokens_ND.dtype)
    return torch.cat([dominant_S, plain_X[anchor_C]]), torch.cat([tokens_ND[dominant_S], contextual_CD])


def find_densest(direction_XD: Tensor, count: int, neighbours: int) -> Tensor:
    """Find the ``count`` unit vectors of highest mean cosine to their nearest neighbors: int64 indices, ascending.

    The mean is over ``neighbours`` other vectors, or over all others if there are fewer, rounded to 9 decimals. Ties go
    to the lowest index. ``direction_XD`` needs at least two vectors.
    """
    density = []
    for rows in iter_row_slices(direction_XD):
        cosine_RX = direction_XD[rows] @ direction_XD.T
        # The largest cosine is that of the token with itself or an equal token.
        density.append(cosine_RX.topk(min(neighbours + 1, len(direction_XD))).values[:, 1:].mean(dim=1))
    return find_largest(torch.cat(density).round(decimals=_DIGITS), count).sort().values


def average_nearest(tokens_XD: Tensor, direction_XD: Tensor, anchor_C: Tensor) -> Tensor:
    """Compute for each anchor the mean of the tokens that are nearest to it, by cosine of directions: [C,D].

    An anchor that no token is nearest to, not even itself, is unchanged.
    """
    cosine_XC = direction_XD @ direction_XD[anchor_C].T
    mean_CD, count_C = compute_group_means(cosine_XC.round(decimals=_DIGITS).argmax(dim=1), tokens_XD, len(anchor_C))
    return torch.where(count_C[:, None] > 0, mean_CD, tokens_XD[anchor_C])
