"""Figures of the selection as text: growth and seconds."""

import math

import pytest

from jobs.benchmark.selection_report import growths, seconds_text, slope
from jobs.benchmark.selection_times import FormTime


def test_growth_is_the_slope_of_the_logarithms():
    assert slope([(10, 3.0), (100, 300.0), (1000, 30000.0)]) == pytest.approx(2.0)
    assert slope([(10, 3.0), (10, 4.0)]) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.001234, "0.00123"), (0.5, "0.500"), (12.345, "12.3"), (1234.5, "1234")]
)
def test_seconds_are_shown_with_three_digits(seconds, text):
    assert seconds_text(seconds) == text
    assert math.isclose(float(text), seconds, rel_tol=5e-3)


def test_growth_is_told_of_forms_measured_on_two_sizes():
    times = [FormTime("iid", n, 0.25, n // 4, form, n * n * 1e-6, []) for n in (100, 400) for form in ("plain", "lazy")]
    found = growths([*times, FormTime("iid", 100, 0.1, 10, "plain", 1.0, [])])
    assert [(item.ratio, item.form, item.sizes) for item in found] == [(0.25, "plain", 2), (0.25, "lazy", 2)]
    assert [item.exponent for item in found] == pytest.approx([2.0, 2.0])
