"""Draws of whole clusters: the worked case with all its draws, ratios of means, and what cannot be drawn."""

import math
import time

import numpy as np
import pytest

from pipeline.evaluate.statistics.bootstrap import (
    draw_counts,
    estimate,
    every_draw,
    interval,
    relative,
    resampled,
    two_sided_p,
)
from pipeline.evaluate.statistics.errors import OUTSIDE, sandwich_error
from tests.pipeline.evaluate.statistics.score_tables import bits

# The worked case of test_statistics: four videos of three questions, full retention first.
SCORES = np.array([bits("110 101 011 110"), bits("100 101 111 000")])
VIDEO = np.repeat(np.arange(4), 3)
ALL = np.zeros(12, np.int64)


def drawn(seed=0, clusters=4, draws=500):
    return draw_counts(clusters, draws, np.random.default_rng(seed))


def test_worked_case_by_all_256_draws():
    both = estimate(SCORES, VIDEO, ALL, every_draw(4))
    lost_R = both.drawn[:, 1] - both.drawn[:, 0]
    twelfths, counts = np.unique(np.round(lost_R * 12).astype(int), return_counts=True)
    assert twelfths.tolist() == list(range(-8, 5))
    assert counts.tolist() == [1, 4, 10, 20, 31, 40, 44, 40, 31, 20, 10, 4, 1]
    assert lost_R.mean() == pytest.approx(-0.1667, abs=5e-5)
    assert lost_R.std() == pytest.approx(0.1863, abs=5e-5)
    lost = both.difference(1, 0, exact=True)
    assert lost.value == pytest.approx(-2 / 12)
    assert (lost.low, lost.high) == (pytest.approx(-0.5), pytest.approx(0.1667, abs=5e-5))
    assert lost.error == pytest.approx(0.2152, abs=5e-5)
    assert lost.p == pytest.approx(2 * 0.2578, abs=1e-4)
    assert lost.p == pytest.approx(0.516, abs=5e-4)


def test_every_draw_is_there_once():
    counts = every_draw(3)
    assert counts.shape == (27, 3)
    assert (counts.sum(1) == 3).all()
    assert np.sum((counts == 1).all(1)) == 6  # 3! orders of one each
    with pytest.raises(ValueError, match="draw_counts"):
        every_draw(8)


def test_draws_repeat_with_their_generator_and_take_each_cluster_alike():
    counts = drawn(clusters=7, draws=2000)
    assert (counts == drawn(clusters=7, draws=2000)).all()
    assert (counts != drawn(seed=1, clusters=7, draws=2000)).any()
    assert (counts.sum(1) == 7).all()
    assert counts.mean(0) == pytest.approx(np.ones(7), abs=0.1)


def test_drawn_p_comes_near_the_exact_one():
    sampled = estimate(SCORES, VIDEO, ALL, drawn(draws=20_000))
    assert sampled.difference(1, 0).p == pytest.approx(0.516, abs=0.02)


def test_a_draw_computes_the_mean_over_parts_anew():
    """Parts of unequal size, the first video left out and a question of another, against a plain loop."""
    part = np.array([OUTSIDE] * 3 + [1, 1, 0, 2, OUTSIDE, 0, 1, 0, 2])
    counts = drawn(draws=50)
    found = resampled(SCORES, VIDEO, part, counts)
    for r in range(50):
        times = counts[r][VIDEO]
        sizes = [times[part == p].sum() for p in range(3)]
        if 0 in sizes:
            assert np.isnan(found[r]).all()
            continue
        for arm in range(2):
            means = [np.sum((times * SCORES[arm])[part == p]) / sizes[p] for p in range(3)]
            assert found[r, arm] == pytest.approx(np.mean(means))
    assert np.isnan(found).any()
    assert not np.isnan(found).all()


def test_error_of_a_difference_is_that_of_the_differences():
    task = np.repeat([0, 1, 2], [2, 3, 7])
    both = estimate(SCORES, VIDEO, task, drawn())
    assert both.difference(1, 0).error == pytest.approx(sandwich_error(SCORES[1] - SCORES[0], VIDEO, task))


