"""The plain form of the selection: what the others are measured against."""

import torch

from gstep.selection.reference import density_guided_fps
from jobs.benchmark.selection_forms import Plain, plain_steps
from jobs.benchmark.tokens import INPUTS


def test_the_plain_form_is_the_oracle():
    tokens = INPUTS["iid"].make(4, 25, 32).flatten(0, 1)
    density = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = density_guided_fps(tokens.double(), density, 50)
    assert torch.equal(Plain.of(tokens).select(density, 49), expected)


def test_the_plain_form_runs_whole_or_200_steps():
    assert plain_steps(6272, 3584, 1568) == 1567
    assert plain_steps(25088, 3584, 6272) == 200
    assert plain_steps(75264, 3584, 100) == 99
