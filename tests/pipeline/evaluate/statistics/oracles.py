"""Formulas that the product's estimates are held against."""

import math

import numpy as np

from pipeline.evaluate.statistics.errors import OUTSIDE, Floats, Ints, cluster_sums, weighted


def sandwich_error(scores_Q: Floats, cluster_Q: Ints, part_Q: Ints | None = None, *, corrected: bool = True) -> float:
    """Return the cluster-robust standard error of a mean, or mean over parts, never negative; nan for one cluster.

    SE^2 = G/(G-1) sum over clusters of (sum of w_i e_i)^2; ``corrected=False`` leaves G/(G-1) out.
    """
    part_Q = np.zeros(len(scores_Q), np.int64) if part_Q is None else part_Q
    clusters, cluster = np.unique(cluster_Q[part_Q != OUTSIDE], return_inverse=True)
    n = len(clusters)
    if n < 2:
        return math.nan
    residual_AQ = weighted(scores_Q[None], part_Q)[1][:, part_Q != OUTSIDE]
    variance = float(np.sum(cluster_sums(residual_AQ, cluster, n) ** 2))
    return math.sqrt(variance * (n / (n - 1) if corrected else 1))
