"""VidCom2 where golden cases do not reach: frame budgets, calm channels."""

import torch

from gstep.pruners.vidcom2 import compute_frame_budgets, find_calm_channels
from tests.gstep.synthetic import video


def test_vidcom2_rounds_half_to_even_and_keeps_at_least_one() -> None:
    typical = torch.ones(3, 10, dtype=torch.float64)
    assert compute_frame_budgets(typical, 0.25).tolist() == [2, 2, 2]
    assert compute_frame_budgets(typical, 0.35).tolist() == [4, 4, 4]
    assert compute_frame_budgets(typical, 0.001).tolist() == [1, 1, 1]
    assert compute_frame_budgets(torch.cat([typical, typical[:1] - 1]), 1.0).tolist() == [8, 8, 8, 10]


def test_vidcom2_keeps_the_calm_half_of_the_channels() -> None:
    tokens = video(4, 50, 7) * torch.tensor([5.0, 1.0, 4.0, 0.1, 3.0, 6.0, 2.0])
    assert find_calm_channels(tokens).tolist() == [1, 3, 6]
    assert find_calm_channels(tokens[..., :1]).tolist() == [0]
