"""The made-up tokens of benchmarks."""

import pytest
import torch

from jobs.benchmark.tokens import INPUTS


@pytest.mark.parametrize("name", INPUTS)
def test_made_up_tokens_are_seeded_finite_and_no_two_are_the_same(name):
    tokens = INPUTS[name](40, 36, 48)
    assert tokens.shape == (40, 36, 48) and tokens.dtype == torch.bfloat16
    assert torch.equal(tokens, INPUTS[name](40, 36, 48)) and tokens.isfinite().all()
    assert len(torch.unique(tokens.flatten(0, 1), dim=0)) == 40 * 36
