"""Standard errors and tests of scores whose questions are not independent: several may be about the same video.

Formulas: Miller 2024, "Adding Error Bars to Evals" (arXiv 2411.00640), and the cluster-robust sandwich. Shapes: A arms
(a method at a ratio), Q questions, G clusters (videos that are drawn together), P parts (questions that are averaged
before the average over parts is taken: MLVU's tasks).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

OUTSIDE = -1  # the part of a question that a column leaves out
_MAX_FLIPPED = 20  # clusters whose 2^G signs are all tried
_ANGLES = 20_000  # points at which the density of Student's t is summed
TINY = 1e-9  # smaller differences are rounding errors, since scores differ by 1/n or not at all


def part_means(scores_AQ: Floats, part_Q: Ints) -> Floats:
    """Return the mean of each part's questions, [A, P]; nan for a part without questions."""
    member_PQ = part_Q == np.arange(part_Q.max(initial=OUTSIDE) + 1)[:, None]
    with np.errstate(invalid="ignore"):
        means_AP: Floats = scores_AQ @ member_PQ.T.astype(float) / member_PQ.sum(1)
    return means_AP


def weighted(scores_AQ: Floats, part_Q: Ints) -> tuple[Floats, Floats]:
    """Return each question's contribution to the mean over parts and to that mean's error, both [A, Q].

    That is w_i s_i and w_i (s_i - mean of its part) with w_i = 1 / (P n_part); one part is the plain mean, w_i = 1/n.
    Questions OUTSIDE get 0.
    """
    inside_Q = part_Q != OUTSIDE
    part = part_Q[inside_Q]
    n_P = np.bincount(part)
    added_AQ, residual_AQ = np.zeros_like(scores_AQ), np.zeros_like(scores_AQ)
    weight = 1 / (len(n_P) * n_P[part])
    added_AQ[:, inside_Q] = scores_AQ[:, inside_Q] * weight
    residual_AQ[:, inside_Q] = (scores_AQ[:, inside_Q] - part_means(scores_AQ, part_Q)[:, part]) * weight
    return added_AQ, residual_AQ


def cluster_sums(values_AQ: Floats, cluster_Q: Ints, n_clusters: int) -> Floats:
    """Sum the values of each cluster's questions, [G, A]."""
    return np.stack([np.bincount(cluster_Q, row, n_clusters) for row in values_AQ], axis=1)


def few_clusters(cluster_Q: Ints, part_Q: Ints, n_clusters: int) -> tuple[Floats, float]:
    """Return the CR2 factors [G] for cluster sums of weighted residuals, and their degrees of freedom.

    With the factors (CR2; Bell and McCaffrey 2002) that sum estimates the variance without bias where questions are
    independent and alike; the degrees of freedom are Satterthwaite's under the same model. A cluster that holds all
    questions of its parts shows nothing: its factor is 0.
    """
    inside_Q = part_Q != OUTSIDE
    n_parts = int(part_Q.max(initial=OUTSIDE)) + 1
    cell_Q = cluster_Q[inside_Q] * n_parts + part_Q[inside_Q]
    n_GP = np.bincount(cell_Q, minlength=n_clusters * n_parts).reshape(n_clusters, n_parts).astype(float)
    n_P = n_GP.sum(0)
    within_G = (n_GP / (n_parts * n_P) ** 2).sum(1)
    root_GP = n_GP / (n_parts * n_P**1.5)
    covariance_GG = np.diag(within_G) - root_GP @ root_GP.T
    left_G = np.diag(covariance_GG)
    shows_G = left_G > TINY * within_G.max(initial=0.0)
    factor_G: Floats = np.sqrt(np.divide(within_G, left_G, out=np.zeros_like(left_G), where=shows_G))
    scaled_GG = factor_G[:, None] * covariance_GG * factor_G
    return factor_G, float(np.trace(scaled_GG) ** 2 / max(np.sum(scaled_GG**2), TINY**2))


def student(freedom: float) -> tuple[Floats, Floats]:
    """Return ascending values of |t| and Student's two-sided tail probability at each, for any real freedom >= 1.

    With t = sqrt(freedom) tan(angle) the density is a power of the cosine, which is summed.
    """
    angle = (np.arange(_ANGLES) + 0.5) * (math.pi / 2 / _ANGLES)
    mass = np.cos(angle) ** (freedom - 1)
    above = np.cumsum(mass[::-1])[::-1] - mass / 2
    return math.sqrt(freedom) * np.tan(angle), above / mass.sum()


def sign_flip_p(difference_Q: Floats, cluster_Q: Ints, *, draws: int = 10_000, seed: int = 0) -> float:
    """Return the two-sided p of a paired sign-flip test on clusters' summed differences, exact for any cluster sizes.

    All signs are tried where at most 20 clusters differ; else ``draws`` of them, and p = (k + 1) / (draws + 1).
    """
    sum_G = np.bincount(cluster_Q, difference_Q)
    sum_G = sum_G[np.abs(sum_G) > TINY]  # flipping the sign of 0 changes nothing
    extreme = abs(sum_G.sum()) - TINY
    if len(sum_G) <= _MAX_FLIPPED:
        flipped = np.zeros(1)
        for one in sum_G:
            flipped = np.concatenate([flipped + one, flipped - one])
        return float(np.mean(np.abs(flipped) >= extreme))
    generator, n_extreme = np.random.default_rng(seed), 0
    for start in range(0, draws, 256):
        signs = generator.integers(0, 2, (min(256, draws - start), len(sum_G))) * 2 - 1
        n_extreme += int(np.sum(np.abs(signs @ sum_G) >= extreme))
    return (n_extreme + 1) / (draws + 1)


def holm(p: Sequence[float]) -> list[float]:
    """Adjust the p-values of one family of tests by Holm's step-down method (1979); nan stays nan and is no test."""
    adjusted = np.full(len(p), math.nan)
    tests = [i for i in np.argsort(p, kind="stable") if not math.isnan(p[i])]
    largest = 0.0
    for rank, i in enumerate(tests):
        largest = max(largest, (len(tests) - rank) * p[i])
        adjusted[i] = min(1.0, largest)
    return adjusted.tolist()
