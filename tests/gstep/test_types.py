"""Budgets, and what the result of a selection says of itself."""

from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gstep
from tests.gstep.synthetic import prune, video


@settings(max_examples=200)
@given(
    ratios=st.tuples(st.floats(0, 1, exclude_min=True), st.floats(0, 1, exclude_min=True)),
    n_total=st.integers(1, 100_000),
)
def test_budget_is_bounded_and_monotone(ratios: tuple[float, float], n_total: int) -> None:
    smaller, larger = (gstep.budget_for(ratio, n_total) for ratio in sorted(ratios))
    assert 1 <= smaller <= larger <= n_total
    assert larger <= max(1, max(ratios) * n_total + 1e-9)


def test_budget_of_a_percentage_is_exact() -> None:
    for percent, n_total in product(range(1, 101), (1, 29, 196, 6272, 99_999)):
        assert gstep.budget_for(percent / 100, n_total) == max(1, percent * n_total // 100)


def test_results_are_equal_where_all_their_tensors_are() -> None:
    tokens = video(3, 8, 8)
    pruned = prune(tokens)
    assert pruned == prune(tokens) and pruned.at(0.25) == pruned
    assert pruned != prune(tokens, 0.5) and pruned != prune(tokens, method="visionzip") and pruned != 1
    others: dict[str, Any] = {"n_total": 25, "retention_ratio": 0.26, "merged": pruned.index > 3, "order": pruned.rank}
    for item in fields(pruned):
        value = getattr(pruned, item.name)
        other = value + 1 if isinstance(value, torch.Tensor) else others[item.name]
        assert pruned != replace(pruned, **{item.name: other}), item.name
        if isinstance(value, torch.Tensor):
            for unlike in (None, value.to(torch.float64 if value.is_floating_point() else torch.int32), value[:-1]):
                assert pruned != replace(pruned, **{item.name: unlike}), item.name


def test_visual_tokens_are_compared_with_their_evidence_and_deepstack_and_have_no_hash() -> None:
    tokens = video(3, 8, 8)
    visual = gstep.VisualTokens(tokens, {"noise": tokens[0, 0]}, (tokens, tokens))
    assert visual == gstep.VisualTokens(tokens.clone(), {"noise": tokens[0, 0].clone()}, (tokens.clone(), tokens))
    others: dict[str, list[Any]] = {"grid": [(2, 4)], "times": [(0.0, 1.0, 2.0)], "tokens": [-tokens]}
    others["evidence"] = [{}, {"noise": tokens[0, 1]}, {"other": tokens[0, 0]}]
    others["deepstack"] = [(), (tokens,), (tokens, -tokens)]
    for name, values in others.items():
        assert all(visual != replace(visual, **{name: value}) for value in values), name
    assert visual != prune(tokens)
    for value in (visual, prune(tokens)):
        with pytest.raises(TypeError, match="unhashable"):
            hash(value)


def test_a_grid_and_times_are_what_is_known_or_the_nearest_guess() -> None:
    for size, grid in ((196, (14, 14)), (12, (3, 4)), (13, (1, 13)), (1, (1, 1))):
        assert gstep.VisualTokens(video(2, size, 4)).known_grid == grid
    visual = gstep.VisualTokens(video(3, 8, 4))
    assert visual.known_times == (0.0, 1.0, 2.0)
    placed = visual.with_positions([4, 2], [0, 0.5, 1.0])
    assert (placed.grid, placed.known_grid, placed.known_times) == ((4, 2), (4, 2), (0.0, 0.5, 1.0))
    # Patches of two frames begin with the first of them; the last patch may have a single one.
    for timestamps in ([0.5, 1, 2, 3, 4, 5], [0.5, 1, 2, 3, 4]):
        assert visual.with_positions(None, timestamps).times == (0.5, 2.0, 4.0)
    for unfit in ([], [0.5], [0.0] * 4):
        assert visual.with_positions(None, unfit).times is None


def test_grids_and_times_that_do_not_fit_are_refused() -> None:
    tokens = video(3, 8, 4)
    assert gstep.prune(tokens, grid=(2, 4), times=[0, 2.5, 3]).n_kept == 6
    for grid in ((3, 3), (8,), 8, (2.0, 4.0), (-2, -4), "24"):
        with pytest.raises(ValueError, match=r"grid must be \(rows, columns\) of the 8 tokens"):
            gstep.prune(tokens, grid=grid)  # type: ignore[arg-type]
    for times in ((0.0, 1.0), (0.0, 1.0, float("nan")), "abc", (0, 1, None), (False, True, True)):
        with pytest.raises(ValueError, match="times must be the seconds of the 3 frames"):
            gstep.prune(tokens, times=times)  # type: ignore[arg-type]
