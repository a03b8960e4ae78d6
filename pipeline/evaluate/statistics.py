"""Scores of methods on the same questions: means, and paired differences between methods with their intervals.

The bootstrap draws whole videos (clusters) with replacement. The same draws serve all methods, ratios and columns:
differences are paired, and adding a method does not change the interval of another pair. With fewer than
``FEWEST_VIDEOS`` videos, there is no interval. Shape letters: A arms (a method at a ratio), Q questions, G videos, R
draws, N rows of scores, and P parts, groups of questions whose means are averaged (such as MLVU's tasks).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FEWEST_VIDEOS = 20
NO_PART = -1  # the part number of a question that a column leaves out
_TINY = 1e-9  # smaller differences are rounding errors, since scores differ by 1/n or not at all
_CHUNK = 512  # draws per step, which bounds the memory for their counts of videos
_SEED = re.compile(r",seed=(\d+)(?=,|$)")  # in a method's label, where seed 0 is left out
POSITIONS = ",positions="  # begins the last setting in the label of a method with its own positions


class MethodAtRatio(NamedTuple):
    """A method at a retention ratio, called an arm; the method is a label with its parameters."""

    method: str
    ratio: float

    @property
    def label(self) -> str:
        """The method and the ratio as one text: ``gstep@0.25``."""
        return f"{self.method}@{self.ratio:g}"


#: Full retention.
ORIGINAL = MethodAtRatio("none", 1.0)


def split_seed(label: str) -> tuple[str, int | None]:
    """Split a method's label into the label without its seed, and the seed, or None."""
    seed = _SEED.search(label)
    return _SEED.sub("", label), int(seed[1]) if seed else None


def is_named(name: str, label: str) -> bool:
    """Return True if a user's ``name`` of a method selects this label.

    A name without a seed or positions selects all of them. Seed 0 in a name also selects a label without a seed.
    """
    (name, _, positions), (label, _, label_positions) = name.partition(POSITIONS), label.partition(POSITIONS)
    (method, seed), (label_method, label_seed) = split_seed(name), split_seed(label)
    return method == label_method and seed in (None, label_seed or 0) and positions in ("", label_positions)


@dataclass(frozen=True, kw_only=True)
class AnswerCounts:
    """Counts of the answers of one arm or more; adding two objects adds their counts, and None plus a number is None.

    Attributes:
        n_answers: all answers, including failed ones.
        n_unparsed: replies that name none of the options; questions without options do not count.
        n_cut: replies that max_new_tokens cut; None if older scores do not record it.
        n_weak: replies whose option is drawn at random, or a letter inside a word; None if older scores do not record
            it.
        n_kept_known: answers that record how many visual tokens were kept.
        kept_tokens: the sum of kept tokens over these answers.
        kept_shares: the sum of n_kept / n_total over these answers.
    """

    n_answers: int = 0
    n_failed: int = 0
    n_unparsed: int = 0
    n_cut: int | None = 0
    n_weak: int | None = 0
    n_kept_known: int = 0
    kept_tokens: float = 0.0
    kept_shares: float = 0.0

    def __add__(self, other: AnswerCounts) -> AnswerCounts:
        pairs = {name: (value, vars(other)[name]) for name, value in vars(self).items()}
        sums: dict[str, Any] = {name: None if None in pair else sum(pair) for name, pair in pairs.items()}
        return AnswerCounts(**sums)

    @property
    def tokens(self) -> float | None:
        """The mean number of kept visual tokens per answer; None if no answer records it."""
        return self.kept_tokens / self.n_kept_known if self.n_kept_known else None

    @property
    def kept_share(self) -> float | None:
        """The mean share of the visual tokens that was kept; None if no answer records it."""
        return self.kept_shares / self.n_kept_known if self.n_kept_known else None

    @property
    def n_replies(self) -> int:
        """The number of answers that did not fail."""
        return self.n_answers - self.n_failed

    @property
    def unparsed_share(self) -> float | None:
        """The share of the replies that named no option; None if there is no reply."""
        return self.n_unparsed / self.n_replies if self.n_replies else None


class QuestionPartition(NamedTuple):
    """A partition of a benchmark's questions; a score is the mean over the means of its parts.

    Attributes:
        numbers: ``[Q]``, the part of each question, 0 to P-1, or NO_PART if the question does not count.
        weights: ``[P]``, relative weights of the parts; None for equal weights.
    """

    numbers: Ints
    weights: Floats | None = None

    def within(self, inside_Q: NDArray[np.bool_]) -> QuestionPartition:
        """Return the parts restricted to the questions in the mask; parts without any question are dropped."""
        numbers = np.where(inside_Q, self.numbers, NO_PART)
        present = np.unique(numbers[numbers != NO_PART])
        renumbered = np.where(numbers == NO_PART, NO_PART, np.searchsorted(present, numbers))
        return QuestionPartition(renumbered, None if self.weights is None else self.weights[present])


