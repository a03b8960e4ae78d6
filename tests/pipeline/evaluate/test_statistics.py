"""Scores as a matrix, and the paired bootstrap over videos: the worked case with all its draws, and what has none."""

import math
from itertools import product

import numpy as np
import pytest

from pipeline.evaluate.statistics import (
    FEWEST_VIDEOS,
    NO_PART,
    ORIGINAL,
    Difference,
    Estimate,
    MethodAtRatio,
    QuestionPartition,
    average_estimates,
    compute_estimates,
    compute_relative_scores,
    count_videos_needed,
    is_named,
    list_arms,
    make_score_matrix,
    split_seed,
)
from tests.pipeline.evaluate.score_tables import bits, score_rows, score_table

# The worked case: four videos of three questions, full retention first.
SCORES = np.array([bits("110 101 011 110"), bits("100 101 111 000")])
VIDEO = np.repeat(np.arange(4), 3)
ALL = np.zeros(12, np.int64)
GSTEP = MethodAtRatio("gstep", 0.25)
SPLITS = [{"duration": "short", "task": "b"}, {"duration": "long", "task": "a"}, {"task": "b"}]


def estimated(scores, video, part=None, draws=500, seed=0):
    part = np.zeros(len(video), np.int64) if part is None else part
    (found,) = compute_estimates(scores, video, [QuestionPartition(part)], draws, np.random.default_rng(seed))
    return found


def many(times=15):
    """The worked case as many times over, each time about other videos."""
    return np.tile(SCORES, times), np.concatenate([VIDEO + 4 * copy for copy in range(times)])


def test_the_worked_case_by_all_256_draws():
    """As if of enough videos, so that the interval is there to be looked at."""
    sums = SCORES.reshape(2, 4, 3).sum(2)
    drawn = np.array([sums[:, draw].sum(1) / 12 for draw in map(list, product(range(4), repeat=4))])
    lost = Estimate(SCORES.mean(1), drawn, FEWEST_VIDEOS).difference(1, 0)
    assert lost.value == pytest.approx(-2 / 12)
    assert (lost.low, lost.high) == (pytest.approx(-0.5), pytest.approx(1 / 6))
    assert all(map(math.isnan, Estimate(SCORES.mean(1), drawn, FEWEST_VIDEOS - 1).difference(1, 0)[1:]))


def test_draws_are_of_whole_videos_and_repeat_with_their_seed():
    """The published error of the worked case is 0.2152; 15 of them are G / (G - 1) and 1 / sqrt(15) smaller."""
    scores, video = many()
    found = estimated(scores, video, draws=4000)
    assert found.n_videos == 60 and (found.drawn == estimated(scores, video, draws=4000).drawn).all()
    assert (found.drawn != estimated(scores, video, draws=4000, seed=1).drawn).any()
    error = 0.2152 * (3 / 4 * 60 / 59 / 15) ** 0.5
    lost = found.difference(1, 0)
    assert (lost.low, lost.high) == pytest.approx((-1 / 6 - 1.96 * error, -1 / 6 + 1.96 * error), abs=0.007)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [3.0, 1.0]])
def test_a_draw_computes_the_mean_over_parts_anew_by_their_weights(weights):
    """Parts of unequal size, a question of the first video left out, against a plain loop over the same draws."""
    part = np.array([NO_PART, 0, 0, 1, 1, 0, 2, NO_PART, 0, 1, 0, 2])
    part[part == len(weights)] = 1
    parts = QuestionPartition(part, None if len(weights) == 3 else np.array(weights))
    found, whole = compute_estimates(SCORES, VIDEO, [parts, QuestionPartition(ALL)], 50, np.random.default_rng(0))

    def number(scores, times):
        """Return the weighted mean over the parts, NaN where one of them was not drawn."""
        sizes = [times[part == p].sum() for p in range(len(weights))]
        if 0 in sizes:
            return math.nan
        means = [np.sum((times * scores)[part == p]) / size for p, size in enumerate(sizes)]
        return np.average(means, weights=weights)

    assert found.value == pytest.approx([number(of_arm, np.ones(12)) for of_arm in SCORES])
    flat = np.random.default_rng(0).integers(4, size=(50, 4))
    for r in range(50):
        times = np.bincount(flat[r], minlength=4)[VIDEO]
        assert whole.drawn[r] == pytest.approx((times * SCORES).sum(1) / times.sum())
        assert found.drawn[r] == pytest.approx([number(of_arm, times) for of_arm in SCORES], nan_ok=True)
    assert not np.isnan(found.drawn).all() and (np.isnan(found.drawn).any() or len(weights) == 2)


