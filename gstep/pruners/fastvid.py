"""FastVID: cut the video into segments, keep salient tokens, and merge all other tokens into density peaks.

Shapes: L frames of one segment, Y = L*N tokens of the segment. One frame has S salient tokens, X plain tokens (not
salient) and A anchors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gstep.density import scale_to_work_dtype
from gstep.evidence import MERGED_QUERIES, POOLING_HEAD
from gstep.pruners.base import Selection
from gstep.pruners.checks import check_choice, check_integer, check_number
from gstep.pruners.segments import (
    compute_adjacent_cosines,
    compute_scaled_distances,
    cut_segments,
    make_tie_noise,
    score_density_peaks,
)
from gstep.pruners.sinks import SinkPruner
from gstep.pruners.vectors import compute_group_means, normalize_rows
from gstep.selection.reference import find_largest
from gstep.types import VisualTokens, budget_for

VARIANTS = ("llava", "qwen")
_TAU = {"llava": 0.9, "qwen": 0.84}
_SOURCES: Mapping[str, Mapping[str, str]] = {
    "llava": MappingProxyType({"frame_feature": POOLING_HEAD, "token_attention": POOLING_HEAD}),
    "qwen": MappingProxyType({"token_attention": MERGED_QUERIES}),
}
_NEIGHBOURS = 4  # nearest tokens whose distances determine a token's density


class FrameTokens(NamedTuple):
    """The tokens that one frame keeps, as indices in the frame, int64."""

    salient: Tensor
    anchors: Tensor


@dataclass(frozen=True, kw_only=True)
class FastVID(SinkPruner):
    """Density-based pruning and merging, segment by segment.

    Source: github.com/LunarShen/FastVID, modeling_qwen2.py in its LLaVA-NeXT for variant llava, modeling_qwen2_5_vl.py
    in its qwenvlutils for variant qwen.

    Each frame contributes K = max(1, floor(r*N)) tokens to the budget of its segment, of which a share d are anchors,
    into which other tokens are merged. The total is near B, but often far below it in variant qwen, where only the last
    of several similar frames keeps tokens.

    Where the official code crashes: in a video of at most c frames, every frame is a segment; without anchors
    (floor(K*d) = 0) only salient tokens are kept; and no frame keeps more than its N tokens.

    With ``mu_s``, for llava only, sinks are ranked lower among the salient tokens and among the anchors; in frames with
    more than floor(K*d) anchors, scores as anchors are lowered twice as much, as in the code of SToP.

    Attributes:
        variant: The rules for LLaVA-OneVision ("llava") or for Qwen ("qwen", where a frame's feature is the mean of its
            tokens).
        c: The minimum number of segments, >= 1.
        tau: Segments are cut between neighboring frames whose similarity is lower; None means 0.9 (llava) or 0.84
            (qwen).
        d: The share of anchors, in [0, 1].
        p: Every p-th frame of a segment, counted from its last, has anchors; for qwen, every p-th inner segment.
        beta: The minimum weight of an anchor against the tokens merged into it, in [0, 1].
        ignore: For qwen, a segment is cut into inner segments between neighboring frames whose similarity is lower.
    """

    name: ClassVar[str] = "fastvid"
    nested: ClassVar[bool] = False
    merges: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    optional: ClassVar[frozenset[str]] = frozenset({"noise"})
    family_parameter: ClassVar[str | None] = "variant"

    variant: str = "llava"
    c: int = 8
    tau: float | None = None
    d: float = 0.4
    p: int = 4
    beta: float = 0.6
    ignore: float = 0.95

    def __post_init__(self) -> None:
        """Check the parameters, convert numbers to floats or ints, and replace ``tau`` None by the variant's value.

        Raises:
            ValueError: A parameter is invalid, or ``mu_s`` is not 0 for variant qwen.
        """
        super().__post_init__()
        variant = check_choice("variant", self.variant, VARIANTS)
        self._check_llava(variant)
        cosines = {"tau": _TAU[variant] if self.tau is None else self.tau, "ignore": self.ignore}
        shares = {"d": self.d, "beta": self.beta}
        self._set(
            c=check_integer("c", self.c, 1),
            p=check_integer("p", self.p, 1),
            **{name: check_number(name, value, "in [-1, 1]", lambda x: abs(x) <= 1) for name, value in cosines.items()},
            **{name: check_number(name, value, "in [0, 1]", lambda x: 0 <= x <= 1) for name, value in shares.items()},
        )

    @property
    def sources(self) -> Mapping[str, str]:
        return _SOURCES[self.variant]

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(self.sources)

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        return n_frames * budget_for(retention_ratio, per_frame)

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        """Select and merge the share ``ratio`` of the tokens, segment by segment; ``budget`` is not used.

        Each segment returns its salient tokens (by ``token_attention``) unchanged, then its anchors with other tokens
        merged in; ``merged`` marks the anchors that changed. The variant "llava" finds segments by the evidence
        ``frame_feature`` and merges anchors of the same frame too; "qwen" finds them by the mean token of each frame.
        ``seed`` breaks ties between density peaks without the evidence ``noise``.
        """
        per_frame = visual.tokens.shape[1]
        tokens_TND = scale_to_work_dtype(visual.tokens)
        noise_M = make_tie_noise(visual, seed)
        is_llava = self.variant == "llava"
        feature_TV = visual.evidence["frame_feature"] if is_llava else tokens_TND.mean(dim=1)
        frame_budget = budget_for(ratio, per_frame)
        spans, counts = self._plan(compute_adjacent_cosines(feature_TV), per_frame, frame_budget)
        attention_TN = visual.evidence["token_attention"]
        frames = choose_tokens(
            tokens_TND,
            self._suppress_sinks(attention_TN),
            noise_M,
            counts,
            every_frame_draws=is_llava,
            penalty_N=self._compute_peak_penalty(attention_TN),
            frame_share=_count_anchors(frame_budget, self.d),
        )
        direction_TND = normalize_rows(tokens_TND)
        index, tokens, merged = [], [], []
        for start, end in spans:
            input_LND = visual.tokens[start:end].to(tokens_TND.dtype)
            index_K, tokens_KD, merged_K = compress_segment(
                input_LND, direction_TND[start:end], frames[start:end], self.beta, merge_anchors=is_llava
            )
            index.append(index_K + start * per_frame)
            tokens.append(tokens_KD)
            merged.append(merged_K)
        return Selection(torch.cat(index), tokens=torch.cat(tokens), merged=torch.cat(merged))

    def _plan(
        self, similarity: Sequence[float], size: int, budget: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Plan the segments as [start, end), and (salient tokens, anchors) for each frame of the video, as two lists.

        ``similarity`` is that of each frame to the next one, ``size`` is N, and ``budget`` is K.
        """
        assert self.tau is not None
        spans = list(cut_segments(similarity, self.c, self.tau))
        counts: list[tuple[int, int]] = []
        for start, end in spans:
            if self.variant == "llava":
                counts += count_llava_tokens(end - start, size, budget, self.d, self.p)
            else:
                last = [inner_end - 1 for _, inner_end in cut_segments(similarity[start : end - 1], 1, self.ignore)]
                counts += count_qwen_tokens(end - start, last, size, budget, self.d, self.p)
        return spans, counts


