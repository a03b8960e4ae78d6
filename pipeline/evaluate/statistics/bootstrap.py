"""Scores on videos drawn anew: how far they vary, and whether two differ by more than that.

Whole clusters are drawn with replacement, and one draw serves all methods, ratios and columns, so that differences are
paired. On every draw the published number is computed again, with its own denominators. Percentiles of draws hold too
little where clusters are few: below FEW, intervals are Student's with the CR2 error, and below FEWEST there is none
(``pipeline/evaluate/README.md`` has the simulation). Shapes: R draws, and those of ``statistics``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluate.statistics.errors import (
    OUTSIDE,
    TINY,
    Floats,
    Ints,
    cluster_sums,
    few_clusters,
    part_means,
    student,
    weighted,
)

Counts = NDArray[np.integer]  # how often each cluster is in each draw, [R, G]

FEW = 50  # clusters; with fewer, percentiles of draws hold the true number in 80 to 93 of 100 intervals
FEWEST = 6  # all signs of five clusters agree by chance in 2 of 32 cases: with five nothing can be shown at 95 %
_POWER = 1.96 + 0.84  # errors that a difference must have to be found at p < 0.05 in four of five studies
_CHUNK = 512  # draws at a time, because their counts as floats take the memory


class Difference(NamedTuple):
    """The difference between two arms on the same questions, with interval and p.

    Attributes:
        value: of the scores as they are.
        low: lower end of the 95 % interval; nan, like its upper end and p, with fewer than FEWEST clusters, and where
            all clusters have the same difference.
        high: its upper end.
        error: standard error, of whole clusters (delta method where the number is a ratio); nan with one cluster, in
            all or in each part.
        p: two-sided; never below the share of the signs of clusters that would be as extreme.
        enough: clusters with which such a difference would be found in four of five studies; nan for several columns.
    """

    value: float
    low: float
    high: float
    error: float
    p: float
    enough: float = math.nan


class Stratum(NamedTuple):
    """A group of clusters that is resampled on its own.

    Attributes:
        n_rows: of ``Estimate.residual`` that are its clusters'; those of clusters without a question are 0.
        n_clusters: with a question.
        freedom: degrees of freedom of its error.
    """

    n_rows: int
    n_clusters: int
    freedom: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimated number for each arm, with its bootstrap draws; nan throughout where an arm was not scored.

    Attributes:
        value: the number itself, [A].
        drawn: the number on each draw, [R, A]; nan where it is undefined there (no question of a split was drawn).
        added: what each cluster adds to the number, [G, A].
        residual: what each cluster adds to its error, [G, A]: the sum of squares is the variance, that of the
            difference of two arms the variance of their difference.
        strata: of the clusters, in the order of ``residual``.
        most: the largest number that there can be; no interval goes beyond.
    """

    value: Floats
    drawn: Floats
    added: Floats
    residual: Floats
    strata: Sequence[Stratum]
    most: float = 1.0

    def interval(self, arm: int) -> tuple[float, float]:
        """Return the 95 % interval of one arm's number; nan where there is none."""
        _, low, high, *_ = self._measured(
            float(self.value[arm]), self.drawn[:, arm], self.residual[:, arm], len(self.added)
        )
        return (low, high) if math.isnan(low) else (max(0.0, low), min(self.most, high))

    def difference(self, arm: int, reference: int) -> Difference:
        """Return arm ``arm``'s number minus that of ``reference``, with interval, error and p."""
        value = float(self.value[arm] - self.value[reference])
        drawn_R = self.drawn[:, arm] - self.drawn[:, reference]
        residual_G = self.residual[:, arm] - self.residual[:, reference]
        n_differing = int(np.sum(np.abs(self.added[:, arm] - self.added[:, reference]) > TINY))
        return self._measured(value, drawn_R, residual_G, n_differing)

    def _measured(self, value: float, drawn_R: Floats, residual_G: Floats, n_differing: int) -> Difference:
        """Compute a difference's interval, error and p from draws and residuals, by Student's t if clusters are few."""
        ends = np.cumsum([stratum.n_rows for stratum in self.strata])
        variances = [float(np.sum(rows**2)) for rows in np.split(residual_G, ends[:-1])]
        variance, fewest = math.fsum(variances), min(stratum.n_clusters for stratum in self.strata)
        # Where each part has one cluster alone, no two clusters can be compared, and there are no degrees of freedom.
        compares = fewest > 1 and all(stratum.freedom for stratum in self.strata)
        error = math.sqrt(variance) if compares else math.nan
        error = 0.0 if error <= TINY else error  # sums of equal numbers differ by rounding
        if math.isnan(value) or fewest < FEWEST or not error > 0:
            return Difference(value, math.nan, math.nan, error, math.nan)
        if fewest < FEW:
            of_strata = zip(variances, self.strata, strict=True)
            t, above = student(variance**2 / math.fsum(v**2 / stratum.freedom for v, stratum in of_strata))
            margin = error * float(np.interp(-0.05, -above, t))
            low, high, p = value - margin, value + margin, float(np.interp(abs(value) / error, t, above))
        else:
            low, high = interval(drawn_R)
            p = two_sided_p(drawn_R)
        enough = fewest * (_POWER * error / value) ** 2 if len(self.strata) == 1 and abs(value) > TINY else math.nan
        return Difference(value, low, high, error, max(p, min(1.0, 2.0 ** (1 - n_differing))), enough)