def test_relative_error_is_that_of_the_delta_method():
    """Two benchmarks; the formula of a ratio of two means that covary, a benchmark at a time."""
    generator = np.random.default_rng(5)
    estimates, variance = [], 0.0
    for n_videos in (40, 25):
        video = np.repeat(np.arange(n_videos), 3)
        scores = (generator.random((2, len(video))) < [[0.7], [0.6]]).astype(float)
        one = estimate(scores, video, np.zeros(len(video), np.int64), drawn(n_videos, n_videos, 4000))
        estimates.append(one)
        f, m = one.value
        var_f, var_m = np.sum(one.residual**2, axis=0)
        cov = np.sum(one.residual[:, 0] * one.residual[:, 1])
        variance += (m / f) ** 2 * (var_m / m**2 + var_f / f**2 - 2 * cov / (m * f)) / 4
    rel = relative(estimates, 0)
    difference = rel.difference(1, 0)
    assert difference.error == pytest.approx(math.sqrt(variance))
    assert difference.value == pytest.approx(np.mean([e.value[1] / e.value[0] for e in estimates]) - 1)
    assert np.std(rel.drawn[:, 1]) == pytest.approx(difference.error, rel=0.1)  # the draws agree
    assert rel.value[0] == 1
    assert (rel.drawn[:, 0] == 1).all()


def test_rel_is_undefined_where_full_retention_scores_nothing():
    scores = np.stack([np.zeros(12), SCORES[1]])
    rel = relative([estimate(scores, VIDEO, ALL, drawn())], 0)
    assert math.isnan(rel.value[1])
    assert math.isnan(rel.difference(1, 0).p)


def test_one_cluster_has_no_interval():
    alone = estimate(SCORES, np.zeros(12, np.int64), ALL, drawn(clusters=1)).difference(1, 0)
    assert alone.value == pytest.approx(-2 / 12)
    assert all(math.isnan(number) for number in alone[1:])


def test_a_split_of_one_cluster_has_no_interval():
    of_one = estimate(SCORES, VIDEO, np.where(VIDEO == 3, 0, OUTSIDE), drawn())
    assert of_one.difference(1, 0).value == pytest.approx(-2 / 3)
    assert math.isnan(of_one.difference(1, 0).p)


def test_an_empty_split_has_no_number():
    nothing = estimate(SCORES, VIDEO, np.full(12, OUTSIDE), drawn())
    assert np.isnan(nothing.value).all()


def test_an_arm_that_was_not_scored_touches_no_other():
    missing = estimate(np.stack([SCORES[0], np.full(12, np.nan), SCORES[1]]), VIDEO, ALL, drawn())
    assert missing.difference(2, 0) == estimate(SCORES, VIDEO, ALL, drawn()).difference(1, 0)
    assert all(math.isnan(number) for number in missing.difference(1, 0))


def test_equal_arms_do_not_differ():
    same = estimate(SCORES[[0, 0]], VIDEO, ALL, drawn())
    assert same.difference(1, 0) == (0, 0, 0, 0, 1)


def test_arms_that_always_differ_have_the_smallest_p_of_the_draws():
    apart = estimate(np.stack([np.ones(12), np.zeros(12)]), VIDEO, ALL, drawn()).difference(1, 0)
    assert (apart.value, apart.low, apart.high, apart.error) == (-1, -1, -1, 0)
    assert apart.p == pytest.approx(2 / 501)


@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_is_no_difference(sign):
    """A sum of thirds in another order may miss 0 by 1e-17: three of these four draws are 0."""
    assert two_sided_p(sign * np.array([1e-17, 1e-17, 1e-17, -0.5])) == 1.0


def test_percentiles_are_draws_not_between_them():
    assert interval(np.arange(1.0, 101)) == (3, 98)  # ceil(2.5), ceil(97.5)
    assert interval(np.arange(1.0, 201)) == (5, 195)


def test_a_table_of_the_largest_size_takes_seconds():
    """60 arms, 10 columns, 2,700 questions about 900 videos, 2,000 draws."""
    generator = np.random.default_rng(0)
    scores = generator.integers(0, 2, (60, 2700)).astype(float)
    video = np.repeat(np.arange(900), 3)
    started = time.process_time()
    counts = drawn(clusters=900, draws=2000)
    columns = [np.where(video % 9 < 3 + column % 7, 0, OUTSIDE) for column in range(10)]
    estimates = [estimate(scores, video, part, counts) for part in columns]
    for one in estimates:
        for arm in range(1, 60):
            one.difference(arm, 0)
    assert time.process_time() - started < 20