@dataclass(frozen=True, kw_only=True)
class ScoreMatrix:
    """The scores of one benchmark, with questions sorted by id.

    Attributes:
        scores: ``[A, Q]``, 0 to 1. An arm that was not run on this benchmark is nan throughout.
        clusters: ``[Q]``, the video of each question, 0 to G-1.
        splits: for each question, its split values by split name.
        tallies: one per arm.
    """

    scores: Floats
    clusters: Ints
    splits: Sequence[dict[str, str]]
    tallies: Sequence[AnswerCounts]

    def whole(self) -> QuestionPartition:
        """Return a single part with all questions."""
        return QuestionPartition(np.zeros(len(self.clusters), np.int64))

    def split(self, name: str, value: str) -> QuestionPartition:
        """Return a single part with the questions that have this value of the split ``name``."""
        return QuestionPartition(
            np.array([0 if question.get(name) == value else NO_PART for question in self.splits], np.int64)
        )

    def by(self, name: str, weights: Mapping[str, float] = MappingProxyType({})) -> QuestionPartition:
        """Return one part for each value of the split ``name``, such as MLVU's tasks.

        Args:
            weights: the weight of each value; {} gives all values the same weight. Otherwise, questions whose value has
                no weight, or weight 0, do not count.

        Raises:
            ValueError: a question has no value of this split.
        """
        if n_missing := sum(name not in splits for splits in self.splits):
            raise ValueError(
                f"{n_missing} questions have no {name!r}, over which it averages: run its jobs.evaluate again"
            )
        values = [splits[name] for splits in self.splits]
        if not weights:
            return QuestionPartition(np.unique(values, return_inverse=True)[1])
        counted = sorted({value for value in values if weights.get(value)})
        number = {value: i for i, value in enumerate(counted)}
        part_numbers = [number.get(value, NO_PART) for value in values]
        return QuestionPartition(np.array(part_numbers, np.int64), np.array([weights[value] for value in counted]))


def list_arms(scores: pa.Table) -> list[MethodAtRatio]:
    """Return the distinct arms of a table of scores, in order of first appearance."""
    return list(dict.fromkeys(list_row_arms(scores)))


def list_row_arms(scores: pa.Table) -> list[MethodAtRatio]:
    """Return the arm of each row of scores; every row of the method "none" is ORIGINAL, whatever its ratio."""
    rows = zip(scores["method"].to_pylist(), scores["retention_ratio"].to_pylist(), strict=True)
    return [ORIGINAL if method == ORIGINAL.method else MethodAtRatio(method, ratio) for method, ratio in rows]


def make_score_matrix(scores: pa.Table, arms: Sequence[MethodAtRatio]) -> ScoreMatrix:
    """Return the scores of some arms, in this order, as a matrix; rows of other arms are ignored.

    A failed answer without a score scores 0; another answer without a score, and an arm without rows, is nan. Clusters
    and splits are those of a question's first row.

    Raises:
        ValueError: an arm lacks a question that another arm has, or has a question twice.
    """
    number = {arm: i for i, arm in enumerate(arms)}
    arm_N = np.array([number.get(arm, -1) for arm in list_row_arms(scores)], np.int64)
    scores, arm_N = scores.filter(pa.array(arm_N >= 0)), arm_N[arm_N >= 0]
    questions, first_Q, question_N = np.unique(scores["question_id"].to_numpy(), return_index=True, return_inverse=True)
    count_AQ = np.zeros((len(arms), len(questions)), np.int64)
    np.add.at(count_AQ, (arm_N, question_N), 1)
    wrong_AQ = (count_AQ != 1) & (count_AQ.sum(1) > 0)[:, None]
    if wrong_AQ.any():
        a, q = np.argwhere(wrong_AQ)[0]
        problem = "no score" if count_AQ[a, q] == 0 else f"{count_AQ[a, q]} scores"
        where = f"{arms[a].method} at ratio {arms[a].ratio:g} has {problem} of question {questions[q]!s}"
        raise ValueError(f"{where}: every method must be scored on the same questions, once each")
    failed_N = scores["status"].to_numpy() != "ok"
    scores_AQ = np.full(count_AQ.shape, np.nan)
    score_N = scores["score"].to_numpy().astype(float)
    scores_AQ[arm_N, question_N] = np.where(failed_N & np.isnan(score_N), 0.0, score_N)
    first = scores.select(["cluster", "splits"]).take(first_Q)
    return ScoreMatrix(
        scores=scores_AQ,
        clusters=np.unique(first["cluster"].to_numpy(), return_inverse=True)[1],
        splits=[dict(splits or ()) for splits in first["splits"].to_pylist()],
        tallies=_count_answers(scores, arm_N, failed_N, len(arms)),
    )


