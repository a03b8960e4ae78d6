"""The public contract: gstep.prune over every method of the table, validation, and the nested selections."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gstep
from gstep.pruners.base import Pruner, Selection

METHODS = [name for name in gstep.PRUNERS if not gstep.PRUNERS[name].needs]
NESTED = [name for name in METHODS if gstep.PRUNERS[name].nested]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
RATIOS = [0.1, 0.15, 0.2, 0.25, 0.5, 1.0]


def video(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0.3, 1.0, shape)).float()


def edge_videos() -> dict[str, torch.Tensor]:
    constant_frame, zero_token = video(4, 9, 8), video(4, 9, 8)
    constant_frame[1] = constant_frame[1, :1]
    zero_token[2, 3] = 0
    return {
        "plain": video(6, 9, 16),
        "one frame": video(1, 16, 8),
        "one token a frame": video(12, 1, 8),
        "one token": video(1, 1, 8),
        "one channel": video(4, 9, 1),
        "equal tokens": video(1, 1, 8).expand(4, 9, 8),
        "static": video(1, 9, 8).expand(5, 9, 8),
        "constant frame": constant_frame,
        "zero token": zero_token,
        "zero": torch.zeros(4, 9, 8),
        "huge": video(4, 9, 8) * 1e30,
        "tiny": video(4, 9, 8) * 1e-30,
    }


EDGES = edge_videos()


def assert_same(ours: gstep.PrunedTokens, expected: gstep.PrunedTokens) -> None:
    for name in ("tokens", "index", "rank", "merged", "density", "temporal_density"):
        got, wanted = getattr(ours, name), getattr(expected, name)
        assert (got is None) == (wanted is None), name
        assert got is None or torch.equal(got, wanted), name
    assert (ours.n_total, ours.retention_ratio) == (expected.n_total, expected.retention_ratio)


def assert_contract(pruned: gstep.PrunedTokens, tokens: torch.Tensor, method: str, budget: int) -> None:
    pruner = gstep.PRUNERS[method]
    n_total = tokens.shape[0] * tokens.shape[1]
    assert pruned.n_total == n_total
    assert pruned.index.dtype == torch.int64
    assert pruned.index.shape == (budget,)
    assert (pruned.index.diff() > 0).all()
    assert pruned.index[0] >= 0
    assert pruned.index[-1] < n_total
    assert pruned.tokens.dtype == tokens.dtype
    assert pruned.tokens.device == pruned.index.device == tokens.device
    assert (pruned.merged is None) or pruner.merges
    if not pruner.merges:
        assert torch.equal(pruned.tokens, tokens.flatten(0, 1)[pruned.index])
    assert (pruned.rank is not None) == pruned.nested == pruner.nested
    if pruned.rank is not None:
        assert pruned.rank.dtype == torch.int64
        assert sorted(pruned.rank.tolist()) == list(range(budget))
    if pruned.density is not None:
        assert pruned.density.dtype == torch.float32
        assert pruned.density.shape == (budget,)
        assert (torch.isfinite(pruned.density) & (pruned.density >= 0)).all()
    if pruned.temporal_density is not None:
        assert pruned.temporal_density.dtype == torch.float32
        assert pruned.temporal_density.shape == tokens.shape[:1]
        assert torch.isfinite(pruned.temporal_density).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("method", METHODS)
def test_contract(method: str, edge: str, dtype: torch.dtype) -> None:
    tokens = EDGES[edge].to(dtype)
    if not torch.isfinite(tokens).all():
        tokens = tokens.nan_to_num()
    n_total = tokens.shape[0] * tokens.shape[1]
    before = tokens.clone()
    for budget in {n_total} if method == "none" else {1, max(1, n_total // 2), n_total}:
        pruned = gstep.prune(tokens, method=method, budget=budget)
        assert_contract(pruned, tokens, method, budget)
        assert pruned.retention_ratio == budget / n_total
        assert_same(gstep.prune(tokens, method=method, budget=budget), pruned)
    assert torch.equal(tokens, before)


@pytest.mark.parametrize("ratio", [0.001, *RATIOS])
@pytest.mark.parametrize("method", METHODS)
def test_ratio(method: str, ratio: float) -> None:
    tokens = video(5, 13, 8)
    kept = 1.0 if method == "none" else ratio
    pruned = gstep.prune(tokens, ratio, method)
    assert_contract(pruned, tokens, method, max(1, int(kept * 65 + 1e-9)))
    assert pruned.retention_ratio == kept


@pytest.mark.parametrize("method", METHODS)
def test_a_reused_pruner_gives_what_prune_gives(method: str) -> None:
    pruner = gstep.make_pruner(method)
    for seed in range(3):
        tokens = video(5, 13, 8, seed=seed)
        ours = pruner.prune(gstep.VisualTokens(tokens), 0.2, seed=seed)
        assert_same(ours, gstep.prune(tokens, 0.2, method, seed=seed))


@pytest.mark.parametrize(("method", "params"), [*((name, {}) for name in METHODS), ("fps", {"start": "isolated"})])
def test_gradients_strides_and_autocast_do_not_matter(method: str, params: dict[str, Any]) -> None:
    tokens = video(5, 13, 8, seed=1)
    expected = gstep.prune(tokens, method=method, **params)
    grown = tokens.clone().requires_grad_()
    strided = torch.stack([tokens.transpose(0, 2), torch.zeros(8, 13, 5)], dim=-1)[..., 0].transpose(0, 2)
    assert not strided.is_contiguous()
    with torch.autocast("cpu", torch.bfloat16):
        for same in (grown, strided, tokens):
            pruned = gstep.prune(same, method=method, **params)
            assert not pruned.tokens.requires_grad
            assert_same(pruned, expected)
    with torch.inference_mode():
        assert_same(gstep.prune(tokens.clone(), method=method, **params), expected)


@pytest.mark.parametrize("method", METHODS)
def test_the_default_dtype_does_not_matter(method: str) -> None:
    tokens = video(5, 13, 8)
    expected = gstep.prune(tokens, method=method)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(gstep.prune(tokens, method=method), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_contract_on_cuda(method: str, dtype: torch.dtype) -> None:
    tokens = video(6, 40, 64).to(dtype)
    budget = 240 if method == "none" else 60
    pruned = gstep.prune(tokens.cuda(), method=method, budget=budget)
    assert_contract(pruned, tokens.cuda(), method, budget)
    assert torch.equal(pruned.index.cpu(), gstep.prune(tokens, method=method, budget=budget).index)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("method", NESTED)
def test_at_is_pruning_at_that_ratio(method: str, edge: str) -> None:
    tokens = EDGES[edge]
    for larger in (0.25, 1.0):
        pruned = gstep.prune(tokens, larger, method)
        for ratio in RATIOS:
            if ratio <= larger:
                assert_same(pruned.at(ratio), gstep.prune(tokens, ratio, method))


@pytest.mark.parametrize("method", METHODS)
def test_at_of_the_own_ratio_and_of_impossible_ones(method: str) -> None:
    pruned = gstep.prune(video(5, 13, 8), 0.5, method)
    assert_same(pruned.at(pruned.retention_ratio), pruned)
    for bad in (0, -0.1, 1.1, float("nan"), "0.1", True):
        with pytest.raises(ValueError, match="retention_ratio"):
            pruned.at(bad)  # type: ignore[arg-type]
    if method != "none":
        with pytest.raises(ValueError, match=r"larger than the 0\.5"):
            pruned.at(0.6)
    if method not in NESTED:
        with pytest.raises(ValueError, match="no order of selection"):
            pruned.at(0.25)


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


BAD_TOKENS: list[tuple[Any, str]] = [
    (None, "NoneType"),
    (np.zeros((2, 3, 4)), "ndarray"),
    (torch.zeros(3, 4), r"shape \[3, 4\]"),
    (torch.zeros(1, 2, 3, 4), r"shape \[1, 2, 3, 4\]"),
    (torch.zeros(0, 3, 4), r"shape \[0, 3, 4\]"),
    (torch.zeros(2, 0, 4), r"shape \[2, 0, 4\]"),
    (torch.zeros(2, 3, 0), r"shape \[2, 3, 0\]"),
    (torch.zeros(2, 3, 4, dtype=torch.int32), "torch.int32"),
    (torch.zeros(2, 3, 4, dtype=torch.bool), "torch.bool"),
    (torch.zeros(2, 3, 4, dtype=torch.complex64), "torch.complex64"),
]


@pytest.mark.parametrize(("tokens", "got"), BAD_TOKENS)
@pytest.mark.parametrize("method", METHODS)
def test_bad_tokens(method: str, tokens: Any, got: str) -> None:
    with pytest.raises(ValueError, match=got):
        gstep.prune(tokens, method=method)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_tokens(value: float, dtype: torch.dtype) -> None:
    tokens = video(4, 5, 6).to(dtype)
    tokens[2, 3, 1] = tokens[2, 3, 4] = tokens[3, 0, 0] = value
    with pytest.raises(ValueError, match=r"3 non-finite .* frame 2, token 3"):
        gstep.prune(tokens)


@pytest.mark.parametrize("ratio", [0, 0.0, -0.25, 1.01, 25, float("nan"), float("inf"), "0.25", None, True])
@pytest.mark.parametrize("method", METHODS)
def test_bad_ratio(method: str, ratio: Any) -> None:
    with pytest.raises(ValueError, match="retention_ratio"):
        gstep.prune(video(2, 3, 4), ratio, method)


@pytest.mark.parametrize("budget", [0, -1, 7, 2.0, "2", True, float("nan")])
@pytest.mark.parametrize("method", METHODS)
def test_bad_budget(method: str, budget: Any) -> None:
    with pytest.raises(ValueError, match=r"budget .*in \[1, 6\]"):
        gstep.prune(video(2, 3, 4), method=method, budget=budget)


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

    def select(self, visual: gstep.VisualTokens, budget: int, seed: int) -> Selection:
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


@pytest.mark.parametrize("method", METHODS)
def test_a_pruner_describes_itself(method: str) -> None:
    pruner = gstep.make_pruner(method)
    assert pruner.name == method
    assert json.loads(json.dumps(pruner.params())) == pruner.params()
    assert gstep.make_pruner(method, **pruner.params()) == pruner
    with pytest.raises((FrozenInstanceError, AttributeError)):
        pruner.alpha = 0.1  # type: ignore[attr-defined]


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
