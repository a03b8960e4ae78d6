"""Standard errors and exact tests, on a case that was worked by hand and against plain loops."""

import math

import numpy as np
import pytest

from pipeline.evaluate.statistics.errors import (
    OUTSIDE,
    clustered_error,
    holm,
    mcnemar_p,
    paired_t,
    part_means,
    plain_error,
    sandwich_error,
    sign_flip_p,
)
from tests.pipeline.evaluate.statistics.score_tables import bits

# Four videos of three questions each; checked against lmms-eval's clustered_stderr and paired_ttest.
FULL, PRUNED = np.array(bits("110 101 011 110")), np.array(bits("100 101 111 000"))
VIDEO = np.repeat(np.arange(4), 3)
LOST = PRUNED - FULL


def test_worked_case_means():
    assert (FULL.sum(), PRUNED.sum(), len(FULL)) == (8, 6, 12)
    assert np.bincount(VIDEO, LOST).tolist() == [-1, 0, 1, -2]
    assert LOST.mean() == pytest.approx(-0.1667, abs=5e-5)


def test_worked_case_errors():
    assert math.hypot(plain_error(FULL), plain_error(PRUNED)) == pytest.approx(0.2072, abs=5e-5)  # unpaired
    assert plain_error(LOST) == pytest.approx(0.1667, abs=5e-5)
    assert clustered_error(LOST, VIDEO) == pytest.approx(0.1925, abs=5e-5)
    assert clustered_error(FULL, VIDEO) == pytest.approx(0.0410, abs=5e-5)
    assert clustered_error(PRUNED, VIDEO) == pytest.approx(0.1914, abs=5e-5)
    assert sandwich_error(LOST, VIDEO) == pytest.approx(0.2152, abs=5e-5)
    assert sandwich_error(LOST, VIDEO, corrected=False) == pytest.approx(0.1863, abs=5e-5)


def test_worked_case_tests():
    t, p = paired_t(LOST)
    assert (t, p) == (pytest.approx(-1.0), pytest.approx(0.3388, abs=5e-5))
    gained, lost = int(np.sum(LOST > 0)), int(np.sum(LOST < 0))
    assert (gained, lost, mcnemar_p(gained, lost)) == (1, 3, 0.625)
    assert sign_flip_p(LOST, VIDEO) == 12 / 16


def test_error_without_clusters_is_that_of_one_question_a_cluster():
    alone = np.arange(12)
    assert clustered_error(LOST, alone) == pytest.approx(plain_error(LOST))
    assert sandwich_error(LOST, alone) == pytest.approx(plain_error(LOST))  # G/(G-1) is n/(n-1)


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


def test_questions_of_a_video_that_cancel_out_leave_little_error_by_equation_4():
    """Sums of both videos are 0: what is left of 4/16/3 - 4/16/4."""
    assert clustered_error(np.array([1.0, 0, 1, 0]), np.array([0, 0, 1, 1])) == pytest.approx(math.sqrt(1 / 48))


def test_a_single_question_or_cluster_has_no_error():
    assert math.isnan(plain_error(np.ones(1)))
    assert math.isnan(clustered_error(np.ones(1), np.zeros(1, int)))
    assert math.isnan(sandwich_error(LOST, np.zeros(12, int)))


@pytest.mark.parametrize(("n", "t", "p"), [(2, 12.706, 0.05), (3, 4.303, 0.05), (6, 2.571, 0.05), (31, 2.750, 0.01)])
def test_t_test_agrees_with_printed_tables(n, t, p):
    """Critical values of Student's t for 1, 2, 5 and 30 degrees of freedom."""
    spread = np.linspace(-1, 1, n)
    spread *= 1 / plain_error(spread)
    found_t, found_p = paired_t(spread + t)
    assert (found_t, found_p) == (pytest.approx(t), pytest.approx(p, rel=1e-3))


def test_t_test_of_differences_that_are_all_the_same():
    assert paired_t(np.zeros(5)) == (0.0, 1.0)
    assert paired_t(-np.ones(5)) == (-math.inf, 0.0)


@pytest.mark.parametrize(("gained", "lost", "p"), [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 0.0625), (10, 2, 158 / 4096)])
def test_mcnemar(gained, lost, p):
    assert mcnemar_p(gained, lost) == mcnemar_p(lost, gained) == pytest.approx(p)


def test_mcnemar_of_thousands_of_changes():
    assert 0 < mcnemar_p(1400, 1600) < 0.001


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
    assert drawn[0] == pytest.approx(mcnemar_p(int(np.sum(many > 0)), int(np.sum(many < 0))), abs=0.015)
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