def test_parts_within_some_questions_are_those_that_have_any_with_their_weights():
    parts = QuestionPartition(np.array([0, 1, 2, NO_PART, 2, 1]), np.array([3.0, 1.0, 2.0]))
    within = parts.within(np.array([True, False, True, True, False, False]))
    assert within.numbers.tolist() == [0, NO_PART, 1, NO_PART, NO_PART, NO_PART]
    assert within.weights.tolist() == [3.0, 2.0]
    alike = QuestionPartition(parts.numbers).within(parts.numbers == 2)
    assert alike.numbers.tolist() == [NO_PART, NO_PART, 0, NO_PART, 0, NO_PART] and alike.weights is None


def test_rel_is_the_mean_ratio_with_each_benchmarks_own_draws():
    one, other = estimated(*many(), draws=4000), estimated(*many(10), draws=4000, seed=3)
    rel = compute_relative_scores([one, other], 0)
    assert rel.value == pytest.approx([1, 0.75]) and rel.n_videos == 40
    assert (rel.drawn[:, 0] == 1).all()
    ratios = [part.drawn[:, 1] / part.drawn[:, 0] for part in (one, other)]
    assert rel.drawn[:, 1] == pytest.approx(sum(ratios) / 2)
    nothing = compute_relative_scores([estimated(np.stack([np.zeros(12), SCORES[1]]), VIDEO)], 0)
    assert math.isnan(nothing.value[1]) and math.isnan(nothing.difference(1, 0).low)


def test_an_arm_that_was_not_scored_touches_no_other_and_an_empty_split_has_no_number():
    scores, video = many()
    missing = estimated(np.stack([scores[0], np.full(180, np.nan), scores[1]]), video)
    assert missing.difference(2, 0) == estimated(scores, video).difference(1, 0)
    assert all(map(math.isnan, missing.difference(1, 0)))
    assert np.isnan(estimated(scores, video, np.full(180, NO_PART)).value).all()


def test_the_mean_of_benchmarks_is_of_their_draws():
    one, other = (Estimate(np.array(v), np.array([d, d]), n) for v, d, n in (([0.5], [0.4], 30), ([0.7], [0.8], 20)))
    mean = average_estimates([one, other])
    assert (mean.value, mean.drawn[0], mean.n_videos) == (pytest.approx([0.6]), pytest.approx([0.6]), 20)


@pytest.mark.parametrize(
    ("difference", "n_videos", "needed"),
    [
        ((0.01, -0.02, 0.04), 40, 360),  # a half width of 3 points is three times the difference
        ((0.01, -0.031, 0.042), 40, 540),  # 532.9, rounded up to two digits
        ((0.03, 0.0, 0.04), 20, 21),  # 8.9: the interval is not even, and 20 do not resolve it
        ((0.0, -0.02, 0.02), 40, None),  # nothing to resolve
        ((0.01, math.nan, math.nan), 10, None),
    ],
)
def test_how_many_videos_would_resolve_a_difference(difference, n_videos, needed):
    assert count_videos_needed(Difference(*difference), n_videos) == needed


def test_about_so_many_videos_resolve_it():
    """Of more videos like these, two thirds of the estimate do not, and one and a half times do."""
    scores = (np.random.default_rng(3).random((2, 40)) < [[0.7], [0.8]]).astype(float)

    def difference(copies):
        return estimated(np.tile(scores, copies), np.arange(40 * copies), draws=4000).difference(1, 0)

    here = difference(1)
    assert here.low < 0 < here.value
    copies = count_videos_needed(here, 40) / 40
    assert copies > 3 and difference(round(copies / 1.5)).low < 0 < difference(round(copies * 1.5)).low


@pytest.mark.parametrize("pruned", [np.ones(60), np.zeros(60)])
def test_videos_that_all_differ_alike_show_no_error(pruned):
    difference = estimated(np.stack([np.ones(60), pruned]), np.arange(60)).difference(1, 0)
    assert difference.value == pruned[0] - 1 and all(map(math.isnan, difference[1:]))


