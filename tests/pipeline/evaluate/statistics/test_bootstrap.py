"""Draws of whole clusters: the worked case with all its draws, ratios of means, and what cannot be drawn."""

import math
import time
from itertools import product

import numpy as np
import pytest

from pipeline.evaluate.statistics.bootstrap import (
    draw_counts,
    estimate,
    interval,
    relative,
    resampled,
    two_sided_p,
)
from pipeline.evaluate.statistics.errors import OUTSIDE, student
from tests.pipeline.evaluate.statistics.oracles import sandwich_error
from tests.pipeline.evaluate.statistics.score_tables import bits

# The worked case of test_statistics: four videos of three questions, full retention first.
SCORES = np.array([bits("110 101 011 110"), bits("100 101 111 000")])
VIDEO = np.repeat(np.arange(4), 3)
ALL = np.zeros(12, np.int64)


def drawn(seed=0, clusters=4, draws=500):
    return draw_counts(clusters, draws, np.random.default_rng(seed))


def test_worked_case_by_all_256_draws():
    all_draws = np.array([np.bincount(draw, minlength=4) for draw in product(range(4), repeat=4)])
    both = estimate(SCORES, VIDEO, ALL, all_draws)
    lost_R = both.drawn[:, 1] - both.drawn[:, 0]
    twelfths, counts = np.unique(np.round(lost_R * 12).astype(int), return_counts=True)
    assert twelfths.tolist() == list(range(-8, 5))
    assert counts.tolist() == [1, 4, 10, 20, 31, 40, 44, 40, 31, 20, 10, 4, 1]
    assert lost_R.mean() == pytest.approx(-0.1667, abs=5e-5)
    assert lost_R.std() == pytest.approx(0.1863, abs=5e-5)
    assert interval(lost_R) == (pytest.approx(-0.5), pytest.approx(0.1667, abs=5e-5))
    assert two_sided_p(lost_R) == pytest.approx(2 * (0.2578 * 256 + 1) / 257, abs=1e-4)
    lost = both.difference(1, 0)
    assert (lost.value, lost.error) == (pytest.approx(-2 / 12), pytest.approx(0.2152, abs=5e-5))
    assert all(math.isnan(number) for number in (lost.low, lost.high, lost.p))  # of four videos nothing is shown


def test_draws_repeat_with_their_generator_and_take_each_cluster_alike():
    counts = drawn(clusters=7, draws=2000)
    assert (counts == drawn(clusters=7, draws=2000)).all()
    assert (counts != drawn(seed=1, clusters=7, draws=2000)).any()
    assert (counts.sum(1) == 7).all()
    assert counts.mean(0) == pytest.approx(np.ones(7), abs=0.1)


def test_drawn_p_comes_near_the_exact_one():
    sampled = estimate(SCORES, VIDEO, ALL, drawn(draws=20_000)).drawn
    assert two_sided_p(sampled[:, 1] - sampled[:, 0]) == pytest.approx(0.516, abs=0.02)


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


def many(times, video=VIDEO):
    """The worked case as many times over, each time about other videos."""
    clusters = np.concatenate([video + 4 * copy for copy in range(times)])
    return np.tile(SCORES, times), clusters, np.tile(np.repeat([0, 1, 2], [2, 3, 7]), times)


def test_error_of_a_difference_is_that_of_the_differences():
    scores, video, task = many(13)
    both = estimate(scores, video, task, drawn(clusters=52))
    lost = both.difference(1, 0)
    assert lost.error == pytest.approx(sandwich_error(scores[1] - scores[0], video, task))
    assert (lost.low, lost.high) == interval(both.drawn[:, 1] - both.drawn[:, 0])


def cr2(lost, video):
    """Bell and McCaffrey's error of a mean and its degrees of freedom, with whole matrices."""
    n, groups = len(lost), [np.flatnonzero(video == one) for one in np.unique(video)]
    left = np.eye(n) - 1 / n
    variance, columns = 0.0, []
    for rows in groups:
        values, vectors = np.linalg.eigh(left[np.ix_(rows, rows)])
        root = vectors @ np.diag(values**-0.5) @ vectors.T
        variance += float(np.sum(root @ (lost - lost.mean())[rows]) / n) ** 2
        columns.append(left[:, rows] @ root @ np.ones(len(rows)) / n)
    gram = np.array(columns) @ np.array(columns).T
    return math.sqrt(variance), np.trace(gram) ** 2 / np.sum(gram**2)


def test_of_few_videos_the_interval_is_students_with_the_cr2_error():
    scores, video, _ = many(4)
    video[-8:] = video[-9]  # one of many questions
    few = estimate(scores, video, np.zeros(len(video), np.int64), drawn(clusters=16))
    lost, (error, freedom) = few.difference(1, 0), cr2(scores[1] - scores[0], video)
    assert lost.error == pytest.approx(error)
    t, above = student(freedom)
    assert lost.high - lost.value == pytest.approx(error * np.interp(0.95, 1 - above, t))
    assert lost.p == pytest.approx(np.interp(abs(lost.value) / error, t, above))
    n_videos = len(np.unique(video))
    assert lost.enough == pytest.approx(n_videos * (2.8 * error / lost.value) ** 2)


@pytest.mark.parametrize(
    ("freedom", "t", "p"),
    [(1, 12.706, 0.05), (2.5, 3.574, 0.05), (5, 2.571, 0.05), (5, 6.869, 0.001), (30, 2.042, 0.05)],
)
def test_student_has_the_values_of_published_tables(freedom, t, p):
    values, above = student(freedom)
    assert np.interp(t, values, above) == pytest.approx(p, rel=2e-3)


def test_p_is_never_below_the_share_of_signs_that_are_as_extreme():
    """Of 60 videos five differ, all to one side: 2 of 32 signs are as extreme."""
    full, pruned = np.ones(60), np.ones(60)
    pruned[:5] = 0
    lost = estimate(np.stack([full, pruned]), np.arange(60), np.zeros(60, np.int64), drawn(clusters=60, draws=4000))
    assert lost.difference(1, 0).p == 2 / 32


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


def test_parts_of_one_cluster_each_have_no_interval_nor_keep_other_benchmarks_from_one():
    """As of MLVU with one video a task: which of two videos differ by chance nothing tells."""
    generator = np.random.default_rng(0)
    scores = generator.random((2, 8))
    tasks = estimate(scores, np.arange(8), np.arange(8), drawn(clusters=8))
    whole = estimate(scores, np.arange(8), np.zeros(8, np.int64), drawn(clusters=8))
    for number in (tasks, relative([tasks, whole], 0)):
        difference = number.difference(1, 0)
        assert math.isfinite(difference.value)
        assert all(math.isnan(one) for one in difference[1:])
    assert whole.difference(1, 0).p > 0


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


@pytest.mark.parametrize("pruned", [np.ones(60), np.zeros(60)])
def test_videos_that_all_differ_alike_show_no_error(pruned):
    apart = estimate(np.stack([np.ones(60), pruned]), np.arange(60), np.zeros(60, np.int64), drawn(clusters=60))
    difference = apart.difference(1, 0)
    assert (difference.value, difference.error) == (pruned[0] - 1, 0)
    assert all(math.isnan(number) for number in (difference.low, difference.high, difference.p))


def test_no_interval_of_a_score_goes_beyond_all_right():
    scores = np.ones((1, 8))
    scores[0, 0] = 0
    low, high = estimate(scores, np.arange(8), np.zeros(8, np.int64), drawn(clusters=8)).interval(0)
    assert 0 < low < 7 / 8 < high == 1


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