def _count_answers(scores: pa.Table, arm_N: Ints, failed_N: NDArray[np.bool_], n_arms: int) -> list[AnswerCounts]:
    """Return the counts of each arm's answers; ``n_cut`` and ``n_weak`` are None if the scores lack either column."""
    free_N = scores["n_options"].to_numpy() == 0  # a free question has no option to name
    unparsed_N = ~failed_N & ~free_N & scores["parsed"].is_null().to_numpy()
    kept_N = scores["n_kept"].to_numpy().astype(float)
    share_N = kept_N / scores["n_total"].to_numpy().astype(float)
    known_N = np.isfinite(share_N)
    counts = {"n_failed": failed_N, "n_unparsed": unparsed_N, "n_kept_known": known_N}
    if {"finish", "weak"} <= set(scores.column_names):  # older scores have neither
        counts |= {"n_cut": scores["finish"].to_numpy() == "length", "n_weak": scores["weak"].is_valid().to_numpy()}
    columns = {
        "n_cut": [None] * n_arms,
        "n_weak": [None] * n_arms,
        "n_answers": np.bincount(arm_N, minlength=n_arms).tolist(),
        **{name: np.bincount(arm_N[rows_N], minlength=n_arms).tolist() for name, rows_N in counts.items()},
        "kept_tokens": np.bincount(arm_N[known_N], kept_N[known_N], n_arms).tolist(),
        "kept_shares": np.bincount(arm_N[known_N], share_N[known_N], n_arms).tolist(),
    }
    return [AnswerCounts(**{name: values[a] for name, values in columns.items()}) for a in range(n_arms)]


def set_arm_scores(scores: pa.Table, shares: Mapping[MethodAtRatio, float | None]) -> pa.Table:
    """Return the scores with every row of an arm set to that arm's number, or null if it has none.

    All rows are put into one cluster, so that no interval is computed.
    """
    share_by_row = [shares.get(arm) for arm in list_row_arms(scores)]
    columns = {"score": pa.array(share_by_row, pa.float64()), "cluster": pa.repeat("all", len(share_by_row))}
    for name, values in columns.items():
        place = scores.schema.get_field_index(name)
        scores = scores.set_column(place, scores.schema.field(name), values)
    return scores


