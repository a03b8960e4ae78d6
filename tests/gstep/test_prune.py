"""gstep.prune: tokens, seeds, names and parameters, and merged tokens of any method."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gstep
from gstep.pruners.base import Pruner, Selection
from tests.gstep.synthetic import FLOATS, video

RATIOS = [0.1, 0.15, 0.2, 0.25, 0.5, 1.0]


def test_unknown_names_say_what_is_known() -> None:
    for method in ("gsteb", None, ["gstep"]):
        with pytest.raises(ValueError, match=r"unknown method .*none, random, uniform, topk, fps, gstep"):
            gstep.make_pruner(method)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unknown parameter alhpa .*'gstep'.*alpha, beta"):
        gstep.prune(video(2, 3, 4), alhpa=0.5)
    with pytest.raises(ValueError, match=r"unknown parameter alpha of method 'random'; it accepts: none"):
        gstep.make_pruner("random", alpha=0.5)
    with pytest.raises(ValueError, match="unknown parameter name"):
        gstep.make_pruner("gstep", name="mine")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = gstep.nonsense  # type: ignore[attr-defined]


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), method=st.sampled_from(["gstep", "topk", "fps"]), ratio=st.sampled_from(RATIOS))
def test_permuting_tokens_within_frames_permutes_the_selection(seed: int, method: str, ratio: float) -> None:
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.normal(0.3, 1.0, (5, 12, 16)))
    source = np.stack([rng.permutation(12) + 12 * frame for frame in range(5)]).reshape(-1)
    shuffled = tokens.flatten(0, 1)[torch.from_numpy(source)].reshape(tokens.shape)
    ours = gstep.prune(shuffled, ratio, method)
    expected = gstep.prune(tokens, ratio, method)
    order = source[ours.index[ours.compute_selection_order()].numpy()]
    assert order.tolist() == expected.index[expected.compute_selection_order()].tolist()


def test_non_finite_tokens_and_bad_seeds_are_refused() -> None:
    for dtype, value in product(FLOATS, (float("nan"), float("inf"), -float("inf"))):
        tokens = video(4, 5, 6).to(dtype)
        tokens[2, 3, 1] = tokens[2, 3, 4] = tokens[3, 0, 0] = value
        with pytest.raises(ValueError, match=r"3 non-finite .* frame 2, token 3"):
            gstep.prune(tokens)
    for seed in (-1, 0.5, "0", None, True):
        with pytest.raises(ValueError, match="seed"):
            gstep.prune(video(2, 3, 4), method="random", seed=seed)  # type: ignore[arg-type]


def test_numpy_numbers_are_numbers() -> None:
    tokens = video(5, 13, 8)
    ours = gstep.prune(tokens, np.float32(0.25), alpha=np.float64(0.5), radius=np.int64(3), seed=np.int32(0))  # type: ignore[arg-type]
    assert ours.index.tolist() == gstep.prune(tokens).index.tolist()
    assert gstep.prune(tokens, budget=np.int64(3)).index.shape == (3,)  # type: ignore[arg-type]


NUMBERS = [float("nan"), float("inf"), -1]  # values of other types are those of test_params
BAD_PARAMS = [
    *(("gstep", "alpha", value) for value in [*NUMBERS, 1.01]),
    *(("gstep", "beta", value) for value in [*NUMBERS, 0]),
    *((method, "beta", value) for method in ("fps", "novelty") for value in [*NUMBERS, 0]),
    *(("novelty", "floor", value) for value in NUMBERS),
    *((method, "sigma", value) for method in ("gstep", "topk", "fps") for value in [*NUMBERS, 0, 3334]),
    *((method, "eps", value) for method in ("gstep", "topk", "fps") for value in [*NUMBERS, 0]),
    *(("gstep", "radius", value) for value in [-1, 10_001]),
    *(("gstep", "smoothing", value) for value in ["gauss", ""]),
    ("gstep", "boundary", "wrap"),
    ("gstep", "fusion", "both"),
    ("fps", "start", "random"),
    *(("fastvid", name, value) for name in ("c", "p") for value in [*NUMBERS, 0, 1.5]),
    *(("fastvid", name, value) for name in ("d", "beta") for value in [*NUMBERS, 1.01]),
    *(("fastvid", "ignore", value) for value in [float("nan"), -1.01, 1.01]),
    *(("fastvid", "tau", value) for value in [float("nan"), 1.01]),
    *((method, "variant", "llama") for method in ("fastvid", "visionzip")),
    *(("visionzip", "dominant_share", value) for value in [*NUMBERS, 1]),
    *(("visionzip", "neighbours", value) for value in [0, -1]),
    *(("holitom", name, value) for name in ("D", "beta", "tau") for value in [float("nan"), 1.01]),
    *(("holitom", name, 0) for name in ("K", "max_window")),
    *(("flashvid", name, value) for name in ("expansion", "min_segment_num") for value in [*NUMBERS, 0]),
    *(("flashvid", name, 1.01) for name in ("alpha", "temporal_threshold", "segment_threshold")),
    ("cdpruner", "mode", "frame"),
    ("vcast", "tau", 0),
    *(("fastv", "K", value) for value in [-1, 0]),
]


def test_bad_parameters() -> None:
    for method, name, value in BAD_PARAMS:
        with pytest.raises(ValueError, match=rf"{name} must be .*; got "):
            gstep.prune(video(2, 3, 4), method=method, **{name: value})


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
    assert pruned.merged is not None and pruned.merged.tolist() == [False, True, True] and pruned.rank is None


def test_equal_parameters_have_one_description() -> None:
    ours = gstep.make_pruner("gstep", alpha=1, sigma=np.float32(2), radius=np.int8(3))
    assert json.dumps(ours.params()) == json.dumps(gstep.make_pruner("gstep", alpha=1.0, sigma=2.0, radius=3).params())
