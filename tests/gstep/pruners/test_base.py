"""What every method shares: asked-for evidence, merged tokens, parameters in one form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

import gstep
from gstep.pruners.base import Pruner, Selection
from tests.gstep.synthetic import video


@dataclass(frozen=True, kw_only=True)
class Needy(Pruner):
    name: ClassVar[str] = "needy"
    nested: ClassVar[bool] = False
    merges: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"token_key", "noise"})

    def select(self, visual: gstep.VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        index = torch.arange(budget).flip(0)
        return Selection(index, tokens=index[:, None].float().expand(-1, 4), merged=index > 0)


def test_merged_tokens_follow_their_index() -> None:
    evidence = {"noise": torch.zeros(6), "token_key": torch.zeros(2, 3, 1)}
    pruned = Needy().prune(gstep.VisualTokens(video(2, 3, 4), evidence), budget=3)
    assert pruned.index.tolist() == [0, 1, 2] == pruned.tokens[:, 0].tolist()
    assert pruned.merged is not None
    assert pruned.merged.tolist() == [False, True, True]
    assert pruned.rank is None


def test_equal_parameters_have_one_description() -> None:
    ours = gstep.make_pruner("gstep", alpha=1, sigma=np.float32(2), radius=np.int8(3))
    assert json.dumps(ours.params()) == json.dumps(gstep.make_pruner("gstep", alpha=1.0, sigma=2.0, radius=3).params())
    assert gstep.make_pruner("gstep").params() == {
        "smoothing": "gaussian",
        "sigma": 1.0,
        "radius": None,
        "boundary": "replicate",
        "fusion": "full",
        "eps": 1e-6,
        "alpha": 0.5,
        "beta": 1e-6,
    }
