"""The bound on cosines."""

from __future__ import annotations

import pytest
import torch

from gstep.selection.subspace import MARGIN, Subspace
from tests.gstep.selection.videos import KINDS, video


@pytest.mark.parametrize("kind", KINDS)
def test_no_cosine_is_above_its_bound(kind: str) -> None:
    tokens = video(kind, hidden=512).flatten(0, 1).float()
    tokens[5], tokens[7] = 0, tokens[8]
    unit = torch.nn.functional.normalize(tokens.double(), dim=1)
    for dims in (1, 16, 64):
        subspace = Subspace.of(unit[::2].float(), dims)
        inverse = tokens.norm(dim=1).reciprocal().nan_to_num(posinf=0)
        coordinates = subspace.coordinates(tokens, inverse)
        slack = (coordinates @ coordinates.T).double() - unit @ unit.T
        assert slack.min() > -MARGIN / 3
        assert -1e-6 < subspace.residual <= 1 + 1e-6
    if kind == "low rank":  # else a bound that is always 2 would do
        assert slack.mean() < 0.2
