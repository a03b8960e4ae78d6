"""Rows of scores as a matrix of arms and questions."""

import math

import numpy as np
import pytest

from pipeline.evaluate.statistics.errors import OUTSIDE
from pipeline.evaluate.statistics.score_matrix import ORIGINAL, Arm, arms_of, score_matrix
from tests.pipeline.evaluate.statistics.score_tables import score_rows, score_table

GSTEP, FASTV = Arm("gstep", 0.25), Arm("fastv,K=3", 0.25)
SPLITS = [{"duration": "short", "task": "b"}, {"duration": "long", "task": "a"}, {"task": "b"}]


def table():
    shared = {"clusters": ["w", "v", "w"], "splits": SPLITS}
    return score_table(
        score_rows("gstep", 0.25, [1.0, None, 0.2], **shared, kept=[20, None, 30]),
        score_rows("none", 1.0, [1.0, 1.0, 0.0], **shared),
    )


def test_scores_do_not_depend_on_the_order_of_rows():
    rows = table()
    shuffled = rows.take([5, 0, 3, 2, 4, 1])
    for scores in (rows, shuffled):
        matrix = score_matrix(scores, [ORIGINAL, GSTEP])
        assert matrix.scores.tolist() == [[1, 1, 0], [1, 0, 0.2]]  # a failed answer scores 0
        assert (matrix.clusters.tolist(), matrix.n_clusters) == ([1, 0, 1], 2)
        assert matrix.splits == SPLITS
    assert arms_of(rows) == [GSTEP, ORIGINAL]


def test_an_arm_without_rows_is_nan_and_others_may_be_left_out():
    matrix = score_matrix(table(), [FASTV, GSTEP])
    assert np.isnan(matrix.scores[0]).all()
    assert matrix.scores[1].tolist() == [1, 0, 0.2]


def test_full_retention_is_one_arm_whatever_its_ratio_says():
    assert arms_of(score_table(score_rows("none", 0.999, [1.0]))) == [ORIGINAL]


def test_parts_of_columns():
    matrix = score_matrix(table(), [ORIGINAL])
    assert matrix.whole().tolist() == [0, 0, 0]
    assert matrix.split("duration", "long").tolist() == [OUTSIDE, 0, OUTSIDE]
    assert matrix.by("task").tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="1 questions have no 'duration'"):
        matrix.by("duration")


def test_failed_unparsed_and_kept_are_counted():
    rows = score_rows("gstep", 0.25, [1.0, None, 0.0, 0.2], kept=[20, None, 40, 30])
    rows[2]["parsed"] = rows[3]["parsed"] = None
    tally = score_matrix(score_table(rows), [GSTEP]).tallies[0]
    assert (tally.n_answers, tally.n_failed, tally.n_unparsed) == (4, 1, 2)
    assert tally.unparsed_share == pytest.approx(2 / 3)  # of the three replies
    assert tally.kept_share == pytest.approx(0.3)  # of the three that say it
    twice = tally + tally
    assert (twice.n_answers, twice.n_failed) == (8, 2)
    assert math.isclose(twice.kept_share or 0, 0.3)


def test_shares_of_nothing_are_unknown():
    tally = score_matrix(score_table(score_rows("gstep", 0.25, [None], kept=[None])), [GSTEP, FASTV]).tallies
    assert [(one.kept_share, one.unparsed_share) for one in tally] == [(None, None)] * 2


@pytest.mark.parametrize(("scores", "what"), [([1.0], "no score of question q00001"), ([1.0, 1.0, 0.0], "q00002")])
def test_scores_of_other_questions_are_refused(scores, what):
    unpaired = score_table(score_rows("none", 1.0, [1.0, 0.0]), score_rows("gstep", 0.25, scores))
    with pytest.raises(ValueError, match=what):
        score_matrix(unpaired, [ORIGINAL, GSTEP])


def test_a_question_scored_twice_is_refused():
    twice = score_rows("gstep", 0.25, [1.0]) * 2
    with pytest.raises(ValueError, match=r"gstep at ratio 0\.25 has 2 scores of question q00000"):
        score_matrix(score_table(twice), [GSTEP])
