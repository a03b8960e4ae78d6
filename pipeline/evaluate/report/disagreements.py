"""Questions that one method gets right and another one wrong at the same retention ratio.

Full retention takes part at every ratio: with one method alone, what it lost and gained is what there is to see. An
answer that failed is neither right nor wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.evaluate.statistics.errors import Ints
from pipeline.evaluate.statistics.score_matrix import GSTEP, ORIGINAL, Arm, arm_by_row

Outcomes = NDArray[np.int8]  # 1 right, 0 wrong, -1 neither


@dataclass(frozen=True)
class Answers:
    """The index of all answers by arm and question: where each is in the scores, and whether it is right.

    Attributes:
        questions: their ids, in order of first appearance.
        row: number of the row, [A, Q]; -1 where there is none.
        outcome: [A, Q].
    """

    arms: Sequence[Arm]
    questions: Sequence[str]
    row: Ints
    outcome: Outcomes

    def of_arm(self, arm: Arm, question: int) -> int | None:
        """Return the row number of an arm's answer, or None."""
        row = int(self.row[self.arms.index(arm), question]) if arm in self.arms else -1
        return None if row < 0 else row


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A question that some methods get right and others wrong at one ratio; methods are numbers in ``Disagreements``.

    Attributes:
        question: its number in ``Answers.questions``.
        right, wrong: methods.
    """

    question: int
    ratio: float
    right: Ints
    wrong: Ints


@dataclass(frozen=True, kw_only=True)
class Disagreements:
    """The disagreements that the page shows, and the counts of all.

    Attributes:
        methods: full retention first.
        shown: the most telling first.
        counts: of all at each ratio, [1 + n, 1 + n]: at [i, j] those that method i - 1 gets right and j - 1 wrong; 0
            stands for any method.
        every: all of them, in the same order.
    """

    methods: Sequence[str]
    shown: Sequence[Disagreement]
    counts: Mapping[float, Ints]
    every: Sequence[Disagreement]


def answers_of(scores: pa.Table, arms: Sequence[Arm]) -> Answers:
    """Index the rows of ``scores.parquet`` by arm and question; other arms are left out."""
    ids = scores["question_id"].to_pylist()
    number = {question: q for q, question in enumerate(dict.fromkeys(ids))}
    place = {arm: a for a, arm in enumerate(arms)}
    known = (arm_by_row(scores), scores["status"].to_pylist(), scores["right"].to_pylist())
    row_AQ = np.full((len(arms), len(number)), -1, np.int64)
    outcome_AQ = np.full(row_AQ.shape, -1, np.int8)
    for row, (question, arm, status, right) in enumerate(zip(ids, *known, strict=True)):
        if (a := place.get(arm)) is not None:
            row_AQ[a, number[question]] = row
            outcome_AQ[a, number[question]] = bool(right) if status == "ok" else -1
    return Answers(arms, list(number), row_AQ, outcome_AQ)


def disagreements(answers: Answers, most: int = 200) -> Disagreements:
    """Find all questions on which methods disagree, and choose at most ``most`` to show."""
    methods = list(dict.fromkeys([ORIGINAL.method, *(arm.method for arm in answers.arms)]))
    found: list[Disagreement] = []
    counts: dict[float, Ints] = {}
    for ratio in dict.fromkeys(arm.ratio for arm in answers.arms if arm != ORIGINAL):
        outcome_MQ = _at_ratio(answers, methods, ratio)
        right_MQ, wrong_MQ = outcome_MQ == 1, outcome_MQ == 0
        split_Q = right_MQ.any(0) & wrong_MQ.any(0)
        right, wrong = (np.vstack([split_Q, one & split_Q]).astype(np.int64) for one in (right_MQ, wrong_MQ))
        counts[ratio] = right @ wrong.T
        for q in np.flatnonzero(split_Q).tolist():
            right_M, wrong_M = np.flatnonzero(right_MQ[:, q]), np.flatnonzero(wrong_MQ[:, q])
            found.append(Disagreement(question=q, ratio=ratio, right=right_M, wrong=wrong_M))
    gstep = methods.index(GSTEP) if GSTEP in methods else -1
    found.sort(key=lambda one: _importance(one, gstep), reverse=True)
    return Disagreements(
        methods=methods,
        shown=[found[i] for i in _chosen(found, len(methods), most)],
        counts=counts,
        every=found,
    )


def _at_ratio(answers: Answers, methods: Sequence[str], ratio: float) -> Outcomes:
    """Return the outcomes of each method at a ratio, [M, Q]."""
    outcome_MQ = np.full((len(methods), len(answers.questions)), -1, np.int8)
    for a, arm in enumerate(answers.arms):
        if arm == ORIGINAL or arm.ratio == ratio:
            outcome_MQ[methods.index(arm.method)] = answers.outcome[a]
    return outcome_MQ


def _importance(one: Disagreement, gstep: int) -> tuple[int, int]:
    """Return a sort key: how many methods differ from GSTEP, then how many pairs of methods differ."""
    against = len(one.wrong) if gstep in one.right else len(one.right) if gstep in one.wrong else 0
    return against, len(one.right) * len(one.wrong)


def _chosen(found: Sequence[Disagreement], n_methods: int, most: int) -> list[int]:
    """Choose the disagreements to show: one for every pair of methods at every ratio, then the most important."""
    seen: dict[float, NDArray[np.bool_]] = {}
    chosen: list[int] = []
    passed: list[int] = []
    for i, one in enumerate(found):
        seen_MM = seen.setdefault(one.ratio, np.zeros((n_methods, n_methods), bool))
        pairs = np.ix_(one.right, one.wrong)
        (passed if seen_MM[pairs].all() else chosen).append(i)
        seen_MM[pairs] = True
    return sorted([*chosen, *passed[: max(0, most - len(chosen))]][:most])
