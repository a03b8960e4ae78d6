"""The scores of a benchmark as one matrix: a row for each arm (a method at a ratio), a column for each question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.evaluate.statistics.errors import OUTSIDE, Floats, Ints


class Arm(NamedTuple):
    """A method at a retention ratio, a row of a table."""

    method: str
    ratio: float


#: Full retention, which methods are compared with.
ORIGINAL = Arm("none", 1.0)
GSTEP = "gstep"  # the method that the others are compared with at each ratio


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The counts of an arm's answers; tallies of several benchmarks are added.

    Attributes:
        n_answers: rows, failed ones too.
        n_failed: questions that ended as an error; each scores 0.
        n_unparsed: replies that named no option.
        n_kept_known: rows that say how many visual tokens were kept.
        kept_shares: sum of their shares n_kept / n_total.
    """

    n_answers: int = 0
    n_failed: int = 0
    n_unparsed: int = 0
    n_kept_known: int = 0
    kept_shares: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    @property
    def kept_share(self) -> float | None:
        """Mean share of the visual tokens that was kept; None where no row says it."""
        return self.kept_shares / self.n_kept_known if self.n_kept_known else None

    @property
    def unparsed_share(self) -> float | None:
        """Share of the replies that named no option; None where there is no reply."""
        n_replies = self.n_answers - self.n_failed
        return self.n_unparsed / n_replies if n_replies else None


@dataclass(frozen=True, kw_only=True)
class ScoreMatrix:
    """Scores of one benchmark, questions sorted by their id.

    Attributes:
        scores: 0 to 1, [A, Q]; an arm that was not run on this benchmark is nan throughout.
        clusters: cluster of each question, 0 to G-1, [Q].
        n_clusters: G.
        splits: name -> value of each question's splits.
        tallies: of each arm.
    """

    scores: Floats
    clusters: Ints
    n_clusters: int
    splits: Sequence[dict[str, str]]
    tallies: Sequence[Tally]

    def whole(self) -> Ints:
        """Return each question's part for the mean over all questions: 0."""
        return np.zeros(len(self.clusters), np.int64)

    def split(self, name: str, value: str) -> Ints:
        """Return each question's part for the mean over one value of a split: 0, or OUTSIDE for other values."""
        return np.array([0 if of_one.get(name) == value else OUTSIDE for of_one in self.splits], np.int64)

    def by(self, name: str) -> Ints:
        """Return each question's part for the mean over the parts of a split, such as MLVU's tasks.

        Raises ValueError where a question has no such split.
        """
        if missing := sum(name not in splits for splits in self.splits):
            raise ValueError(
                f"{missing} questions have no {name!r}, over which this benchmark averages: score them anew"
            )
        part: Ints = np.unique([splits[name] for splits in self.splits], return_inverse=True)[1]
        return part


def arms_of(scores: pa.Table) -> list[Arm]:
    """Return the arms of a table of scores, in order of first appearance."""
    return list(dict.fromkeys(arm_by_row(scores)))


def arm_by_row(scores: pa.Table) -> list[Arm]:
    """Return the arm of each row of scores."""
    rows = zip(scores["method"].to_pylist(), scores["retention_ratio"].to_pylist(), strict=True)
    return [ORIGINAL if method == ORIGINAL.method else Arm(method, ratio) for method, ratio in rows]


def score_matrix(scores: pa.Table, arms: Sequence[Arm]) -> ScoreMatrix:
    """Return the score matrix of some arms; a failed answer scores 0.

    Args:
        scores: rows of ``scores.parquet``, a (question, method, ratio) each.
        arms: what to take, in this order.

    Raises ValueError where an arm has other questions than the others, or one twice: their scores are not paired.
    """
    number = {arm: i for i, arm in enumerate(arms)}
    arm_N = np.array([number.get(arm, -1) for arm in arm_by_row(scores)], np.int64)
    scores, arm_N = scores.filter(pa.array(arm_N >= 0)), arm_N[arm_N >= 0]
    ids = _column(scores, "question_id")
    questions, first_Q, question_N = np.unique(ids, return_index=True, return_inverse=True)
    _check_paired(arms, questions, arm_N, question_N)
    failed_N = _column(scores, "status") != "ok"
    scores_AQ = np.full((len(arms), len(questions)), np.nan)
    scores_AQ[arm_N, question_N] = np.where(failed_N, 0.0, _column(scores, "score").astype(float))
    first = scores.select(["cluster", "splits"]).take(first_Q)
    clusters, cluster_Q = np.unique(_column(first, "cluster"), return_inverse=True)
    return ScoreMatrix(
        scores=scores_AQ,
        clusters=cluster_Q,
        n_clusters=len(clusters),
        splits=[dict(splits or ()) for splits in first["splits"].to_pylist()],
        tallies=_tallies(scores, arm_N, failed_N, len(arms)),
    )


def _column(scores: pa.Table, name: str) -> NDArray[np.generic]:
    """Return a column as a NumPy array."""
    values: NDArray[np.generic] = scores[name].to_numpy()
    return values


def _check_paired(arms: Sequence[Arm], questions: NDArray[np.generic], arm_N: Ints, question_N: Ints) -> None:
    """Raise ValueError unless every arm that was run has exactly one score of each question."""
    count_AQ = np.zeros((len(arms), len(questions)), np.int64)
    np.add.at(count_AQ, (arm_N, question_N), 1)
    wrong_AQ = (count_AQ != 1) & (count_AQ.sum(1) > 0)[:, None]
    if wrong_AQ.any():
        a, q = np.argwhere(wrong_AQ)[0]
        what = "no score" if count_AQ[a, q] == 0 else f"{count_AQ[a, q]} scores"
        where = f"{arms[a].method} at ratio {arms[a].ratio:g} has {what} of question {questions[q]!s}"
        raise ValueError(f"{where}: every method is to be scored on the same questions, once each")


def _tallies(scores: pa.Table, arm_N: Ints, failed_N: NDArray[np.bool_], n_arms: int) -> list[Tally]:
    """Count each arm's answers, failures, unread replies and kept tokens."""
    free_N = scores["n_options"].to_numpy() == 0  # a free question has no option to name
    unparsed_N = ~failed_N & ~free_N & scores["parsed"].is_null().to_numpy()
    share_N = _column(scores, "n_kept").astype(float) / _column(scores, "n_total").astype(float)
    known_N = np.isfinite(share_N)

    def count(chosen_N: NDArray[np.bool_] | slice) -> list[int]:
        counts: list[int] = np.bincount(arm_N[chosen_N], minlength=n_arms).tolist()
        return counts

    columns = {
        "n_answers": count(slice(None)),
        "n_failed": count(failed_N),
        "n_unparsed": count(unparsed_N),
        "n_kept_known": count(known_N),
        "kept_shares": np.bincount(arm_N[known_N], share_N[known_N], n_arms).tolist(),
    }
    return [Tally(**{name: values[a] for name, values in columns.items()}) for a in range(n_arms)]
