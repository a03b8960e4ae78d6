"""Tango: diverse tokens of high attention, and merged context, by distances that depend on position and time.

Shapes: L frames of one segment, X static or moving positions of it, C centers, Y tokens in one clustering.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from gstep.density import scale_to_work_dtype
from gstep.evidence import MERGED_QUERIES, POOLING_HEAD
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.checks import check_choice, check_integer, check_number
from gstep.pruners.holitom import choose_windows
from gstep.pruners.segments import make_tie_noise
from gstep.pruners.vectors import compute_group_means, normalize_rows
from gstep.selection.reference import find_largest
from gstep.types import VisualTokens

VARIANTS = ("llava", "qwen")
_SOURCES: Mapping[str, Mapping[str, str]] = {
    "llava": MappingProxyType({"token_attention": POOLING_HEAD}),
    "qwen": MappingProxyType({"token_attention": MERGED_QUERIES}),
}
_STATIC = 0.8  # the official code uses ``tau`` only to choose segments
_TIME_BASE = 10_000.0  # base of the angles of seconds
_SPACE_BASE = 1_000.0  # base of the angles of rows and columns
_SINKS = (11, 12, 27, 28, 41, 169)  # positions among the 196 of a frame of LLaVA-OneVision
_BLOCK = 2**25  # distances in memory at a time: 128 MB


@dataclass(frozen=True, kw_only=True)
class Tango(Pruner):
    """The stage of Tango before the language model (arXiv 2604.09547); its pruning inside the model is not implemented.

    Source: github.com/xjtupanda/Tango at cc815b6, tango/pruner.py, tango/utils.py and st_rope.py.

    Distances are between directions that are rotated by their second, row and column (``rotate_directions``). Segments
    of frames are the windows of HoliTom (``choose_windows``). In a segment of several frames, a position is static if
    all neighboring frames are more similar than 0.8 there; its tokens become their mean, at the first frame. The
    segment's remaining ratio is r' = min(1, r / (share of tokens that remain)). ceil(X*r') tokens are kept of the X
    static positions, and by the same rule of the X moving positions of each frame; the share ``context`` of them is
    context, the others are salient. Salient tokens: among the tokens of highest attention, ``alpha`` per salient token,
    density peaks are centers, and each center's group keeps its token of highest attention. Context: the other static
    tokens, and the other moving tokens of all frames, are each merged into density peaks among themselves, or dropped
    if no context is kept. The total is near B.

    Differences from the official code: it stores merged tokens in the order of density, at each other's index; here
    each has its own. If centers are equal, it may keep a token twice; here a center is in its own group. In variant
    llava with 196 tokens per frame, the positions that are sinks of LLaVA-OneVision have attention 0; for other sizes
    no sinks are known. Its other choice of segments (the cuts of FastVID) is not implemented.

    Attributes:
        variant: The attention of LLaVA ("llava": SigLIP's pooling head) or of Qwen ("qwen": merged queries).
        tau: The similarity by which segments are chosen; None means 0.65 for ratios up to 10 %, otherwise 0.8.
        context: The share of kept tokens that are context, in [0, 1].
        alpha: The number of candidates per salient token, >= 1.
        beta: The minimum weight of a center against the mean of its group, in [0, 1].
        k: The number of nearest other tokens that determine a token's density.
    """

    name: ClassVar[str] = "tango"
    nested: ClassVar[bool] = False
    merges: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    optional: ClassVar[frozenset[str]] = frozenset({"noise"})
    family_parameter: ClassVar[str | None] = "variant"
    needs: ClassVar[frozenset[str]] = frozenset({"token_attention"})

    variant: str = "llava"
    tau: float | None = None
    context: float = 0.4
    alpha: float = 1.5
    beta: float = 0.6
    k: int = 7

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid parameter, and convert numbers to floats or ints; ``tau`` None stays None."""
        check_choice("variant", self.variant, VARIANTS)
        shares = {"context": self.context, "beta": self.beta}
        if self.tau is not None:
            self._set(tau=check_number("tau", self.tau, "in [-1, 1]", lambda x: abs(x) <= 1))
        self._set(
            alpha=check_number("alpha", self.alpha, "at least 1", lambda x: x >= 1),
            k=check_integer("k", self.k, 1),
            **{name: check_number(name, value, "in [0, 1]", lambda x: 0 <= x <= 1) for name, value in shares.items()},
        )

    @property
    def sources(self) -> Mapping[str, str]:
        return _SOURCES[self.variant]

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        budget = super().at_most(n_frames, per_frame, hidden, retention_ratio)
        return min(n_frames * per_frame, budget + 2 * n_frames)  # each frame and each segment may round up

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        """Select and merge the share ``ratio`` of the tokens, segment by segment; ``budget`` is not used.

        Each segment returns its static positions, as means at the first frame, then the moving positions of all frames,
        each reduced to salient tokens and merged context. ``merged`` marks each kept token that differs from its input.
        ``seed`` breaks ties between density peaks without the evidence ``noise``.
        """
        n_frames, per_frame, _ = visual.tokens.shape
        direction_TND = normalize_rows(scale_to_work_dtype(visual.tokens))
        rotated_TND = rotate_directions(direction_TND, visual.known_times, visual.known_grid[1])
        attention_TN = visual.evidence["token_attention"]
        if self.variant == "llava" and per_frame == 196:
            attention_TN = attention_TN.index_fill(1, torch.tensor(_SINKS, device=attention_TN.device), 0.0)
        similarity_UN = (direction_TND[:-1] * direction_TND[1:]).sum(dim=-1)
        del direction_TND
        tau = (0.65 if ratio <= 0.1 + 1e-9 else 0.8) if self.tau is None else self.tau
        noise = _NoiseStream(make_tie_noise(visual, seed))
        index_TN = torch.arange(n_frames * per_frame, device=visual.tokens.device).view(n_frames, per_frame)
        index, tokens = [], []
        for start, end in choose_windows(similarity_UN > tau, n_frames)[0]:
            length = end - start
            is_static_N = (similarity_UN[start : end - 1] > _STATIC).all(dim=0) & (length > 1)
            n_static = int(is_static_N.sum())
            share = min(1.0, ratio / ((length * per_frame - (length - 1) * n_static) / (length * per_frame)))
            rows_LND = visual.tokens[start:end].to(rotated_TND.dtype)
            for is_part_N, is_mean in ((is_static_N, True), (~is_static_N, False)):
                part_X = is_part_N.nonzero().squeeze(1)
                rows_LXD, score_LX = rows_LND[:, part_X], attention_TN[start:end, part_X]
                if is_mean:
                    rows_LXD, score_LX = rows_LXD.mean(dim=0, keepdim=True), score_LX.mean(dim=0, keepdim=True)
                frames = slice(start, start + len(rows_LXD))
                kept_Y, tokens_YD = self._reduce_tokens(rows_LXD, rotated_TND[frames, part_X], score_LX, share, noise)
                index.append(index_TN[frames, part_X].flatten()[kept_Y])
                tokens.append(tokens_YD)
        index_B, tokens_BD = torch.cat(index), torch.cat(tokens)
        is_merged_B = (tokens_BD != visual.tokens.flatten(0, 1)[index_B]).any(dim=1)
        return Selection(index_B, tokens=tokens_BD, merged=is_merged_B)

    def _reduce_tokens(
        self, rows_LXD: Tensor, rotated_LXD: Tensor, score_LX: Tensor, share: float, noise: _NoiseStream
    ) -> tuple[Tensor, Tensor]:
        """Select salient tokens of each frame, and merge the remaining tokens of all frames into context.

        If the context takes all remaining tokens, they stay unchanged; if it takes none, they are dropped.

        Args:
            rotated_LXD: The rotated directions of the tokens ``rows_LXD``.
            score_LX: Their attention.
            share: The share of each frame to keep, rounded up: 1 - ``context`` of it, rounded down, are salient tokens.
            noise: Consumed by each grouping, one number per row that it groups.

        Returns:
            The numbers [Y] of the kept rows among L*X, salient rows first, and their tokens [Y,D].
        """
        length, size, hidden = rows_LXD.shape
        n_kept = math.ceil(size * share)
        n_salient = int(n_kept * (1 - self.context))
        n_context = (n_kept - n_salient) * length
        candidate_LY = find_largest(score_LX, min(int(self.alpha * n_salient), size))
        salient = [
            self._choose_salient_tokens(rotated_LXD[frame, candidate_Y], n_salient, candidate_Y, noise) + frame * size
            for frame, candidate_Y in enumerate(candidate_LY)
        ]
        salient_Y = torch.cat(salient)
        rows_YD, rotated_YD = rows_LXD.reshape(-1, hidden), rotated_LXD.reshape(-1, hidden)
        is_rest_Y = torch.ones(len(rows_YD), dtype=torch.bool, device=rows_YD.device).index_fill(0, salient_Y, False)
        rest_Y = is_rest_Y.nonzero().squeeze(1)
        context_Y, context_YD = rest_Y[:n_context], rows_YD[rest_Y[:n_context]]
        if 0 < n_context < len(rest_Y):
            center_C, group_Y = find_groups(rotated_YD[rest_Y], noise.draw(len(rest_Y)), n_context, self.k)
            context_Y = rest_Y[center_C]
            mean_CD, count_C = compute_group_means(group_Y, rows_YD[rest_Y], n_context)
            weight_C1 = count_C.to(mean_CD.dtype).reciprocal().clamp(min=self.beta)[:, None]
            center_CD = rows_YD[context_Y]
            merged_CD = center_CD + (1 - weight_C1) * (mean_CD - center_CD)
            context_YD = torch.where(count_C[:, None] > 1, merged_CD, center_CD)
        return torch.cat([salient_Y, context_Y]), torch.cat([rows_YD[salient_Y], context_YD])

    def _choose_salient_tokens(
        self, rotated_YD: Tensor, count: int, candidate_Y: Tensor, noise: _NoiseStream
    ) -> Tensor:
        """Choose ``count`` candidates: of each group around a density peak, the candidate of highest attention.

        ``candidate_Y`` has the candidates in descending attention, and is returned if it has at most ``count``.
        """
        if len(candidate_Y) <= count:
            return candidate_Y
        _, group_Y = find_groups(rotated_YD, noise.draw(len(candidate_Y)), count, self.k)
        is_member_CY = group_Y == torch.arange(count, device=group_Y.device)[:, None]
        return candidate_Y[is_member_CY.int().argmax(dim=1)]


class _NoiseStream:
    """A stream of numbers in [0, 1), which starts again when it is used up."""

    def __init__(self, noise_M: Tensor) -> None:
        self._noise_M = noise_M.double()
        self._n_drawn = 0

    def draw(self, count: int) -> Tensor:
        """Return the next ``count`` numbers."""
        place = torch.arange(self._n_drawn, self._n_drawn + count, device=self._noise_M.device) % len(self._noise_M)
        self._n_drawn += count
        return self._noise_M[place]


def rotate_directions(direction_TND: Tensor, times: Sequence[float], columns: int) -> Tensor:
    """Return a copy of directions rotated by their position and time (ST-RoPE), so that distances grow with both.

    The channels form three sections: the last two, of 2*floor(D/6) channels each, are rotated by row and column, the
    first by seconds. Channel i of a section of d is rotated together with channel i + d/2, by the angle position *
    base^(-2i/d), with base 10,000 for seconds and 1,000 otherwise. If the first section has an odd number of channels,
    its last channel stays.

    Args:
        times: The second of each frame.
        columns: The columns of a frame's grid, in row-major order.
    """
    n_tokens, hidden = direction_TND.shape[1:]
    device = direction_TND.device
    place_N = torch.arange(n_tokens, device=device)
    second_T1 = torch.tensor(times, dtype=torch.float64, device=device)[:, None]
    side = 2 * (hidden // 6)
    first = hidden - 2 * side
    rotated_TND = direction_TND.clone()
    sections = [
        (0, first - first % 2, second_T1, _TIME_BASE),
        (first, side, (place_N // columns)[None], _SPACE_BASE),
        (first + side, side, (place_N % columns)[None], _SPACE_BASE),
    ]
    for start, width, position, base in sections:
        half = width // 2
        frequency_H = base ** -(torch.arange(half, dtype=torch.float64, device=device) / max(1, half))
        angle = position[..., None] * frequency_H
        cos, sin = angle.cos().to(direction_TND.dtype), angle.sin().to(direction_TND.dtype)
        left, right = direction_TND[..., start : start + half], direction_TND[..., start + half : start + width]
        rotated_TND[..., start : start + half] = left * cos - right * sin
        rotated_TND[..., start + half : start + width] = right * cos + left * sin
    return rotated_TND


def find_groups(rows_YD: Tensor, noise_Y: Tensor, count: int, neighbors: int) -> tuple[Tensor, Tensor]:
    """Group rows around the ``count`` highest density peaks, by Euclidean distance, in blocks that limit memory.

    A row's density depends on its nearest ``neighbors`` other rows. Its score is the density times the distance to the
    nearest denser row (the largest of all distances for the densest).

    Args:
        noise_Y: Noise in [0, 1), added to the density times 1e-6 to break ties.

    Returns:
        The centers' row numbers [C], ascending, and the position in these of each row's nearest center, [Y]. A center
        is always in its own group.
    """
    size = len(rows_YD)
    step = max(1, _BLOCK // len(rows_YD))
    square_Y = rows_YD.square().sum(dim=1)
    blocks = [slice(start, start + step) for start in range(0, size, step)]

    def measure(rows: slice) -> Tensor:
        square = square_Y[rows, None] + square_Y - 2 * (rows_YD[rows] @ rows_YD.T)
        distance = square.clamp_(min=0).sqrt_()
        distance.diagonal(rows.start).fill_(0)
        return distance

    whole = [measure(rows) for rows in blocks] if len(blocks) == 1 else None
    density, furthest = [], []
    for rows in blocks:
        distance = whole[0] if whole else measure(rows)
        nearest = distance.topk(min(neighbors + 1, size), dim=1, largest=False).values[:, 1:]
        density.append(torch.exp(-nearest.double().square().mean(dim=1)))
        furthest.append(distance.max())
    density_Y = torch.cat(density) + 1e-6 * noise_Y
    limit = torch.stack(furthest).max()
    score = []
    for rows in blocks:
        distance = whole[0] if whole else measure(rows)
        is_denser = density_Y > density_Y[rows, None]
        score.append(density_Y[rows] * torch.where(is_denser, distance, limit).amin(dim=1))
    center_C = find_largest(torch.cat(score), count).sort().values
    group = [(whole[0] if whole else measure(rows))[:, center_C].argmin(dim=1) for rows in blocks]
    return center_C, torch.cat(group).index_copy(0, center_C, torch.arange(count, device=center_C.device))
