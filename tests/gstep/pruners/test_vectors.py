"""Directions and averages of groups, by hand."""

import torch

from gstep.pruners.vectors import compute_group_means, normalize_rows


def test_unit_of_any_magnitude_and_of_zero() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e-30, 4e-30]])
    assert torch.allclose(normalize_rows(rows), torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.6, 0.8]]))
    halves = normalize_rows(torch.tensor([[[60000.0, 60000.0]]]).half())  # whose squares are beyond 16 bits
    assert halves.dtype == torch.float32 and torch.allclose(halves, torch.full((1, 1, 2), 0.5**0.5))


def test_the_mean_of_each_group_and_of_none() -> None:
    rows = torch.tensor([[1.0, 0.0], [3.0, 2.0], [5.0, 5.0], [7.0, 7.0]])
    mean, count = compute_group_means(torch.tensor([0, 0, -1, 2]), rows, 3)
    assert mean.tolist() == [[2.0, 1.0], [0.0, 0.0], [7.0, 7.0]]
    assert count.tolist() == [2, 0, 1]
