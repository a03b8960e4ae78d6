"""Scores of methods on the same questions: means, and paired differences between methods with their intervals.

Questions about one video are not independent, so a bootstrap draws whole videos (clusters) with replacement. One draw
serves all methods, ratios and columns: differences are paired, and another method beside a pair changes nothing of it.
Below ``FEWEST_VIDEOS`` percentiles of draws miss the true difference too often, and there is no interval. Shapes: A
arms (a method at a ratio), Q questions, G videos, P parts (questions that are averaged before the mean over parts:
MLVU's tasks), R draws.
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
NO_PART = -1  # the part of a question that a column leaves out
_TINY = 1e-9  # smaller differences are rounding errors, since scores differ by 1/n or not at all
_CHUNK = 512  # draws at a time, because their counts of videos take the memory
_SEED = re.compile(r",seed=(\d+)(?=,|$)")  # in a method's label; a seed of 0 is left out
POSITIONS = ",positions="  # the last part of a method's label, where it has positions of its own


class MethodAtRatio(NamedTuple):
    """A method at a retention ratio, a row of a table."""

    method: str
    ratio: float

    @property
    def label(self) -> str:
        """The method and the ratio in one text: ``gstep@0.25``."""
        return f"{self.method}@{self.ratio:g}"


#: Full retention.
ORIGINAL = MethodAtRatio("none", 1.0)


def split_seed(label: str) -> tuple[str, int | None]:
    """Split the label of a method into the label without its seed, and the seed; None where the label names none."""
    seed = _SEED.search(label)
    return _SEED.sub("", label), int(seed[1]) if seed else None


def is_named(name: str, label: str) -> bool:
    """Return True if a user's ``name`` of a method means this label.

    A name without a seed means every seed, and one without positions means all positions.
    """
    (name, _, positions), (label, _, label_positions) = name.partition(POSITIONS), label.partition(POSITIONS)
    (method, seed), (label_method, label_seed) = split_seed(name), split_seed(label)
    return method == label_method and seed in (None, label_seed or 0) and positions in ("", label_positions)


@dataclass(frozen=True, kw_only=True)
class AnswerCounts:
    """The counts of an arm's answers; tallies of several benchmarks are added.

    Attributes:
        n_answers: rows, failed ones too.
        n_failed: questions that ended as an error; each scores 0.
        n_unparsed: replies that named no option.
        n_cut: replies that max_new_tokens cut; None where older scores do not say it.
        n_weak: replies that a weak rule read, as the column ``weak`` of the scores has it; None likewise.
        n_kept_known: rows that say how many visual tokens were kept.
        kept_tokens: sum of the kept tokens of these rows.
        kept_shares: sum of their shares n_kept / n_total.
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
        """Mean number of visual tokens that a question was answered from; None where no row says it."""
        return self.kept_tokens / self.n_kept_known if self.n_kept_known else None

    @property
    def kept_share(self) -> float | None:
        """Mean share of the visual tokens that was kept; None where no row says it."""
        return self.kept_shares / self.n_kept_known if self.n_kept_known else None

    @property
    def n_replies(self) -> int:
        """Answers that did not fail."""
        return self.n_answers - self.n_failed

    @property
    def unparsed_share(self) -> float | None:
        """Share of the replies that named no option; None where there is no reply."""
        return self.n_unparsed / self.n_replies if self.n_replies else None


class Parts(NamedTuple):
    """The parts of a benchmark that a number is a mean over.

    Attributes:
        numbers: the part of each question, 0 to P-1, or NO_PART where it does not count, [Q].
        weights: of the parts, [P], which need not add up to 1; None: they weigh the same.
    """

    numbers: Ints
    weights: Floats | None = None

    def within(self, inside_Q: NDArray[np.bool_]) -> Parts:
        """Return the parts for the same mean over some of the questions: over the parts that have any of them."""
        numbers = np.where(inside_Q, self.numbers, NO_PART)
        present = np.unique(numbers[numbers != NO_PART])
        renumbered = np.where(numbers == NO_PART, NO_PART, np.searchsorted(present, numbers))
        return Parts(renumbered, None if self.weights is None else self.weights[present])


