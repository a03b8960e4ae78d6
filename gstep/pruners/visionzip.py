"""VisionZip: the tokens that stand out in a frame, and a few that stand for groups of the others.

Shapes: K kept tokens of one frame, S dominant and C contextual ones, X tokens of the frame that are not dominant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from gstep.density import row_slices, work_dtype, working_copy
from gstep.evidence import LAST_LAYER
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.checks import check_choice, check_integer, check_number
from gstep.pruners.vectors import assigned_mean, unit
from gstep.selection.reference import largest
from gstep.types import VisualTokens, budget_for

VARIANTS = ("llava", "qwen")
_DOMINANT = {"llava": 54 / 64, "qwen": 0.6}  # as published: 54 dominant and 10 contextual tokens of 64
_SOURCES: Mapping[str, Mapping[str, str]] = {
    "llava": MappingProxyType({"token_attention": LAST_LAYER, "token_key": LAST_LAYER}),
    "qwen": MappingProxyType({}),
}

#: Kept tokens of a frame of 196 (LLaVA-OneVision), as published; other shares and sizes are rounded.
PUBLISHED_PER_FRAME = {0.25: 50, 0.20: 40, 0.15: 30, 0.10: 20}
_PUBLISHED_SIZE = 196

_DIGITS = 9  # decimals of compared cosines, so that of equal tokens the first wins whatever the order of summation


@dataclass(frozen=True, kw_only=True)
class VisionZip(Pruner):
    """The tokens of each frame that attention dwells on, and a few into which the others are merged.

    Source: github.com/cokeshao/HoliTom, visionzip/llava_arch.py, for variant llava; github.com/xuyang-liu16/VidCom2,
    branch qwen, token_compressor/visionzip at a85d485, for variant qwen.

    llava: a frame keeps K tokens (``kept_of_frame``): floor(K * 54/64) dominant ones unchanged, and K less those
    contextual ones: evenly strided targets among the remaining tokens, each plus the mean of the tokens nearest to it
    by key. The method's own prompt has a frame's dominant tokens first, then its contextual ones:
    ``PrunedTokens.order``, which ``merged`` alone gives back, both kinds being in ascending index.

    qwen: no attention, since fast kernels do not give any. Of a frame's N tokens K = max(1, floor(r*N)) are kept:
    max(1, floor(0.6*K)) dominant ones of largest L2 norm, unchanged, and K less those contextual ones. Of the remaining
    tokens those are anchors whose mean cosine to their five nearest remaining ones is highest. Each remaining token, an
    anchor too, goes to the anchor of largest cosine, and at an anchor's place is the mean of what went to it. The own
    order is ascending index.

    Where that code leaves the rule for qwen open: of equal scores the lowest index wins (there it depends on topk; and
    scores are often equal there, in the model's 16 bits, where these are float64). With K = 1 the longest token is kept
    and nothing is merged. Where all remaining tokens are anchors they stay as they are, though ``merged``. Of equal
    anchors the first gets everything and the others stay as they are, as there. Where rounding has r*N just below an
    integer, K is that integer: 63 for 70 % of 90, not 62.

    That commit has one rule for all Qwen models. The one for Qwen3-VL before it (d6235c5: attention of the encoder's
    last layer, and all tokens of a video compared at once) is not built here, though the scores of VisionZip on
    Qwen3-VL-8B in that repository are from its time.

    Attributes:
        variant: the rules for LLaVA-OneVision (llava) or for Qwen (qwen).
        dominant_share: the share of K that is dominant, in [0, 1); None means 54/64 (llava) or 0.6 (qwen).
        neighbours: for qwen, how many nearest tokens make a token's density.
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
        variant = check_choice("variant", self.variant, VARIANTS)
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
        return n_frames * self._kept_of_frame(per_frame, retention_ratio)

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        assert self.dominant_share is not None
        kept = self._kept_of_frame(visual.tokens.shape[1], ratio)
        # 1e-9 is added because 100 * 0.29 is just below 29 in binary.
        n_dominant = min(kept - 1, math.floor(kept * self.dominant_share + 1e-9))
        if self.variant == "llava":
            return _by_attention(visual, kept, n_dominant)
        return _by_norm(visual.tokens, kept, max(1, n_dominant), self.neighbours)

    def _kept_of_frame(self, size: int, ratio: float) -> int:
        """Return K, the number of tokens to keep of a frame of ``size`` tokens, by the variant's rule."""
        return kept_of_frame(size, ratio) if self.variant == "llava" else budget_for(ratio, size)


def _by_attention(visual: VisualTokens, kept: int, n_dominant: int) -> Selection:
    """Select the kept tokens of every frame by variant llava, the dominant ones of a frame first."""
    n_frames, size, _ = visual.tokens.shape
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


def _by_norm(tokens_TND: Tensor, kept: int, n_dominant: int, neighbours: int) -> Selection:
    """Select the kept tokens of every frame by variant qwen, in ascending index."""
    size = tokens_TND.shape[1]
    index, tokens, merged = [], [], []
    for frame, tokens_ND in enumerate(tokens_TND):
        place_K, tokens_KD = zip_frame(tokens_ND, n_dominant, kept - n_dominant, neighbours)
        order_K = place_K.argsort()
        index.append(frame * size + place_K[order_K])
        tokens.append(tokens_KD[order_K])
        merged.append(order_K >= n_dominant)
    return Selection(torch.cat(index), tokens=torch.cat(tokens), merged=torch.cat(merged))


def kept_of_frame(size: int, ratio: float) -> int:
    """Return K, the tokens kept of a frame of ``size``: the published table for 196, else max(2, round(size * ratio)).

    At most ``size``. Two is the least because one token is contextual.
    """
    if size == _PUBLISHED_SIZE:
        for share, kept in PUBLISHED_PER_FRAME.items():
            if abs(ratio - share) < 1e-9:
                return kept
    return min(size, max(2, round(size * ratio)))


def evenly_strided(size: int, count: int, device: torch.device) -> Tensor:
    """Return every (size // count)-th place of ``size``, from the first on: [count] int64."""
    return torch.arange(count, device=device) * max(1, size // count)


def _zipped(visual: VisualTokens, dominant_TS: Tensor, rest_TX: Tensor, target_C: Tensor) -> Iterator[Tensor]:
    """Yield the kept tokens [K,D] of each frame, contextual ones merged, in float32 (float64 of float64)."""
    frames = zip(visual.tokens, visual.evidence["token_key"], dominant_TS, rest_TX, strict=True)
    for stored_ND, key_NE, dominant_S, rest_X in frames:
        tokens_ND = stored_ND.to(work_dtype(stored_ND))
        contextual_CD = add_nearest(tokens_ND[rest_X], unit(key_NE[rest_X]), target_C)
        yield torch.cat([tokens_ND[dominant_S], contextual_CD])


def add_nearest(tokens_XD: Tensor, key_XE: Tensor, target_C: Tensor) -> Tensor:
    """Add to each target the mean of the other tokens that are nearest to it, by cosine of unit keys: [C,D]."""
    other_X = torch.ones(len(tokens_XD), dtype=torch.bool, device=tokens_XD.device)
    other_X[target_C] = False
    nearest_Y = (key_XE[other_X] @ key_XE[target_C].T).argmax(dim=1)
    # The official code adds the mean instead of averaging it in, so a merged token is longer than its parts.
    mean_CD, _ = assigned_mean(nearest_Y, tokens_XD[other_X], len(target_C))
    return tokens_XD[target_C] + mean_CD


def zip_frame(tokens_ND: Tensor, n_dominant: int, n_contextual: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """Return the places [K] that one frame keeps by variant qwen, the dominant ones first, and their tokens [K,D]."""
    rows_ND = working_copy(tokens_ND.double())
    ranked_N = largest(torch.linalg.vector_norm(rows_ND, dim=1), len(rows_ND))
    dominant_S, rest_X = ranked_N[:n_dominant], ranked_N[n_dominant:].sort().values
    if n_contextual in (0, len(rest_X)):  # nothing to merge
        place_K = torch.cat([dominant_S, rest_X[:n_contextual]])
        return place_K, tokens_ND[place_K]
    direction_XD = unit(rows_ND[rest_X])
    anchor_C = densest(direction_XD, n_contextual, neighbours)
    contextual_CD = mean_of_nearest(tokens_ND[rest_X].double(), direction_XD, anchor_C).to(tokens_ND.dtype)
    return torch.cat([dominant_S, rest_X[anchor_C]]), torch.cat([tokens_ND[dominant_S], contextual_CD])


def densest(direction_XD: Tensor, count: int, neighbours: int) -> Tensor:
    """Return the unit vectors of highest mean cosine to their nearest others, [count] int64, ascending.

    There are two vectors or more.
    """
    density = []
    for rows in row_slices(direction_XD):
        cosine_RX = direction_XD[rows] @ direction_XD.T
        # The largest cosine is that with the token itself, or with an equal one.
        density.append(cosine_RX.topk(min(neighbours + 1, len(direction_XD))).values[:, 1:].mean(dim=1))
    return largest(torch.cat(density).round(decimals=_DIGITS), count).sort().values


def mean_of_nearest(tokens_XD: Tensor, direction_XD: Tensor, anchor_C: Tensor) -> Tensor:
    """Compute for each anchor the mean of the tokens that are nearest to it, by cosine of directions: [C,D].

    An anchor that none is nearest to, itself neither, stays as it is.
    """
    cosine_XC = direction_XD @ direction_XD[anchor_C].T
    mean_CD, count_C = assigned_mean(cosine_XC.round(decimals=_DIGITS).argmax(dim=1), tokens_XD, len(anchor_C))
    return torch.where(count_C[:, None] > 0, mean_CD, tokens_XD[anchor_C])
