"""Questions on which methods disagree: all are counted, the most telling come first, and every pair has some."""

import numpy as np
import pytest

from pipeline.evaluate.report.disagreements import Answers, answers_of, disagreements
from pipeline.evaluate.statistics.score_matrix import ORIGINAL, Arm, arms_of
from tests.pipeline.evaluate.report.report_data import items_of, scores_of

FPS, GSTEP, VIDCOM2 = Arm("fps", 0.25), Arm("gstep", 0.25), Arm("vidcom2", 0.25)
ARMS = [ORIGINAL, FPS, GSTEP, VIDCOM2]


def answered(*outcomes: str, arms: list[Arm] = ARMS) -> Answers:
    """A line a question: 1, 0 and - (neither) of each arm."""
    outcome = np.array([["-01".index(sign) - 1 for sign in line] for line in outcomes], np.int8).T
    return Answers(arms, [f"q{i}" for i in range(len(outcomes))], np.zeros(outcome.shape, np.int64), outcome)


def test_those_that_tell_most_of_gstep_come_first():
    found = disagreements(answered("1111", "0000", "0100", "1010", "0010", "1101"))
    assert [one.question for one in found.shown] == [4, 5, 3, 2]
    assert len(found.every) == 4
    first = found.shown[0]
    assert (first.ratio, first.right.tolist(), first.wrong.tolist()) == (0.25, [2], [0, 1, 3])


def test_without_gstep_those_that_split_the_methods_most_come_first():
    found = disagreements(answered("100", "110", "111", arms=[ORIGINAL, FPS, VIDCOM2]))
    assert [one.question for one in found.shown] == [0, 1]
    even = disagreements(answered("1000", "1100", arms=[ORIGINAL, FPS, VIDCOM2, Arm("topk", 0.25)]))
    assert [one.question for one in even.shown] == [1, 0]


def test_failed_answers_are_neither_right_nor_wrong():
    assert not disagreements(answered("1-1-", "--0-")).every
    (one,) = disagreements(answered("1-0-")).shown
    assert (one.right.tolist(), one.wrong.tolist()) == ([0], [2])


def test_counts_are_of_right_and_wrong_methods_and_of_any():
    counts = disagreements(answered("1010", "0010", "1111")).counts[0.25]
    assert counts.tolist() == [
        [2, 1, 2, 0, 2],  # any right
        [1, 0, 1, 0, 1],  # full retention right
        [0, 0, 0, 0, 0],
        [2, 1, 2, 0, 2],  # GSTEP right
        [0, 0, 0, 0, 0],
    ]


def test_methods_are_compared_at_the_same_ratio_and_full_retention_at_all():
    arms = [ORIGINAL, Arm("fps", 0.25), Arm("gstep", 0.1)]
    assert len(disagreements(answered("110", arms=arms)).every) == 1
    assert len(disagreements(answered("100", arms=arms)).every) == 2
    assert disagreements(answered("010", arms=arms)).counts[0.1].sum() == 0


@pytest.mark.parametrize("most", [0, 3, 5])
def test_every_pair_has_some_before_the_next_most_telling(most):
    telling = ["0010"] * 6
    found = disagreements(answered(*telling, "0001"), most)
    assert len(found.every) == 7
    assert [one.question for one in found.shown] == {0: [], 3: [0, 1, 6], 5: [0, 1, 2, 3, 6]}[most]


def test_answers_are_found_by_arm_and_question():
    items = items_of(3)
    scores = scores_of(items, ["fps", "gstep"], [0.25, 0.1], failures=0.2)
    scores = scores.take(np.random.default_rng(0).permutation(scores.num_rows))
    arms = [arm for arm in arms_of(scores) if arm.method != "fps"]
    answers = answers_of(scores, arms)
    rows = scores.to_pylist()
    assert sorted(answers.questions) == sorted(items)
    for a, arm in enumerate(arms):
        for q, question in enumerate(answers.questions):
            row = rows[answers.of_arm(arm, q)]
            assert (row["question_id"], row["method"], row["retention_ratio"]) == (question, *arm)
            assert answers.outcome[a, q] == (-1 if row["status"] == "failed" else row["right"])
    assert answers.of_arm(Arm("fps", 0.25), 0) is None
