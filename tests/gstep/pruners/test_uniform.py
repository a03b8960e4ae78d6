"""The uniform control."""

from __future__ import annotations

import numpy as np

import gstep
from tests.gstep.synthetic import video


def test_uniform_takes_the_centres_of_the_strata() -> None:
    for budget in range(1, 66):
        index = gstep.prune(video(5, 13, 2), method="uniform", budget=budget).index.tolist()
        assert index == [int(np.floor((k + 0.5) * 65 / budget)) for k in range(budget)]
