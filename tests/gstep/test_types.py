"""Budgets, and what the result of a selection says of itself."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

import gstep
from tests.gstep.synthetic import prune, video


def test_real_and_nominal_numbers() -> None:
    pruned = prune(video(3, 50, 8), 0.25, "visionzip")
    assert (pruned.n_kept, pruned.budget, pruned.retention_ratio) == (3 * 12, 37, 0.25)
    assert math.isclose(pruned.kept_ratio, 0.24)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    ratios=st.tuples(st.floats(0, 1, exclude_min=True), st.floats(0, 1, exclude_min=True)),
    n_total=st.integers(1, 100_000),
)
def test_budget_is_bounded_and_monotone(ratios: tuple[float, float], n_total: int) -> None:
    smaller, larger = (gstep.budget_for(ratio, n_total) for ratio in sorted(ratios))
    assert 1 <= smaller <= larger <= n_total
    assert larger <= max(1, max(ratios) * n_total + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(percent=st.integers(1, 100), n_total=st.integers(1, 100_000))
def test_budget_of_a_percentage_is_exact(percent: int, n_total: int) -> None:
    assert gstep.budget_for(percent / 100, n_total) == max(1, percent * n_total // 100)