def test_a_seed_is_told_from_the_rest_of_a_label():
    assert split_seed("random") == ("random", None) and split_seed("m:M,a=2,seed=13,z=1") == ("m:M,a=2,z=1", 13)
    assert split_seed("fastv,seeds=3") == ("fastv,seeds=3", None)
    assert is_named("random", "random") and is_named("random", "random,seed=3") and not is_named("random", "fps")
    assert is_named("random,seed=3", "random,seed=3") and not is_named("random,seed=1", "random,seed=3")
    assert is_named("random,seed=0", "random") and not is_named("random,seed=1", "random")
    placed = "random,seed=3,positions=original"
    assert all(is_named(name, placed) for name in ("random", "random,seed=3", "random,positions=original", placed))
    assert not any(is_named(name, placed) for name in ("random,seed=1", "random,positions=contiguous"))
    assert not is_named("random,positions=original", "random,seed=3")


def table():
    shared = {"clusters": ["w", "v", "w"], "splits": SPLITS}
    return score_table(
        score_rows("gstep", 0.25, [1.0, None, 0.2], **shared, kept=[20, None, 30]),
        score_rows("none", 1.0, [1.0, 1.0, 0.0], **shared),
    )


def test_scores_do_not_depend_on_the_order_of_rows():
    rows = table()
    for scores in (rows, rows.take([5, 0, 3, 2, 4, 1])):
        matrix = make_score_matrix(scores, [ORIGINAL, GSTEP])
        assert matrix.scores.tolist() == [[1, 1, 0], [1, 0, 0.2]]  # a failed answer scores 0
        assert matrix.clusters.tolist() == [1, 0, 1] and matrix.splits == SPLITS
    assert list_arms(rows) == [GSTEP, ORIGINAL]
    assert list_arms(score_table(score_rows("none", 0.999, [1.0]))) == [ORIGINAL]  # whatever its ratio says


def test_parts_of_columns():
    matrix = make_score_matrix(table(), [ORIGINAL])
    assert matrix.whole().numbers.tolist() == [0, 0, 0]
    assert matrix.split("duration", "long").numbers.tolist() == [NO_PART, 0, NO_PART]
    assert matrix.by("task").numbers.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="1 questions have no 'duration'"):
        matrix.by("duration")
    by = matrix.by("task", {"b": 0.5, "c": 1.0})  # a part without a weight does not count
    assert by.numbers.tolist() == [0, NO_PART, 0] and by.weights.tolist() == [0.5]


def test_failed_unparsed_and_kept_are_counted():
    rows = score_rows("gstep", 0.25, [1.0, None, 0.0, 0.2], kept=[20, None, 40, 30])
    rows[2]["parsed"] = rows[3]["parsed"] = None
    tally = make_score_matrix(score_table(rows), [GSTEP]).tallies[0]
    assert (tally.n_answers, tally.n_failed, tally.n_unparsed, tally.tokens) == (4, 1, 2, 30)
    assert tally.unparsed_share == pytest.approx(2 / 3) and tally.kept_share == pytest.approx(0.3)  # of three replies
    twice = tally + tally
    assert (twice.n_answers, twice.n_failed, twice.kept_share) == (8, 2, pytest.approx(0.3))
    arms = [GSTEP, MethodAtRatio("fastv,K=3", 0.25)]
    unknown = make_score_matrix(score_table(score_rows("gstep", 0.25, [None], kept=[None])), arms).tallies
    assert [(one.kept_share, one.unparsed_share, one.tokens) for one in unknown] == [(None, None, None)] * 2


def test_cut_and_weakly_read_replies_are_counted_and_older_scores_do_not_say_it():
    rows = score_rows("gstep", 0.25, [1.0, None, 0.0, 0.2, 1.0])
    marks = (("length", None), (None, None), ("length", "in-word"), ("stop", "drawn"), (None, None))
    for row, (finish, weak) in zip(rows, marks, strict=True):
        row |= {"finish": finish, "weak": weak}
    scores = score_table(rows)
    (tally,) = make_score_matrix(scores, [GSTEP]).tallies
    assert (tally.n_cut, tally.n_weak, tally.n_replies) == (2, 2, 4)
    (older,) = make_score_matrix(scores.drop_columns(["finish", "weak"]), [GSTEP]).tallies
    assert (older.n_cut, older.n_weak, older.n_answers) == (None, None, 5)
    assert ((tally + older).n_cut, (tally + tally).n_weak) == (None, 4)
