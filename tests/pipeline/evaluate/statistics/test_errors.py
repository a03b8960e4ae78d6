"""Standard errors and exact tests, on a case that was worked by hand and against plain loops."""

import math

import numpy as np
import pytest

from pipeline.evaluate.statistics.errors import OUTSIDE, holm, part_means, sign_flip_p
from tests.pipeline.evaluate.statistics.oracles import sandwich_error
from tests.pipeline.evaluate.statistics.score_tables import bits

# Four videos of three questions each; worked by hand.
FULL, PRUNED = np.array(bits("110 101 011 110")), np.array(bits("100 101 111 000"))
VIDEO = np.repeat(np.arange(4), 3)
LOST = PRUNED - FULL


def test_worked_case_means():
    assert (FULL.sum(), PRUNED.sum(), len(FULL)) == (8, 6, 12)
    assert np.bincount(VIDEO, LOST).tolist() == [-1, 0, 1, -2]
    assert LOST.mean() == pytest.approx(-0.1667, abs=5e-5)


def test_worked_case_errors():
    assert sandwich_error(LOST, VIDEO) == pytest.approx(0.2152, abs=5e-5)
    assert sandwich_error(LOST, VIDEO, corrected=False) == pytest.approx(0.1863, abs=5e-5)


def test_worked_case_test():
    assert sign_flip_p(LOST, VIDEO) == 12 / 16


def test_error_without_clusters_is_that_of_one_question_a_cluster():
    alone = np.arange(12)
    assert sandwich_error(LOST, alone) == pytest.approx(np.std(LOST, ddof=1) / math.sqrt(12))  # G/(G-1) is n/(n-1)


def test_error_of_a_mean_over_tasks_weighs_each_task_the_same():
    """Tasks of 2, 3 and 7 questions; a video is asked about in two tasks."""
    task = np.repeat([0, 1, 2], [2, 3, 7])
    assert part_means(FULL[None], task)[0].tolist() == pytest.approx([1.0, 1 / 3, 5 / 7])
    variance = 0.0
    for video in range(4):
        of_video = 0.0
        for i in np.flatnonzero(video == VIDEO):
            of_video += (FULL[i] - FULL[task == task[i]].mean()) / (3 * np.sum(task == task[i]))
        variance += 4 / 3 * of_video**2
    assert sandwich_error(FULL, VIDEO, task) == pytest.approx(math.sqrt(variance))


def test_questions_outside_a_column_do_not_count():
    first_two = np.where(VIDEO < 2, 0, OUTSIDE)
    assert sandwich_error(LOST, VIDEO, first_two) == pytest.approx(sandwich_error(LOST[:6], VIDEO[:6]))
    assert math.isnan(sandwich_error(LOST, VIDEO, np.where(VIDEO == 2, 0, OUTSIDE)))


def test_a_single_cluster_has_no_error():
    assert math.isnan(sandwich_error(LOST, np.zeros(12, int)))


def test_drawn_sign_flips_agree_with_exact_ones_and_repeat_with_their_seed():
    generator = np.random.default_rng(3)
    differences = generator.integers(-1, 2, 21).astype(float)
    differences[:3] = 1, -1, 1  # so that at least one cluster differs
    exact = sign_flip_p(differences, np.arange(21) // 2)  # 11 clusters
    many = np.concatenate([differences, [1.0, -1, 1, 1, -1, 1, 1, 1, -1, 1, 1, 1, 1]])
    drawn = [sign_flip_p(many, np.arange(34), draws=20_000, seed=seed) for seed in (0, 0, 1)]
    changed = int(np.sum(many != 0))
    assert changed > 20  # else all are tried
    assert drawn[0] == drawn[1] != drawn[2]
    fewer = min(int(np.sum(many > 0)), int(np.sum(many < 0)))  # McNemar's exact test: a binomial of one half
    exact_p = 2 * sum(math.comb(changed, k) for k in range(fewer + 1)) / 2**changed
    assert drawn[0] == pytest.approx(exact_p, abs=0.015)
    assert 0 < exact <= 1


def test_clusters_without_a_difference_do_not_change_the_sign_test():
    padded = np.concatenate([LOST, np.zeros(30)])
    assert sign_flip_p(padded, np.concatenate([VIDEO, np.arange(4, 34)])) == 12 / 16
    assert sign_flip_p(np.zeros(3), np.arange(3)) == 1.0


def test_holm_steps_down():
    """Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1, never falling."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_what_has_no_p_is_no_test_of_the_family():
    adjusted = holm([0.02, math.nan, 0.03])
    assert adjusted[0] == pytest.approx(0.04)
    assert math.isnan(adjusted[1])