def draw_counts(n_clusters: int, draws: int, generator: np.random.Generator) -> Counts:
    """Draw with replacement; return how often each of G clusters is in each of R draws, [R, G].

    Rows sum to G, and the same generator gives the same draws.
    """
    counts_RG = np.empty((draws, n_clusters), np.int32)  # int64 would take 0.25 GB at the largest size
    for start in range(0, draws, _CHUNK):
        n = min(_CHUNK, draws - start)
        flat = generator.integers(max(n_clusters, 1), size=(n, n_clusters)) + np.arange(n)[:, None] * n_clusters
        counts_RG[start : start + n] = np.bincount(flat.ravel(), minlength=n * n_clusters).reshape(n, n_clusters)
    return counts_RG


def estimate(scores_AQ: Floats, cluster_Q: Ints, part_Q: Ints, counts_RG: Counts) -> Estimate:
    """Estimate every arm's mean over parts, with bootstrap draws and residuals.

    Args:
        scores_AQ: scores; an arm that was not scored is nan throughout.
        cluster_Q: cluster of each question, 0 to G-1.
        part_Q: part of each question, 0 to P-1, none of them empty; OUTSIDE where the column leaves it out.
        counts_RG: of draw_counts.
    """
    inside_Q = part_Q != OUTSIDE
    present_G = np.unique(cluster_Q[inside_Q])
    n_clusters, freedom = len(present_G), math.inf
    factor_G = np.full(counts_RG.shape[1], math.sqrt(n_clusters / (n_clusters - 1)) if n_clusters > 1 else math.nan)
    if 1 < n_clusters < FEW:
        number_Q = np.searchsorted(present_G, cluster_Q)
        factor_G[present_G], freedom = few_clusters(number_Q, part_Q, n_clusters)
    added_GA, residual_GA = (
        cluster_sums(values_AQ, cluster_Q, counts_RG.shape[1]) for values_AQ in weighted(scores_AQ, part_Q)
    )
    return Estimate(
        value=part_means(scores_AQ, part_Q).mean(1) if n_clusters else np.full(len(scores_AQ), math.nan),
        drawn=resampled(scores_AQ, cluster_Q, part_Q, counts_RG),
        added=added_GA,
        residual=residual_GA * factor_G[:, None],
        strata=[Stratum(len(residual_GA), n_clusters, freedom)],
    )


def resampled(scores_AQ: Floats, cluster_Q: Ints, part_Q: Ints, counts_RG: Counts) -> Floats:
    """Compute the mean over parts on each draw, [R, A]; nan where a part has no question in the draw."""
    inside_Q = part_Q != OUTSIDE
    part = part_Q[inside_Q]
    present, cluster = np.unique(cluster_Q[inside_Q], return_inverse=True)
    n_arms, n_parts = len(scores_AQ), int(part.max(initial=OUTSIDE)) + 1
    cell, n_cells = cluster * n_parts + part, len(present) * n_parts
    sum_GPA = cluster_sums(scores_AQ[:, inside_Q], cell, n_cells).reshape(len(present), n_parts * n_arms)
    count_GP = np.bincount(cell, minlength=n_cells).reshape(len(present), n_parts).astype(float)
    drawn_RA = np.empty((len(counts_RG), n_arms))
    for start in range(0, len(counts_RG), _CHUNK):
        count = counts_RG[start : start + _CHUNK, present].astype(float)
        with np.errstate(invalid="ignore"):  # 0 / 0
            mean = (count @ sum_GPA).reshape(len(count), n_parts, n_arms) / (count @ count_GP)[:, :, None]
        drawn_RA[start : start + _CHUNK] = mean.sum(1) / max(n_parts, 1)
    return drawn_RA


def relative(estimates: Sequence[Estimate], full: int) -> Estimate:
    """Combine benchmarks to Rel.: the mean of an arm's unrounded score relative to that of arm ``full``.

    The r-th draws of the benchmarks are combined, so each must have been drawn on its own. The residuals are those of
    the delta method, var(m/f) = (m/f)^2 (var m/m^2 + var f/f^2 - 2 cov/(m f)), and add up over benchmarks. Undefined
    (nan) where a benchmark's ``full`` is 0.
    """
    terms = [_relative_to(one, full) for one in estimates]
    return Estimate(
        value=np.mean([term.value for term in terms], axis=0),
        drawn=np.mean([term.drawn for term in terms], axis=0),
        added=np.concatenate([term.added for term in terms]),
        residual=np.concatenate([term.residual for term in terms]) / len(terms),
        strata=[stratum for term in terms for stratum in term.strata],
        most=math.inf,
    )


def _relative_to(one: Estimate, full: int) -> Estimate:
    """Divide an estimate by that of arm ``full``, draw by draw, with residuals of the delta method."""
    base = one.value[full] or math.nan
    drawn_R1 = one.drawn[:, [full]]
    return replace(
        one,
        value=one.value / base,
        drawn=one.drawn / np.where(drawn_R1 == 0, math.nan, drawn_R1),
        residual=(one.residual - one.value / base * one.residual[:, [full]]) / base,
    )


def interval(drawn_R: Floats) -> tuple[float, float]:
    """Return the middle 95 % of the draws: percentiles by the inverse distribution function, not interpolated."""
    drawn = drawn_R[np.isfinite(drawn_R)]
    if not len(drawn):
        return math.nan, math.nan
    low, high = np.quantile(drawn, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


def two_sided_p(drawn_R: Floats) -> float:
    """Return the bootstrap p of a difference: twice the smaller share of draws on one side of 0, at most 1.

    A share is (k + 1) / (R + 1), so that p is never 0.
    """
    drawn = drawn_R[np.isfinite(drawn_R)]
    if not len(drawn):
        return math.nan
    smaller = min(np.sum(drawn <= TINY), np.sum(drawn >= -TINY))
    return min(1.0, 2 * (float(smaller) + 1) / (len(drawn) + 1))
