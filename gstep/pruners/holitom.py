"""HoliTom: average static positions over windows of frames, then prune and merge within frames.

Shapes: S static positions of a window, X moving positions (not static), C density peaks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from gstep.density import scale_to_work_dtype
from gstep.evidence import LAST_LAYER
from gstep.pruners.base import Selection
from gstep.pruners.checks import check_integer, check_number
from gstep.pruners.segments import group_by_peaks, make_tie_noise
from gstep.pruners.sinks import SinkPruner, compute_sink_scores
from gstep.pruners.vectors import compute_group_means, normalize_rows
from gstep.selection.reference import find_largest
from gstep.types import VisualTokens


@dataclass(frozen=True, kw_only=True)
class HoliTom(SinkPruner):
    """The stages of HoliTom before the language model, for LLaVA; its merging inside the model is not implemented.

    Source: github.com/cokeshao/HoliTom, holitom/llava_arch.py at e9b2972.

    Windows of frames are chosen to save the most tokens (``choose_windows``). Each static position of a window becomes
    one token, the mean over the window's frames, at its position in the first frame. The remaining ratio is r' = min(1,
    r / (share of tokens that remain)). round(S*r') density peaks of the S static tokens are kept. Each frame keeps
    ceil(X*r') of its X moving tokens: the share 1-D of them by attention, the others as density peaks. Tokens that are
    not kept are merged into the nearest peak, or dropped without peaks (moving tokens with D = 0). The total is near B.
    A window that is completely static keeps at least one token (the official code may keep no token of a video).

    With ``mu_s``, sinks are ranked lower among the moving tokens and among the peaks of static tokens. With ``mu_t``,
    sinks are more easily static; as in the code of SToP, windows and r' are chosen without ``mu_t``, so that fewer than
    B tokens remain. That code compares with 0.8 whatever ``tau`` is, and ranks sinks lower among the static peaks even
    if ``mu_s`` is 0; here ``tau`` is used, and 0 changes nothing.

    Attributes:
        mu_t: The weight of a position's sink score, which is added to its similarity, >= 0.
        tau: A position is static between neighboring frames if its tokens' cosine is higher.
        D: The share of a frame's kept tokens that are density peaks, in [0, 1]; 0 as published.
        beta: The weight of a peak against the mean of the tokens merged into it, in [0, 1].
        K: The number of nearest tokens that determine a token's density, itself included; at most the number of peaks.
        max_window: The maximum number of frames of a window.
    """

    name: ClassVar[str] = "holitom"
    nested: ClassVar[bool] = False
    merges: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    optional: ClassVar[frozenset[str]] = frozenset({"noise"})
    needs: ClassVar[frozenset[str]] = frozenset({"token_attention"})
    sources: ClassVar[Mapping[str, str]] = MappingProxyType({"token_attention": LAST_LAYER})

    mu_t: float = 0.0
    tau: float = 0.8
    D: float = 0.0
    beta: float = 0.6
    K: int = 7
    max_window: int = 1024

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid parameter, and convert numbers to floats or ints."""
        super().__post_init__()
        shares = {"D": self.D, "beta": self.beta}
        self._set(
            mu_t=check_number("mu_t", self.mu_t, "at least 0", lambda x: x >= 0),
            tau=check_number("tau", self.tau, "in [-1, 1]", lambda x: abs(x) <= 1),
            K=check_integer("K", self.K, 1),
            max_window=check_integer("max_window", self.max_window, 1),
            **{name: check_number(name, value, "in [0, 1]", lambda x: 0 <= x <= 1) for name, value in shares.items()},
        )

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        budget = super().at_most(n_frames, per_frame, hidden, retention_ratio)
        return min(n_frames * per_frame, budget + 2 * n_frames)  # each frame and each window may round up

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        """Average static tokens over windows, then select and merge the share ``ratio``; ``budget`` is not used.

        Each window returns, frame by frame, the moving tokens of highest attention, unchanged, and density peaks; then
        the peaks of the static means, at the window's first frame. ``merged`` marks means, and peaks that other tokens
        were merged into. ``seed`` breaks ties between density peaks without the evidence ``noise``.
        """
        n_frames, per_frame, _ = visual.tokens.shape
        tokens_TND = visual.tokens.to(scale_to_work_dtype(visual.tokens[:1]).dtype)
        direction_TND = normalize_rows(tokens_TND)
        similarity_UN = (direction_TND[:-1] * direction_TND[1:]).sum(dim=-1)
        is_still_UN = similarity_UN > self.tau
        windows, n_saved = choose_windows(is_still_UN, self.max_window)
        attention_TN = visual.evidence["token_attention"]
        score_TN, penalty_N = self._suppress_sinks(attention_TN), self._compute_peak_penalty(attention_TN)
        if self.mu_t:
            is_still_UN = similarity_UN + self.mu_t * compute_sink_scores(attention_TN) > self.tau
        total = n_frames * per_frame
        share = min(1.0, ratio / ((total - n_saved) / total))
        noise = make_tie_noise(visual, seed)
        n_drawn = 0
        index, tokens, merged = [], [], []

        def add(
            index_X: Tensor,
            rows_XD: Tensor,
            kept_S: Tensor,
            n_peaks: int,
            *,
            is_mean: bool,
            penalty_X: Tensor | None = None,
        ) -> None:
            """Append the rows ``kept_S`` to the result, and ``n_peaks`` density peaks with all other rows merged in.

            If there are peaks, the next values of ``noise``, one per other row, are consumed. Otherwise the other rows
            are dropped.

            Args:
                index_X: The flat index of each row.
                is_mean: True if the rows are means over frames, which are all marked as merged.
                penalty_X: Subtracted from the scores of peaks.
            """
            nonlocal n_drawn
            is_free_X = torch.ones(len(index_X), dtype=torch.bool, device=index_X.device)
            is_free_X[kept_S] = False
            other_Y = is_free_X.nonzero().squeeze(1)
            index.append(index_X[kept_S])
            tokens.append(rows_XD[kept_S])
            merged.append(torch.full_like(kept_S, is_mean, dtype=torch.bool))
            if n_peaks:
                peak_C, peak_CD, is_grown_C = merge_into_peaks(
                    rows_XD[other_Y],
                    noise[n_drawn : n_drawn + len(other_Y)],
                    n_peaks,
                    min(self.K, n_peaks),
                    self.beta,
                    penalty_X=None if penalty_X is None else penalty_X[other_Y],
                )
                n_drawn += len(other_Y)
                index.append(index_X[other_Y[peak_C]])
                tokens.append(peak_CD)
                merged.append(is_grown_C | is_mean)

        for start, end in windows:
            static_N = is_still_UN[start : end - 1].all(dim=0) & (end - start > 1)
            moving_X, static_S = (~static_N).nonzero().squeeze(1), static_N.nonzero().squeeze(1)
            n_kept = math.ceil(len(moving_X) * share)
            n_dominant = round(n_kept * (1 - self.D))
            for frame in range(start, end):
                dominant_S = find_largest(score_TN[frame, moving_X], n_dominant).sort().values
                rows_XD = tokens_TND[frame, moving_X]
                add(moving_X + frame * per_frame, rows_XD, dominant_S, n_kept - n_dominant, is_mean=False)
            n_static = max(round(len(static_S) * share), 0 if len(moving_X) else 1)
            mean_SD = tokens_TND[start:end, static_S].mean(dim=0)
            penalty_S = None if penalty_N is None else penalty_N[static_S]
            add(static_S + start * per_frame, mean_SD, static_S[:0], n_static, is_mean=True, penalty_X=penalty_S)
        return Selection(torch.cat(index), tokens=torch.cat(tokens), merged=torch.cat(merged))


def choose_windows(is_still_UN: Tensor, max_window: int) -> tuple[list[tuple[int, int]], int]:
    """Choose windows of frames that cover the video and save the most tokens.

    A window of W frames saves W - 1 tokens for each position that is static in it. Ties go to the shorter last window.

    Args:
        is_still_UN: [T-1,N] bool, True if the position is static between the two neighboring frames.
        max_window: The maximum of W.

    Returns:
        The windows as [start, end), in order, and the number of tokens saved.
    """
    # run_TN[t][n]: the number of successive pairs of frames up to frame t in which position n is static
    run_TN = [torch.zeros(is_still_UN.shape[1], dtype=torch.int64, device="cpu")]
    for is_still_N in is_still_UN.cpu():
        run_TN.append(torch.where(is_still_N, run_TN[-1] + 1, 0))
    saved_before = [0]  # saved_before[t]: the maximum number of tokens saved in the frames before t
    starts = []
    for last, run_N in enumerate(run_TN):
        saved_before.append(saved_before[last])
        starts.append(last)
        # n_still[p]: the number of positions that are static for p pairs or more
        n_still = run_N.bincount(minlength=last + 1).flip(0).cumsum(0).flip(0).tolist()
        for pairs in range(1, min(last + 1, max_window)):
            value = saved_before[last - pairs] + n_still[pairs] * pairs
            if value > saved_before[-1]:
                saved_before[-1], starts[-1] = value, last - pairs
    return list(_iter_windows_backward(starts))[::-1], saved_before[-1]


def _iter_windows_backward(starts: list[int]) -> Iterator[tuple[int, int]]:
    """Yield windows [start, end), the last first, from the start of the window that would end with each frame."""
    end = len(starts)
    while end > 0:
        yield starts[end - 1], end
        end = starts[end - 1]


def merge_into_peaks(
    rows_XD: Tensor, noise_X: Tensor, count: int, neighbours: int, beta: float, *, penalty_X: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge each row into the nearest of the ``count`` highest density peaks (``group_by_peaks``).

    A peak weighs ``beta``, and the mean of the rows merged into it 1 - ``beta``. Peaks without such rows are unchanged.

    Returns:
        The peaks' row numbers [C], ascending, their rows after merging [C,D], and [C] bool, True if any row was merged
        in.
    """
    peak_C, group_X = group_by_peaks(rows_XD, noise_X, count, neighbours, penalty_X=penalty_X)
    mean_CD, count_C = compute_group_means(group_X.index_fill(0, peak_C, -1), rows_XD, count)
    is_grown_C = count_C > 0
    peak_CD = rows_XD[peak_C]
    return peak_C, torch.where(is_grown_C[:, None], beta * peak_CD + (1 - beta) * mean_CD, peak_CD), is_grown_C