def _count_anchors(budget: int, d: float) -> int:
    """Compute a frame's share of anchors, floor(K*d), where K is ``budget``."""
    return math.floor(budget * d + 1e-9)  # in binary, 100 * 0.29 is just below 29


def count_llava_tokens(length: int, size: int, budget: int, d: float, p: int) -> list[tuple[int, int]]:
    """Compute (number of salient tokens, number of anchors) for each frame of a segment by variant llava.

    Every frame keeps K - floor(K*d) salient tokens. The anchors of all frames go in equal shares, rounded down, to the
    last frame and every p-th frame before it, as far as they have room. ``size`` is N, ``budget`` is K.
    """
    n_anchors = _count_anchors(budget, d)
    n_salient = budget - n_anchors
    anchor_frames = range(length - 1, -1, -p)
    per_frame = min(n_anchors * length // len(anchor_frames), size - n_salient)
    return [(n_salient, per_frame if frame in anchor_frames else 0) for frame in range(length)]


def count_qwen_tokens(
    length: int, last: Sequence[int], size: int, budget: int, d: float, p: int
) -> list[tuple[int, int]]:
    """Compute (number of salient tokens, number of anchors) for each frame of a segment by variant qwen.

    The segment has K*length tokens, of which max(1, floor(K*length*d)) are anchors. Its salient tokens are divided
    evenly among the frames ``last``, which end its inner segments, and its anchors among every p-th of these frames,
    counted from the end. A remainder goes one by one to the first frames for salient tokens, and to the last frames for
    anchors. A frame takes at most ``size`` = N tokens, of which at most max(1, N // 2) are anchors unless the segment
    is one frame; what exceeds this is dropped. ``budget`` is K.
    """
    n_anchors = min(budget * length, max(1, math.floor(budget * length * d + 1e-9)))
    salient = split_evenly(budget * length - n_anchors, len(last))
    anchors = iter(split_evenly(n_anchors, math.ceil(len(last) / p)))
    # The anchors of a whole segment may exceed a frame, so they take at most half of it.
    max_anchors = size if length == 1 else max(1, size // 2)
    counts = [(0, 0)] * length
    for i, frame in enumerate(reversed(last)):
        n_frame_anchors = min(next(anchors), max_anchors) if i % p == 0 else 0
        counts[frame] = (min(salient[-1 - i], size - n_frame_anchors), n_frame_anchors)
    return counts


def split_evenly(total: int, parts: int) -> list[int]:
    """Divide ``total`` into ``parts`` integers that differ by at most 1, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def choose_tokens(
    tokens_TND: Tensor,
    attention_TN: Tensor,
    noise_M: Tensor,
    counts: Sequence[tuple[int, int]],
    *,
    every_frame_draws: bool,
    penalty_N: Tensor | None = None,
    frame_share: int = 0,
) -> list[FrameTokens]:
    """Choose the salient tokens and the anchors of each frame.

    Salient tokens are those of highest attention, in descending order. Anchors are the highest density peaks among the
    other tokens of the frame, in ascending index.

    Args:
        noise_M: Noise in [0, 1) that breaks ties, used as a stream: a frame consumes one number per token that is not
            salient.
        counts: (number of salient tokens, number of anchors) for each frame.
        every_frame_draws: True if every frame consumes noise (llava), False if only frames with anchors do (qwen).
        penalty_N: Subtracted from the scores of anchors, twice in frames with more than ``frame_share`` anchors.
    """
    order_TN = find_largest(attention_TN, attention_TN.shape[1])
    frames = []
    n_drawn = 0
    for tokens_ND, order_N, (n_salient, n_anchors) in zip(tokens_TND, order_TN, counts, strict=True):
        plain_X = order_N[n_salient:].sort().values
        anchors_A = plain_X[:0]
        if n_anchors:
            peak_X = score_density_peaks(
                compute_scaled_distances(tokens_ND[plain_X]), noise_M[n_drawn : n_drawn + len(plain_X)], _NEIGHBOURS
            )
            if penalty_N is not None:
                peak_X = peak_X - penalty_N[plain_X] * (2 if n_anchors > frame_share else 1)
            anchors_A = plain_X[find_largest(peak_X, n_anchors).sort().values]
        frames.append(FrameTokens(order_N[:n_salient], anchors_A))
        n_drawn += len(plain_X) if n_anchors or every_frame_draws else 0
    return frames


def compress_segment(
    tokens_LND: Tensor, direction_LND: Tensor, frames: Sequence[FrameTokens], beta: float, *, merge_anchors: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge a segment's tokens, except salient ones, into its anchors by :func:`merge_into_anchors`.

    This is done for each frame with anchors separately, so that a token of any frame is merged into one anchor of each
    of these frames.

    Args:
        direction_LND: The tokens as unit vectors.
        merge_anchors: True if the anchors of a frame are themselves among the tokens that are merged into them.

    Returns:
        Three tensors, the salient tokens of all frames first, then the anchors: the indices in the segment [K], the
        tokens [K,D], and [K] bool, True if merging changed the token.
    """
    size = tokens_LND.shape[1]
    tokens_YD, direction_YD = tokens_LND.flatten(0, 1), direction_LND.flatten(0, 1)
    salient_S = torch.cat([frame.salient + size * i for i, frame in enumerate(frames)])
    is_free_Y = torch.ones(len(tokens_YD), dtype=torch.bool, device=tokens_YD.device)
    is_free_Y[salient_S] = False
    index, tokens = [salient_S], [tokens_YD[salient_S]]
    for i, frame in enumerate(frames):
        if len(frame.anchors):
            anchor_A = frame.anchors + size * i
            is_source_Y = is_free_Y if merge_anchors else is_free_Y.index_fill(0, anchor_A, False)
            index.append(anchor_A)
            tokens.append(merge_into_anchors(tokens_YD, direction_YD, is_source_Y, anchor_A, beta))
    index_K, tokens_KD = torch.cat(index), torch.cat(tokens)
    return index_K, tokens_KD, (tokens_KD != tokens_YD[index_K]).any(dim=1)


def merge_into_anchors(
    tokens_YD: Tensor, direction_YD: Tensor, is_source_Y: Tensor, anchor_A: Tensor, beta: float
) -> Tensor:
    """Move each anchor toward the mean of the source tokens whose most similar anchor it is, by cosine: [A,D].

    With n source tokens, the anchor's weight is max(1 / (n + 1), beta). An anchor without source tokens is unchanged.
    """
    nearest_Y = (direction_YD @ direction_YD[anchor_A].T).argmax(dim=1).masked_fill(~is_source_Y, -1)
    mean_AD, count_A = compute_group_means(nearest_Y, tokens_YD, len(anchor_A))
    # The anchor weighs as much as each token that is merged into it, but never less than beta.
    weight_A1 = (count_A + 1).to(mean_AD.dtype).reciprocal().clamp(min=beta)[:, None]
    anchors_AD = tokens_YD[anchor_A]
    return torch.where(count_A[:, None] > 0, anchors_AD + (1 - weight_A1) * (mean_AD - anchors_AD), anchors_AD)
