"""FastV where golden cases do not reach: rounding."""

import numpy as np
import torch

import gstep
from tests.gstep.synthetic import video


def test_fastv_rounds() -> None:
    attention = torch.from_numpy(np.random.default_rng(0).permutation(64)).float()
    for ratio, kept in ((0.15, 10), (0.2, 13), (0.001, 1), (1.0, 64)):
        pruned = gstep.prune(video(4, 16, 8), ratio, "fastv", evidence={"llm_attention": attention})
        assert pruned.index.tolist() == sorted(attention.argsort(descending=True)[:kept].tolist())
