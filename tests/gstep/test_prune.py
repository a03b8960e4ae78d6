"""gstep.prune: the controls, parameters and what is refused; what every method promises is in test_contract."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gstep
from gstep.pruners.base import Pruner, Selection
from tests.gstep.synthetic import FLOATS, video

RATIOS = [0.1, 0.15, 0.2, 0.25, 0.5, 1.0]


def test_random_is_the_start_of_one_permutation() -> None:
    tokens = video(5, 13, 8)
    pruned = gstep.prune(tokens, method="random", budget=20, seed=7)
    expected = np.random.default_rng(7).permutation(65)[:20]
    assert pruned.index[pruned.selection_order()].tolist() == expected.tolist()
    assert pruned.index.tolist() != gstep.prune(tokens, method="random", budget=20, seed=8).index.tolist()


def test_uniform_takes_the_centres_of_the_strata() -> None:
    for budget in range(1, 66):
        index = gstep.prune(video(5, 13, 2), method="uniform", budget=budget).index.tolist()
        assert index == [int(np.floor((k + 0.5) * 65 / budget)) for k in range(budget)]


def test_topk_is_the_densest() -> None:
    tokens = video(5, 13, 8)
    rho = gstep.prune(tokens, method="none", retention_ratio=1.0)
    assert rho.density is None
    full = gstep.prune(tokens, 1.0, "topk", fusion="spatial", sigma=2)
    assert full.density is not None
    pruned = gstep.prune(tokens, method="topk", budget=10, fusion="spatial", sigma=2)
    assert pruned.index.tolist() == sorted(np.argsort(-full.density.numpy(), kind="stable")[:10].tolist())


def test_a_static_video_keeps_its_first_frame() -> None:
    """Without density the start is index 0, and copies of a token are taken last."""
    tokens = video(1, 37, 33, seed=3).expand(5, 37, 33)
    for dtype in FLOATS:
        assert gstep.prune(tokens.to(dtype), 0.2).index.tolist() == list(range(37))


def test_parameters_reach_the_method() -> None:
    tokens = video(8, 20, 16)
    default = gstep.prune(tokens).index.tolist()
    assert gstep.prune(tokens, alpha=1).index.tolist() == gstep.prune(tokens, method="fps").index.tolist() != default
    assert gstep.prune(tokens, alpha=0).index.tolist() == gstep.prune(tokens, method="topk").index.tolist() != default
    changes: list[dict[str, Any]] = [{"sigma": 0.4}, {"smoothing": "raw"}, {"radius": 0}, {"fusion": "spatial"}]
    changes += [{"fusion": "temporal"}, {"beta": 1.0}, {"eps": 10}, {"boundary": "zero", "sigma": 3}]
    for params in changes:
        density = gstep.prune(tokens, **params).density
        assert density is not None
        same = torch.equal(density, gstep.prune(tokens).density)  # type: ignore[arg-type]
        assert not same or gstep.prune(tokens, **params).index.tolist() != default, params


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_tokens(value: float, dtype: torch.dtype) -> None:
    tokens = video(4, 5, 6).to(dtype)
    tokens[2, 3, 1] = tokens[2, 3, 4] = tokens[3, 0, 0] = value
    with pytest.raises(ValueError, match=r"3 non-finite .* frame 2, token 3"):
        gstep.prune(tokens)


def test_none_refuses_a_smaller_budget() -> None:
    with pytest.raises(ValueError, match="keeps all 6 tokens; got budget 5"):
        gstep.prune(video(2, 3, 4), method="none", budget=5)


@pytest.mark.parametrize("seed", [-1, 0.5, "0", None, True])
def test_bad_seed(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed"):
        gstep.prune(video(2, 3, 4), method="random", seed=seed)


def test_numpy_numbers_are_numbers() -> None:
    tokens = video(5, 13, 8)
    ours = gstep.prune(tokens, np.float32(0.25), alpha=np.float64(0.5), radius=np.int64(3), seed=np.int32(0))  # type: ignore[arg-type]
    assert ours.index.tolist() == gstep.prune(tokens).index.tolist()
    assert gstep.prune(tokens, budget=np.int64(3)).index.shape == (3,)  # type: ignore[arg-type]


NUMBERS = [float("nan"), float("inf"), -1, "1", True, None, [1]]
BAD_PARAMS = [
    *(("gstep", "alpha", value) for value in [*NUMBERS, 1.01]),
    *(("gstep", "beta", value) for value in [*NUMBERS, 0]),
    *(("fps", "beta", value) for value in [*NUMBERS, 0]),
    *((method, "sigma", value) for method in ("gstep", "topk", "fps") for value in [*NUMBERS, 0, 1e9]),
    *((method, "eps", value) for method in ("gstep", "topk", "fps") for value in [*NUMBERS, 0]),
    *(("gstep", "radius", value) for value in [-1, 1.0, "1", True, float("nan"), 10**9]),
    *(("gstep", "smoothing", value) for value in ["gauss", "", None, 1, ["raw"]]),
    *(("gstep", "boundary", value) for value in ["wrap", None, 0]),
    *(("gstep", "fusion", value) for value in ["both", None, True]),
    *(("fps", "start", value) for value in ["random", None, 0]),
    *(("fastvid", name, value) for name in ("c", "p") for value in [*NUMBERS, 0, 1.5]),
    *(("fastvid", name, value) for name in ("d", "beta") for value in [*NUMBERS, 1.01]),
    *(("fastvid", "ignore", value) for value in [float("nan"), None, -1.01, 1.01]),
    *(("fastvid", "tau", value) for value in [float("nan"), 1.01, "1", True]),
    *(("fastvid", "variant", value) for value in ["llama", None, 0]),
    *(("cdpruner", "mode", value) for value in ["frame", None, 0]),
    *(("fastv", "K", value) for value in [*NUMBERS, 0, 2.0]),
]


@pytest.mark.parametrize(("method", "name", "value"), BAD_PARAMS)
def test_bad_parameters(method: str, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*; got "):
        gstep.prune(video(2, 3, 4), method=method, **{name: value})


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


@dataclass(frozen=True, kw_only=True)
class Needy(Pruner):
    name: ClassVar[str] = "needy"
    nested: ClassVar[bool] = False
    merges: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"token_key", "noise"})

    def select(self, visual: gstep.VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        index = torch.arange(budget).flip(0)
        return Selection(index, tokens=index[:, None].float().expand(-1, 4), merged=index > 0)


def test_missing_evidence_is_named() -> None:
    noise = {"noise": torch.zeros(6)}
    with pytest.raises(gstep.MissingEvidence, match=r"'needy' .*: noise, token_key$"):
        Needy().prune(gstep.VisualTokens(video(2, 3, 4)))
    with pytest.raises(gstep.MissingEvidence, match=r": token_key$"):
        Needy().prune(gstep.VisualTokens(video(2, 3, 4), noise))


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


def test_importing_gstep_loads_no_model_code() -> None:
    code = "import gstep, sys; gstep.make_pruner('gstep'); print('transformers' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = gstep.nonsense  # type: ignore[attr-defined]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), method=st.sampled_from(["gstep", "topk", "fps"]), ratio=st.sampled_from(RATIOS))
def test_permuting_tokens_within_frames_permutes_the_selection(seed: int, method: str, ratio: float) -> None:
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.normal(0.3, 1.0, (5, 12, 16)))
    source = np.stack([rng.permutation(12) + 12 * frame for frame in range(5)]).reshape(-1)
    shuffled = tokens.flatten(0, 1)[torch.from_numpy(source)].reshape(tokens.shape)
    ours = gstep.prune(shuffled, ratio, method)
    expected = gstep.prune(tokens, ratio, method)
    order = source[ours.index[ours.selection_order()].numpy()]
    assert order.tolist() == expected.index[expected.selection_order()].tolist()


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    ratios=st.tuples(st.floats(0, 1, exclude_min=True), st.floats(0, 1, exclude_min=True)),
    n_total=st.integers(1, 100_000),
)
def test_budget_is_bounded_and_monotone(ratios: tuple[float, float], n_total: int) -> None:
    smaller, larger = (gstep.budget_for(ratio, n_total) for ratio in sorted(ratios))
    assert 1 <= smaller <= larger <= n_total
    assert larger <= max(1, max(ratios) * n_total + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(percent=st.integers(1, 100), n_total=st.integers(1, 100_000))
def test_budget_of_a_percentage_is_exact(percent: int, n_total: int) -> None:
    assert gstep.budget_for(percent / 100, n_total) == max(1, percent * n_total // 100)
