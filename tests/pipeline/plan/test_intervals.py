"""Ranges of numbers: they rise with their parts, and shrink with the sample."""

import pytest

from pipeline.plan.intervals import Interval, mean_of, share_of, spread


def test_a_function_is_taken_at_all_low_and_all_high_ends():
    assert spread(lambda a, b: a * b, Interval(1, 2, 3), Interval(10, 20, 40)) == Interval(10, 40, 120)
    assert Interval(1, 2, 3).scaled(2) == Interval(2, 4, 6)


def test_a_mean_is_surer_of_more_values_and_sure_of_all():
    few, many = mean_of([1, 3], 0.0), mean_of([1, 3] * 20, 0.0)
    assert few.expected == many.expected == 2
    assert few.high - few.low > 3 * (many.high - many.low) > 0
    assert mean_of([1, 3], 0.0, population=2) == Interval(2, 2, 2)
    assert mean_of([2, 2, 2], 0.1) == Interval(1.8, 2, 2.2)
    assert mean_of([2]) == Interval(1, 2, 4) and mean_of([2], 0.0, population=1) == Interval(2, 2, 2)
    with pytest.raises(ValueError, match="at least one"):
        mean_of([])


def test_a_share_of_a_sample_keeps_what_it_has_not_seen_possible():
    none, half = share_of(0, 20), share_of(10, 20)
    assert none.low == none.expected == 0 and 0.1 < none.high < 0.2
    assert half.low < 0.5 < half.high and half.expected == 0.5
    assert share_of(1, 4, population=4) == Interval.exactly(0.25) and share_of(0, 0) == Interval.exactly(0.0)
