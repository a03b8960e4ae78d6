"""The parameters of the density that methods share."""

from typing import Any

import torch

from gstep.density import spatio_temporal_density
from gstep.pruners.topk import TopK
from tests.gstep.synthetic import video

CHANGES: list[dict[str, Any]] = [{"sigma": 2, "boundary": "zero"}, {"smoothing": "box", "radius": 2}, {"eps": 1}]


def test_every_parameter_reaches_the_density() -> None:
    tokens = video(6, 9, 16)
    for params in ({}, {"fusion": "spatial"}, *CHANGES):
        rho_M, temporal_T = TopK(**params).density(tokens)
        expected_TN, expected_T = spatio_temporal_density(tokens, **params)
        assert torch.equal(rho_M, expected_TN.flatten()) and torch.equal(temporal_T, expected_T)
        assert not params or not torch.equal(rho_M, TopK().density(tokens)[0])