@dataclass(frozen=True, kw_only=True)
class ScoreMatrix:
    """Scores of one benchmark, questions sorted by their id.

    Attributes:
        scores: 0 to 1, [A, Q]; an arm that was not run on this benchmark is nan throughout.
        clusters: the video of each question, 0 to G-1, [Q].
        splits: name -> value of each question's splits.
        tallies: of each arm.
    """

    scores: Floats
    clusters: Ints
    splits: Sequence[dict[str, str]]
    tallies: Sequence[AnswerCounts]

    def whole(self) -> Parts:
        """Return the parts for the mean over all questions: a single one."""
        return Parts(np.zeros(len(self.clusters), np.int64))

    def split(self, name: str, value: str) -> Parts:
        """Return the parts for the mean over one value of a split; questions with other values are left out."""
        return Parts(np.array([0 if of_one.get(name) == value else NO_PART for of_one in self.splits], np.int64))

    def by(self, name: str, weights: Mapping[str, float] = MappingProxyType({})) -> Parts:
        """Return the parts for the mean over the parts of a split, such as MLVU's tasks.

        Args:
            name: the split.
            weights: the weight of each part by its name; {} weighs all parts the same. Questions of a part that has no
                weight here are left out.

        Raises ValueError if a question is in no part of the split.
        """
        if n_missing := sum(name not in splits for splits in self.splits):
            raise ValueError(
                f"{n_missing} questions have no {name!r}, over which this benchmark averages: score them again"
            )
        values = [splits[name] for splits in self.splits]
        if not weights:
            return Parts(np.unique(values, return_inverse=True)[1])
        counted = sorted({value for value in values if weights.get(value)})
        number = {value: i for i, value in enumerate(counted)}
        of_questions = [number.get(value, NO_PART) for value in values]
        return Parts(np.array(of_questions, np.int64), np.array([weights[value] for value in counted]))


def arms_of(scores: pa.Table) -> list[MethodAtRatio]:
    """Return the arms of a table of scores, in order of first appearance."""
    return list(dict.fromkeys(arm_by_row(scores)))


def arm_by_row(scores: pa.Table) -> list[MethodAtRatio]:
    """Return the arm of each row of scores."""
    rows = zip(scores["method"].to_pylist(), scores["retention_ratio"].to_pylist(), strict=True)
    return [ORIGINAL if method == ORIGINAL.method else MethodAtRatio(method, ratio) for method, ratio in rows]


def score_matrix(scores: pa.Table, arms: Sequence[MethodAtRatio]) -> ScoreMatrix:
    """Return the score matrix of some arms; a failed answer without a score scores 0, and other arms are ignored.

    Args:
        scores: rows of ``scores.parquet``, a (question, method, ratio) each.
        arms: what to take, in this order.

    Raises ValueError where an arm has other questions than the others, or one twice: their scores are not paired.
    """
    number = {arm: i for i, arm in enumerate(arms)}
    arm_N = np.array([number.get(arm, -1) for arm in arm_by_row(scores)], np.int64)
    scores, arm_N = scores.filter(pa.array(arm_N >= 0)), arm_N[arm_N >= 0]
    questions, first_Q, question_N = np.unique(scores["question_id"].to_numpy(), return_index=True, return_inverse=True)
    count_AQ = np.zeros((len(arms), len(questions)), np.int64)
    np.add.at(count_AQ, (arm_N, question_N), 1)
    wrong_AQ = (count_AQ != 1) & (count_AQ.sum(1) > 0)[:, None]
    if wrong_AQ.any():
        a, q = np.argwhere(wrong_AQ)[0]
        problem = "no score" if count_AQ[a, q] == 0 else f"{count_AQ[a, q]} scores"
        where = f"{arms[a].method} at ratio {arms[a].ratio:g} has {problem} of question {questions[q]!s}"
        raise ValueError(f"{where}: every method is to be scored on the same questions, once each")
    failed_N = scores["status"].to_numpy() != "ok"
    scores_AQ = np.full(count_AQ.shape, np.nan)
    score_N = scores["score"].to_numpy().astype(float)
    scores_AQ[arm_N, question_N] = np.where(failed_N & np.isnan(score_N), 0.0, score_N)
    first = scores.select(["cluster", "splits"]).take(first_Q)
    return ScoreMatrix(
        scores=scores_AQ,
        clusters=np.unique(first["cluster"].to_numpy(), return_inverse=True)[1],
        splits=[dict(splits or ()) for splits in first["splits"].to_pylist()],
        tallies=_tallies(scores, arm_N, failed_N, len(arms)),
    )