class Difference(NamedTuple):
    """The difference between the scores of two arms on the same questions, as a share.

    Attributes:
        low, high: the ends of its 95 % interval, not corrected for multiple comparisons; nan without an interval.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """The number of each arm (or row) in one column, with its bootstrap draws.

    Attributes:
        value: ``[A]``; nan for an arm that was not scored.
        drawn: ``[R, A]``, the number in each draw; nan where a part has no question in the draw.
        n_videos: the number of videos behind the column; for a mean of benchmarks, the smallest of theirs.
    """

    value: Floats
    drawn: Floats
    n_videos: int

    def difference(self, arm: int, reference: int) -> Difference:
        """Return the number of ``arm`` minus that of ``reference``, with its interval of the central 95 % of draws.

        There is no interval (nan) with fewer than FEWEST_VIDEOS videos, without draws in which both are defined, or if
        all draws have the same difference, which says nothing about its error.
        """
        value = float(self.value[arm] - self.value[reference])
        drawn_R = self.drawn[:, arm] - self.drawn[:, reference]
        drawn_R = drawn_R[np.isfinite(drawn_R)]
        if self.n_videos < FEWEST_VIDEOS or not len(drawn_R) or np.ptp(drawn_R) < _TINY:
            return Difference(value, math.nan, math.nan)
        return Difference(value, *np.quantile(drawn_R, [0.025, 0.975], method="inverted_cdf").tolist())


def compute_estimates(
    scores_AQ: Floats, cluster_Q: Ints, parts: Sequence[QuestionPartition], draws: int, generator: np.random.Generator
) -> list[Estimate]:
    """Return an estimate for each column: each arm's mean over the parts, and the same mean for every bootstrap draw.

    All columns use the same draws of videos.

    Args:
        cluster_Q: the video of each question, 0 to G-1.
        parts: one per column.
        draws: R. With 0, the estimates have no draws.
        generator: advanced by the call. Generators in equal states give equal draws for equal numbers of videos.
    """
    G = int(cluster_Q.max(initial=-1)) + 1
    columns = [_sum_scores(scores_AQ, cluster_Q, subset.numbers) for subset in parts]
    drawn = [np.empty((draws, len(scores_AQ))) for _ in parts]
    for start in range(0, draws, _CHUNK):
        n = min(_CHUNK, draws - start)
        flat = generator.integers(max(G, 1), size=(n, G)) + np.arange(n)[:, None] * G
        times_RG = np.bincount(flat.ravel(), minlength=n * G).reshape(n, G).astype(float)
        for drawn_RA, (sum_GPA, count_GP), subset in zip(drawn, columns, parts, strict=True):
            sum_RPA = np.tensordot(times_RG, sum_GPA, axes=1)
            drawn_RA[start : start + n] = _average_parts(sum_RPA, times_RG @ count_GP, subset.weights)
    return [
        Estimate(
            value=_average_parts(sum_GPA.sum(0, keepdims=True), count_GP.sum(0, keepdims=True), subset.weights)[0],
            drawn=drawn_RA,
            n_videos=int(np.sum(count_GP.any(1))),
        )
        for drawn_RA, (sum_GPA, count_GP), subset in zip(drawn, columns, parts, strict=True)
    ]


def _sum_scores(scores_AQ: Floats, cluster_Q: Ints, part_Q: Ints) -> tuple[Floats, Floats]:
    """Return each arm's sum of scores ``[G, P, A]`` and the number of questions ``[G, P]``, per video and part.

    G and P are one more than the largest number in ``cluster_Q`` and ``part_Q``. Questions of NO_PART do not count.
    """
    inside_Q = part_Q != NO_PART
    G, P = int(cluster_Q.max(initial=-1)) + 1, int(part_Q.max(initial=NO_PART)) + 1
    cell_Q = cluster_Q[inside_Q] * P + part_Q[inside_Q]
    sums = [np.bincount(cell_Q, row, G * P) for row in scores_AQ[:, inside_Q]]
    sum_GPA: Floats = np.stack(sums, axis=-1).reshape(G, P, len(sums)).astype(float)
    return sum_GPA, np.bincount(cell_Q, minlength=G * P).reshape(G, P).astype(float)


def _average_parts(sum_RPA: Floats, count_RP: Floats, weight_P: Floats | None) -> Floats:
    """Return the mean of the parts' means, ``[R, A]``, weighted unless ``weight_P`` is None.

    It is nan if there is no part, or if a part has no question.
    """
    with np.errstate(invalid="ignore"):  # 0 / 0
        means_RPA = sum_RPA / count_RP[:, :, None]
        if weight_P is not None:
            means_RPA = means_RPA * (weight_P / weight_P.mean())[:, None]
        mean_RA: Floats = means_RPA.sum(1) / np.float64(means_RPA.shape[1])
    return mean_RA


def compute_relative_scores(overall: Sequence[Estimate], full: int) -> Estimate:
    """Combine the overall estimates of benchmarks into Rel.: the mean of their scores divided by those of arm ``full``.

    Scores are not rounded. The result is nan where ``full`` scores 0 on any benchmark.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = [
            Estimate(
                value=estimate.value / (estimate.value[full] or math.nan),
                drawn=estimate.drawn / np.where(estimate.drawn[:, [full]] == 0, math.nan, estimate.drawn[:, [full]]),
                n_videos=estimate.n_videos,
            )
            for estimate in overall
        ]
    return average_estimates(ratios)


def average_estimates(overall: Sequence[Estimate]) -> Estimate:
    """Combine the overall estimates of benchmarks, with equally many draws, into their mean; nan where any is nan."""
    values, drawn = [estimate.value for estimate in overall], [estimate.drawn for estimate in overall]
    return Estimate(np.mean(values, axis=0), np.mean(drawn, axis=0), min(estimate.n_videos for estimate in overall))


def count_videos_needed(difference: Difference, n_videos: int) -> int | None:
    """Estimate how many videos would resolve a difference whose interval contains 0, if the difference stays as it is.

    Returns:
        A number above ``n_videos``, rounded up to two significant digits; None without an interval or a difference.
    """
    if not math.isfinite(difference.low) or abs(difference.value) < _TINY:
        return None
    half_width = (difference.high - difference.low) / 2
    n_needed = max(n_videos + 1, math.ceil(n_videos * (half_width / difference.value) ** 2))
    unit = int(10 ** max(0, len(str(n_needed)) - 2))
    return math.ceil(n_needed / unit) * unit
