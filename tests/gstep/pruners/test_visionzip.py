"""VisionZip where golden cases do not reach: counts, sums, targets."""

from __future__ import annotations

import pytest
import torch

import gstep
from gstep.pruners.visionzip import evenly_strided, kept_of_frame
from tests.gstep.synthetic import prune


@pytest.mark.parametrize(
    ("size", "ratio", "kept"),
    [
        *[(196, 0.25, 50), (196, 0.2, 40), (196, 0.15, 30), (196, 0.1, 20), (196, 0.5, 98), (196, 784 / 3136, 50)],
        *[(100, 0.25, 25), (16, 0.1, 2), (16, 0.001, 2), (1, 0.5, 1), (1, 1.0, 1), (49, 1.0, 49)],
    ],
)
def test_visionzip_per_frame(size: int, ratio: float, kept: int) -> None:
    assert kept_of_frame(size, ratio) == kept


def test_visionzip_by_hand() -> None:
    """Six tokens a frame, three kept: the two most attended to, and a sum."""
    tokens = torch.arange(12.0).view(1, 6, 2).repeat(2, 1, 1)
    tokens[1] *= 10
    attention = torch.tensor([[0.1, 0.9, 0.2, 0.1, 0.8, 0.0]] * 2)
    evidence = {"token_attention": attention, "token_key": torch.ones(2, 6, 3)}
    pruned = gstep.prune(tokens, 0.5, "visionzip", evidence=evidence)
    assert pruned.index.tolist() == [0, 1, 4, 6, 7, 10]
    assert pruned.merged is not None and pruned.order is not None
    assert pruned.merged.tolist() == [True, False, False] * 2
    # Each frame's dominant tokens in ascending index, then its contextual one: itself plus the mean of 2, 3 and 5.
    assert pruned.order.tolist() == [1, 2, 0, 4, 5, 3]
    mean = tokens[:, [2, 3, 5]].mean(dim=1)
    assert torch.allclose(pruned.tokens[[0, 3]], tokens[:, 0] + mean)


def test_visionzip_sums_end_at_the_largest_number() -> None:
    tokens = torch.full((1, 8, 4), 60000.0, dtype=torch.float16)
    pruned = prune(tokens, method="visionzip", budget=2)
    assert pruned.merged is not None
    assert (pruned.tokens[pruned.merged] == torch.finfo(torch.float16).max).all()


def test_visionzip_targets_are_evenly_strided() -> None:
    cpu = torch.device("cpu")
    assert evenly_strided(10, 3, cpu).tolist() == [0, 3, 6]
    assert evenly_strided(3, 3, cpu).tolist() == [0, 1, 2]
