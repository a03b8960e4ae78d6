"""Tools of the methods that merge: the segments of a video, density peaks among tokens and the groups around them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gstep.density import work_dtype
from gstep.pruners.vectors import unit
from gstep.selection.reference import largest
from gstep.types import VisualTokens


def adjacent_cosines(feature_TV: Tensor) -> list[float]:
    """Compute the cosine of each frame's feature with the next one's, T-1 of them."""
    direction_TV = unit(feature_TV)
    cosines: list[float] = (direction_TV[:-1] * direction_TV[1:]).sum(dim=1).tolist()
    return cosines


def cut(similarity: Sequence[float], least: int, threshold: float) -> Iterator[tuple[int, int]]:
    """Cut len(similarity) + 1 frames into segments [start, end): at least ``least``, if there are as many frames.

    Frames are cut apart at the lowest ``least - 1`` similarities (the earlier first) and below ``threshold``.
    """
    lowest = sorted(range(len(similarity)), key=similarity.__getitem__)[: least - 1]
    cuts = {i for i, value in enumerate(similarity) if value < threshold}.union(lowest)
    start = 0
    for end in [*sorted(i + 1 for i in cuts), len(similarity) + 1]:
        yield start, end
        start = end


def tie_noise(visual: VisualTokens, seed: int) -> Tensor:
    """Return the evidence ``noise`` [T*N], or else draw it in [0, 1), in the tokens' work dtype."""
    noise_M = visual.evidence.get("noise")
    if noise_M is None:
        n_frames, per_frame, _ = visual.tokens.shape
        noise_M = torch.from_numpy(np.random.default_rng(seed).random(n_frames * per_frame))
    return noise_M.to(visual.tokens.device, work_dtype(visual.tokens))


def distances(tokens_XD: Tensor) -> Tensor:
    """Compute the distance of each token to each, divided by sqrt(D), [X,X]."""
    # Without the matrix product, whose cancellation would make up small distances between equal tokens.
    distance_XX = torch.cdist(tokens_XD, tokens_XD, compute_mode="donot_use_mm_for_euclid_dist")
    return distance_XX / math.sqrt(tokens_XD.shape[1])


def density_peaks(distance_XX: Tensor, noise_X: Tensor, neighbours: int) -> Tensor:
    """Score each token's centrality: its density times the distance to the nearest denser token, [X].

    A token's density is made by the distances to its nearest ``neighbours`` tokens, itself included.
    """
    nearest_XK = distance_XX.topk(min(neighbours, len(distance_XX)), largest=False).values
    # The noise breaks ties: of tokens of equal density none would count as denser.
    density_X = torch.exp(-nearest_XK.square().mean(dim=1)) + 1e-6 * noise_X
    denser_XX = density_X[None, :] > density_X[:, None]
    # The densest token has no denser one: it gets the largest distance of all.
    return density_X * torch.where(denser_XX, distance_XX, distance_XX.max()).amin(dim=1)


def group_by_peaks(rows_XD: Tensor, noise_X: Tensor, count: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """Group rows around the ``count`` density peaks: the peaks' places [C], ascending, and each row's nearest peak [X].

    A peak's nearest is itself.
    """
    distance_XX = distances(rows_XD)
    peak_C = largest(density_peaks(distance_XX, noise_X, neighbours), count).sort().values
    nearest_X = distance_XX[:, peak_C].argmin(dim=1)
    return peak_C, nearest_X.index_copy(0, peak_C, torch.arange(count, device=peak_C.device))
