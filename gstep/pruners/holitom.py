"""HoliTom: average what stands still over windows of frames, then prune and merge within frames.

Shapes: W frames of one window, S static places of it, X places of a frame that are not static, C centres.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from gstep.density import working_copy
from gstep.evidence import LAST_LAYER
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.checks import check_integer, check_number
from gstep.pruners.segments import group_by_peaks, tie_noise
from gstep.pruners.vectors import assigned_mean, unit
from gstep.selection.reference import largest
from gstep.types import VisualTokens


@dataclass(frozen=True, kw_only=True)
class HoliTom(Pruner):
    """The outer stages of HoliTom, for LLaVA; its merging inside of the language model is not here.

    Source: github.com/cokeshao/HoliTom, holitom/llava_arch.py at e9b2972.

    Windows of frames are chosen so that most tokens are saved (``choose_windows``). A window's static places become one
    token each, the mean over its frames, at the place in its first frame. The rest of the budget is a ratio
    r' = min(1, r / (share of tokens that are left)). Of the static tokens round(S*r') density peaks are kept, of each
    frame's X others ceil(X*r'): round((1-D) of them) by attention, the rest density peaks. What is not kept is merged
    into the nearest peak. The count is near B. Where all of a window is static it keeps one token at least (the
    official code may keep none of a video).

    Attributes:
        tau: a place stands still between neighbour frames that are more similar than this there.
        D: the share of a frame's kept tokens that are density peaks, in [0, 1]; 0 as published.
        beta: the weight of a peak against the mean of what is merged into it, in [0, 1].
        K: how many nearest tokens make a token's density, itself included.
        max_window: the most frames of a window.
    """

    name: ClassVar[str] = "holitom"
    nested: ClassVar[bool] = False
    merges: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    optional: ClassVar[frozenset[str]] = frozenset({"noise"})
    needs: ClassVar[frozenset[str]] = frozenset({"token_attention"})
    sources: ClassVar[Mapping[str, str]] = MappingProxyType({"token_attention": LAST_LAYER})

    tau: float = 0.8
    D: float = 0.0
    beta: float = 0.6
    K: int = 7
    max_window: int = 1024

    def __post_init__(self) -> None:
        shares = {"D": self.D, "beta": self.beta}
        self._set(
            tau=check_number("tau", self.tau, "in [-1, 1]", lambda x: abs(x) <= 1),
            K=check_integer("K", self.K, 1),
            max_window=check_integer("max_window", self.max_window, 1),
            **{name: check_number(name, value, "in [0, 1]", lambda x: 0 <= x <= 1) for name, value in shares.items()},
        )

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        budget = super().at_most(n_frames, per_frame, hidden, retention_ratio)
        return min(n_frames * per_frame, budget + 2 * n_frames)  # each frame and each window may round up

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        n_frames, per_frame, _ = visual.tokens.shape
        tokens_TND = visual.tokens.to(working_copy(visual.tokens[:1]).dtype)
        direction_TND = unit(tokens_TND)
        still_UN = (direction_TND[:-1] * direction_TND[1:]).sum(dim=-1) > self.tau
        windows, saved = choose_windows(still_UN, self.max_window)
        total = n_frames * per_frame
        share = min(1.0, ratio / ((total - saved) / total))
        noise, used = tie_noise(visual, seed), 0
        index, tokens, merged = [], [], []

        def add(place_X: Tensor, rows_XD: Tensor, chosen_S: Tensor, n_peaks: int, *, averaged: bool) -> None:
            """Keep the ``chosen`` of the rows, and peaks into which the other rows are merged."""
            nonlocal used
            free_X = torch.ones(len(place_X), dtype=torch.bool, device=place_X.device)
            free_X[chosen_S] = False
            rest_Y = free_X.nonzero().squeeze(1)
            index.append(place_X[chosen_S])
            tokens.append(rows_XD[chosen_S])
            merged.append(torch.full_like(chosen_S, averaged, dtype=torch.bool))
            if n_peaks:
                peak_C, peak_CD, grown_C = merge_into_peaks(
                    rows_XD[rest_Y], noise[used : used + len(rest_Y)], n_peaks, min(self.K, n_peaks), self.beta
                )
                used += len(rest_Y)
                index.append(place_X[rest_Y[peak_C]])
                tokens.append(peak_CD)
                merged.append(grown_C | averaged)

        for start, end in windows:
            static_N = still_UN[start : end - 1].all(dim=0) & (end - start > 1)
            moving_X, static_S = (~static_N).nonzero().squeeze(1), static_N.nonzero().squeeze(1)
            n_kept = math.ceil(len(moving_X) * share)
            n_dominant = round(n_kept * (1 - self.D))
            for frame in range(start, end):
                dominant_S = largest(visual.evidence["token_attention"][frame, moving_X], n_dominant).sort().values
                rows_XD = tokens_TND[frame, moving_X]
                add(moving_X + frame * per_frame, rows_XD, dominant_S, n_kept - n_dominant, averaged=False)
            n_static = max(round(len(static_S) * share), 0 if len(moving_X) else 1)
            mean_SD = tokens_TND[start:end, static_S].mean(dim=0)
            add(static_S + start * per_frame, mean_SD, static_S[:0], n_static, averaged=True)
        return Selection(torch.cat(index), tokens=torch.cat(tokens), merged=torch.cat(merged))


def choose_windows(still_UN: Tensor, longest: int) -> tuple[list[tuple[int, int]], int]:
    """Choose windows [start, end) that cover T frames, and count the tokens that they save, the most there can be.

    A window of W <= ``longest`` frames saves W - 1 tokens for each place that stands still throughout, by ``still`` of
    the T-1 pairs of neighbours. Of equal choices the shorter last window is taken, a lone frame first.
    """
    # run[t, n]: for how many pairs up to the last before frame t the place has stood still.
    run_TN = [torch.zeros(still_UN.shape[1], dtype=torch.int64, device="cpu")]
    for still_N in still_UN.cpu():
        run_TN.append(torch.where(still_N, run_TN[-1] + 1, 0))
    best, first = [0], []  # best[t]: the tokens saved in the frames before t
    for last, run_N in enumerate(run_TN):
        best.append(best[last])
        first.append(last)
        # counts[p]: the places that have stood still for p pairs or more
        counts = run_N.bincount(minlength=last + 1).flip(0).cumsum(0).flip(0).tolist()
        for pairs in range(1, min(last + 1, longest)):
            value = best[last - pairs] + counts[pairs] * pairs
            if value > best[-1]:
                best[-1], first[-1] = value, last - pairs
    return list(_backwards(first))[::-1], best[-1]


def _backwards(first: list[int]) -> Iterator[tuple[int, int]]:
    """Yield windows [start, end) from the last frame on, given the first frame of a window that ends with a frame."""
    end = len(first)
    while end > 0:
        yield first[end - 1], end
        end = first[end - 1]


def merge_into_peaks(
    rows_XD: Tensor, noise_X: Tensor, count: int, neighbours: int, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge each row into the nearest of the ``count`` density peaks: their places [C], rows [C,D], and which grew [C].

    A peak that none is nearest to stays as it is.
    """
    peak_C, group_X = group_by_peaks(rows_XD, noise_X, count, neighbours)
    mean_CD, count_C = assigned_mean(group_X.index_fill(0, peak_C, -1), rows_XD, count)
    grown_C = count_C > 0
    peak_CD = rows_XD[peak_C]
    return peak_C, torch.where(grown_C[:, None], beta * peak_CD + (1 - beta) * mean_CD, peak_CD), grown_C