def _tallies(scores: pa.Table, arm_N: Ints, failed_N: NDArray[np.bool_], n_arms: int) -> list[AnswerCounts]:
    """Count each arm's answers, failures, replies without an option, cut and weakly read replies, and kept tokens."""
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
    """Return rows of scores in which every row of an arm has the number of the whole arm; None: it has no score.

    Every row counts as about one video, so that no interval is drawn.
    """
    share_by_row = [shares.get(arm) for arm in arm_by_row(scores)]
    columns = {"score": pa.array(share_by_row, pa.float64()), "cluster": pa.repeat("all", len(share_by_row))}
    for name, values in columns.items():
        place = scores.schema.get_field_index(name)
        scores = scores.set_column(place, scores.schema.field(name), values)
    return scores


class Difference(NamedTuple):
    """The difference between two arms on the same questions, as a share.

    Attributes:
        value: of the scores as they are.
        low: lower end of the 95 % interval, which is not corrected for other comparisons; nan, like its upper end,
            below FEWEST_VIDEOS videos, and where the difference is the same in every video, which shows nothing of its
            error.
        high: its upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """A column's number for each arm, with its bootstrap draws; nan throughout where an arm was not scored.

    Attributes:
        value: the number itself, [A].
        drawn: the number on each draw, [R, A]; nan where it is undefined there (no question of a part was drawn).
        n_videos: of the column; of several benchmarks the fewest.
    """

    value: Floats
    drawn: Floats
    n_videos: int

    def difference(self, arm: int, reference: int) -> Difference:
        """Return the number of ``arm`` minus the number of ``reference``, with its interval (nan: no interval)."""
        value = float(self.value[arm] - self.value[reference])
        drawn_R = self.drawn[:, arm] - self.drawn[:, reference]
        drawn_R = drawn_R[np.isfinite(drawn_R)]
        if self.n_videos < FEWEST_VIDEOS or not len(drawn_R) or np.ptp(drawn_R) < _TINY:
            return Difference(value, math.nan, math.nan)
        return Difference(value, *np.quantile(drawn_R, [0.025, 0.975], method="inverted_cdf").tolist())


def estimates(
    scores_AQ: Floats, cluster_Q: Ints, parts: Sequence[Parts], draws: int, generator: np.random.Generator
) -> list[Estimate]:
    """Return an estimate for each column: every arm's mean over the parts, and the same mean of each bootstrap draw.

    All columns use the same draws of videos.

    Args:
        scores_AQ: scores; an arm that was not scored is nan throughout.
        cluster_Q: the video of each question, 0 to G-1.
        parts: the parts of each column.
        draws: R, the number of draws; with 0 the estimates have values and no draws.
        generator: advanced by the call; generators in equal states give equal draws for as many videos.
    """
    G, columns = int(cluster_Q.max(initial=-1)) + 1, [_sums(scores_AQ, cluster_Q, of_one.numbers) for of_one in parts]
    drawn = [np.empty((draws, len(scores_AQ))) for _ in parts]
    for start in range(0, draws, _CHUNK):
        n = min(_CHUNK, draws - start)
        flat = generator.integers(max(G, 1), size=(n, G)) + np.arange(n)[:, None] * G
        times_RG = np.bincount(flat.ravel(), minlength=n * G).reshape(n, G).astype(float)
        for drawn_RA, (sum_GPA, count_GP), of_one in zip(drawn, columns, parts, strict=True):
            sum_RPA = np.tensordot(times_RG, sum_GPA, axes=1)
            drawn_RA[start : start + n] = _mean_over_parts(sum_RPA, times_RG @ count_GP, of_one.weights)
    return [
        Estimate(
            value=_mean_over_parts(sum_GPA.sum(0, keepdims=True), count_GP.sum(0, keepdims=True), of_one.weights)[0],
            drawn=drawn_RA,
            n_videos=int(np.sum(count_GP.any(1))),
        )
        for drawn_RA, (sum_GPA, count_GP), of_one in zip(drawn, columns, parts, strict=True)
    ]


def _sums(scores_AQ: Floats, cluster_Q: Ints, part_Q: Ints) -> tuple[Floats, Floats]:
    """Return the sum of scores, [G, P, A], and the number of questions, [G, P], of each video in each part."""
    inside_Q = part_Q != NO_PART
    G, P = int(cluster_Q.max(initial=-1)) + 1, int(part_Q.max(initial=NO_PART)) + 1
    cell_Q = cluster_Q[inside_Q] * P + part_Q[inside_Q]
    sums = [np.bincount(cell_Q, row, G * P) for row in scores_AQ[:, inside_Q]]
    sum_GPA: Floats = np.stack(sums, axis=-1).reshape(G, P, len(sums)).astype(float)
    return sum_GPA, np.bincount(cell_Q, minlength=G * P).reshape(G, P).astype(float)


def _mean_over_parts(sum_RPA: Floats, count_RP: Floats, weight_P: Floats | None) -> Floats:
    """Return the weighted mean of the parts' means, [R, A]; nan without a part, or with one that is empty.

    With ``weight_P`` None all parts weigh the same.
    """
    with np.errstate(invalid="ignore"):  # 0 / 0
        means_RPA = sum_RPA / count_RP[:, :, None]
        if weight_P is not None:
            means_RPA = means_RPA * (weight_P / weight_P.mean())[:, None]
        mean_RA: Floats = means_RPA.sum(1) / np.float64(means_RPA.shape[1])
    return mean_RA


def relative(overall: Sequence[Estimate], full: int) -> Estimate:
    """Combine the overall estimates of benchmarks to Rel.: the mean of unrounded scores relative to arm ``full``.

    Each benchmark has draws of its own. Undefined (nan) where a benchmark's ``full`` is 0.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        relative_ones = [
            Estimate(
                value=tally.value / (tally.value[full] or math.nan),
                drawn=tally.drawn / np.where(tally.drawn[:, [full]] == 0, math.nan, tally.drawn[:, [full]]),
                n_videos=tally.n_videos,
            )
            for tally in overall
        ]
    return average(relative_ones)


def average(overall: Sequence[Estimate]) -> Estimate:
    """Combine the overall estimates of benchmarks to their mean; each benchmark has draws of its own."""
    values, drawn = [tally.value for tally in overall], [tally.drawn for tally in overall]
    return Estimate(np.mean(values, axis=0), np.mean(drawn, axis=0), min(tally.n_videos for tally in overall))


def count_videos_needed(difference: Difference, n_videos: int) -> int | None:
    """Estimate how many videos would resolve a difference that its interval does not tell from 0.

    The half width of an interval falls with the square root of the number of videos. So about
    n x (half width / difference)^2 videos have an interval that ends at 0, if the difference stays as it is.

    Returns a number above ``n_videos``, rounded up to two digits; None without an interval and for no difference.
    """
    if not math.isfinite(difference.low) or abs(difference.value) < _TINY:
        return None
    half_width = (difference.high - difference.low) / 2
    n_needed = max(n_videos + 1, math.ceil(n_videos * (half_width / difference.value) ** 2))
    unit = int(10 ** max(0, len(str(n_needed)) - 2))
    return math.ceil(n_needed / unit) * unit
