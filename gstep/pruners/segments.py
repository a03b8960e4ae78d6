"""The segments of a video, density peaks among tokens, and groups around them, for methods that merge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gstep.density import get_work_dtype
from gstep.pruners.vectors import normalize_rows
from gstep.selection.reference import find_largest
from gstep.types import VisualTokens


def compute_adjacent_cosines(feature_TV: Tensor) -> list[float]:
    """Compute the cosine of each frame's feature with the next frame's: T-1 numbers, none for a single frame."""
    direction_TV = normalize_rows(feature_TV)
    cosines: list[float] = (direction_TV[:-1] * direction_TV[1:]).sum(dim=1).tolist()
    return cosines


def cut_segments(similarity: Sequence[float], min_segments: int, threshold: float) -> Iterator[tuple[int, int]]:
    """Cut T = len(similarity) + 1 frames into segments, and yield each as [start, end), in order.

    Cuts are made at the ``min_segments - 1`` lowest similarities, of equal ones first at the earlier, and at all
    similarities below ``threshold``. If T is at most ``min_segments``, every frame is a segment.
    """
    lowest = sorted(range(len(similarity)), key=similarity.__getitem__)[: min_segments - 1]
    boundaries = {i for i, value in enumerate(similarity) if value < threshold}.union(lowest)
    start = 0
    for end in [*sorted(i + 1 for i in boundaries), len(similarity) + 1]:
        yield start, end
        start = end


def make_tie_noise(visual: VisualTokens, seed: int) -> Tensor:
    """Return noise [T*N] that breaks ties, in the tokens' work dtype and on their device.

    It is the evidence ``noise``, or random numbers in [0, 1) from ``seed``, the same on every device.
    """
    noise_M = visual.evidence.get("noise")
    if noise_M is None:
        n_frames, per_frame, _ = visual.tokens.shape
        noise_M = torch.from_numpy(np.random.default_rng(seed).random(n_frames * per_frame))
    return noise_M.to(visual.tokens.device, get_work_dtype(visual.tokens))


def compute_scaled_distances(tokens_XD: Tensor) -> Tensor:
    """Compute the Euclidean distances of all pairs of tokens, divided by sqrt(D), [X,X]."""
    # Without a matrix product, whose cancellation would give equal tokens small distances instead of 0.
    distance_XX = torch.cdist(tokens_XD, tokens_XD, compute_mode="donot_use_mm_for_euclid_dist")
    return distance_XX / math.sqrt(tokens_XD.shape[1])


def score_density_peaks(distance_XX: Tensor, noise_X: Tensor, neighbours: int) -> Tensor:
    """Score each token's centrality, [X]: its density times the distance to the nearest denser token.

    The density is exp(-d) + 1e-6 * ``noise_X``, where d is the mean squared distance to the nearest ``neighbours``
    tokens, itself included. The densest token gets the largest of all distances.
    """
    nearest_XK = distance_XX.topk(min(neighbours, len(distance_XX)), largest=False).values
    # The noise breaks ties, because the densest of equal tokens would all have no denser token.
    density_X = torch.exp(-nearest_XK.square().mean(dim=1)) + 1e-6 * noise_X
    denser_XX = density_X[None, :] > density_X[:, None]
    return density_X * torch.where(denser_XX, distance_XX, distance_XX.max()).amin(dim=1)


def group_by_peaks(
    rows_XD: Tensor, noise_X: Tensor, count: int, neighbours: int, *, penalty_X: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Group rows around the ``count`` highest density peaks, each row with its nearest peak.

    A row's density depends on its ``neighbours`` nearest rows, itself included; ``noise_X`` breaks ties. ``penalty_X``
    is subtracted from the rows' scores as peaks.

    Returns:
        The peaks' row numbers [C], ascending, and each row's group [X], a position among these. A peak is always in its
        own group.
    """
    distance_XX = compute_scaled_distances(rows_XD)
    score_X = score_density_peaks(distance_XX, noise_X, neighbours)
    peak_C = find_largest(score_X if penalty_X is None else score_X - penalty_X, count).sort().values
    nearest_X = distance_XX[:, peak_C].argmin(dim=1)
    return peak_C, nearest_X.index_copy(0, peak_C, torch.arange(count, device=peak_C.device))
