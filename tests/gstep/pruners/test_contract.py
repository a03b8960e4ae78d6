"""What every method of the table promises; a new one is taken in by itself, its evidence is made up by name."""

import json
from dataclasses import FrozenInstanceError
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import gstep
from gstep.methods import QUESTION_METHODS, VIDEO_METHODS
from tests.gstep.synthetic import FLOATS, assert_same, defaults, edge_videos, evidence_for, needs_cuda, prune, video

METHODS = list(gstep.PRUNERS)
NESTED = [name for name in METHODS if gstep.PRUNERS[name].nested]
# Every method as it is, and with what changes its way or its evidence.
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in METHODS),
    ("fps", {"start": "isolated"}),
    ("fastvid", {"variant": "qwen"}),
    ("visionzip", {"variant": "qwen"}),
    ("tango", {"variant": "qwen"}),
    *((name, {"mu_s": 0.3}) for name in ("visionzip", "fastvid", "flashvid")),
    ("holitom", {"mu_s": 0.3, "mu_t": 0.3}),
    ("cdpruner", {"mode": "per_frame"}),
]
SEEDED = [(name, params) for name, params in CASES if "mu_s" not in params]  # sink scores leave nothing to a draw
RATIOS = [0.1, 0.15, 0.2, 0.25, 0.5, 1.0]
EDGES = edge_videos()


def assert_contract(pruned: gstep.PrunedTokens, tokens: torch.Tensor, method: str, budget: int) -> None:
    pruner = gstep.PRUNERS[method]
    n_total, n_kept = tokens.shape[0] * tokens.shape[1], len(pruned.index)
    assert (pruned.n_kept, pruned.budget, pruned.n_total) == (n_kept, budget, n_total)
    assert pruned.kept_ratio == n_kept / n_total
    assert 1 <= n_kept <= n_total and (n_kept == budget or not pruner.exact)
    assert pruned.index.dtype == torch.int64
    assert (pruned.index.diff() > 0).all() and pruned.index[0] >= 0 and pruned.index[-1] < n_total
    assert (pruned.tokens.shape, pruned.tokens.dtype) == ((n_kept, tokens.shape[2]), tokens.dtype)
    assert pruned.tokens.device == pruned.index.device == tokens.device
    assert torch.isfinite(pruned.tokens).all()
    assert (pruned.merged is not None) == pruner.merges
    own = torch.ones_like(pruned.index, dtype=torch.bool) if pruned.merged is None else ~pruned.merged
    assert torch.equal(pruned.tokens[own], tokens.flatten(0, 1)[pruned.index[own]])
    assert (pruned.rank is not None) == pruned.nested == pruner.nested
    assert (pruned.order is not None) == pruner.reorders
    for places in (pruned.rank, pruned.order):
        if places is not None:
            assert places.dtype == torch.int64 and sorted(places.tolist()) == list(range(n_kept))
    for density, shape in ((pruned.density, (n_kept,)), (pruned.temporal_density, tokens.shape[:1])):
        if density is not None:
            assert (density.dtype, density.shape) == (torch.float32, shape)
            assert (torch.isfinite(density) & (density >= 0)).all()


@pytest.mark.parametrize(("method", "params"), CASES)
def test_contract(method: str, params: dict[str, Any]) -> None:
    for number, edge in enumerate(EDGES.values(), CASES.index((method, params))):
        dtype = FLOATS[number % len(FLOATS)]  # of all methods together each edge in each
        check_contract(method, params, edge.to(dtype).nan_to_num())  # what is huge is infinite in float16


def check_contract(method: str, params: dict[str, Any], tokens: torch.Tensor) -> None:
    pruner = gstep.make_pruner(method, **params)
    evidence = evidence_for(pruner, tokens)
    before = {"tokens": tokens.clone(), **{name: value.clone() for name, value in evidence.items()}}
    n_total = tokens.shape[0] * tokens.shape[1]
    for budget in {n_total} if method == "none" else {1, max(1, n_total // 2), n_total}:
        pruned = pruner.prune(gstep.VisualTokens(tokens, evidence), budget=budget)
        assert_contract(pruned, tokens, method, budget)
        assert pruned.retention_ratio == budget / n_total
    assert_same(pruner.prune(gstep.VisualTokens(tokens, evidence), budget=budget), pruned)
    assert all(torch.equal(before[name], value) for name, value in {"tokens": tokens, **evidence}.items())


@pytest.mark.parametrize(("method", "params"), CASES)
def test_a_ratio_is_its_budget_and_a_budget_its_share_of_the_tokens(method: str, params: dict[str, Any]) -> None:
    tokens = video(5, 13, 8)
    for ratio in (0.001, 0.15, 0.25, 1.0):
        kept = 1.0 if method == "none" else ratio
        pruned = prune(tokens, ratio, method, **params)
        assert_contract(pruned, tokens, method, max(1, int(kept * 65 + 1e-9)))
        assert pruned.retention_ratio == kept
    if method != "none":
        tokens = video(8, 16, 32)
        assert_same(prune(tokens, method=method, budget=32, **params), prune(tokens, 0.25, method, **params))


@pytest.mark.parametrize(("method", "params"), SEEDED)
def test_only_what_is_seeded_follows_the_seed(method: str, params: dict[str, Any]) -> None:
    """Of tokens that are all as far from each other, a draw alone can decide."""
    tokens = torch.eye(20).expand(4, 20, 20)
    first, *others = (prune(tokens, 0.2, method, seed=seed, **params).index.tolist() for seed in range(4))
    assert any(other != first for other in others) == gstep.PRUNERS[method].seeded


@pytest.mark.parametrize(("method", "params"), CASES)
def test_gradients_strides_settings_of_torch_and_others_evidence_do_not_matter(
    method: str, params: dict[str, Any]
) -> None:
    tokens = video(5, 13, 8, seed=1)
    expected = prune(tokens, method=method, **params)
    grown = tokens.clone().requires_grad_()
    strided = torch.stack([tokens.transpose(0, 2), torch.zeros(8, 13, 5)], dim=-1)[..., 0].transpose(0, 2)
    assert not strided.is_contiguous()
    with torch.autocast("cpu", torch.bfloat16):
        for same in (grown, strided, tokens):
            pruned = prune(same, method=method, **params)
            assert not pruned.tokens.requires_grad
            assert_same(pruned, expected)
    with defaults(torch.float64, "meta"):  # on which nothing holds values
        pruned = prune(tokens, method=method, **params)
        positions = pruned.compute_selection_order()
    assert_same(pruned, expected)
    assert torch.equal(positions, expected.compute_selection_order())
    with torch.inference_mode():
        assert_same(prune(tokens.clone(), method=method, **params), expected)
    evidence: dict[str, Any] = {**evidence_for(gstep.make_pruner(method, **params), tokens), "mine": "anything"}
    assert_same(gstep.prune(tokens, method=method, evidence=evidence, **params), expected)


@needs_cuda
@pytest.mark.parametrize(("method", "params"), CASES)
def test_contract_on_cuda(method: str, params: dict[str, Any]) -> None:
    budget = 240 if method == "none" else 60
    for dtype in FLOATS:
        tokens = video(6, 40, 64).to(dtype)
        pruned = prune(tokens.cuda(), method=method, budget=budget, **params)
        assert_contract(pruned, tokens.cuda(), method, budget)
        assert_same(prune(tokens.cuda(), method=method, budget=budget, **params), pruned)
        assert torch.equal(pruned.index.cpu(), prune(tokens, method=method, budget=budget, **params).index)


@pytest.mark.parametrize("method", NESTED)
def test_at_is_pruning_at_that_ratio(method: str) -> None:
    for tokens in EDGES.values():
        whole, quarter = (prune(tokens, larger, method) for larger in (1.0, 0.25))
        for ratio in RATIOS:
            expected = prune(tokens, ratio, method)
            assert_same(whole.at(ratio), expected)
            if ratio <= 0.25:
                assert_same(quarter.at(ratio), expected)


@pytest.mark.parametrize("method", ["none", "gstep", "visionzip"])
def test_at_of_the_own_ratio_and_of_impossible_ones(method: str) -> None:
    pruned = prune(video(5, 13, 8), 0.5, method)
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


BAD_TOKENS: list[tuple[Any, str]] = [
    (None, "NoneType"),
    (np.zeros((2, 3, 4)), "ndarray"),
    *((torch.zeros(s), rf"shape \{list(s)}") for s in ((3, 4), (1, 2, 3, 4), (0, 3, 4), (2, 0, 4), (2, 3, 0))),
    *((torch.zeros(2, 3, 4, dtype=d), str(d)) for d in (torch.int32, torch.bool, torch.complex64)),
    (torch.zeros(2, 3, 4).to_sparse(), "torch.sparse_coo"),
    (torch.nested.as_nested_tensor([torch.zeros(3, 4), torch.zeros(2, 4)], layout=torch.jagged), "a nested one"),
]


@pytest.mark.parametrize("method", ["gstep"])
def test_bad_tokens_ratios_and_budgets(method: str) -> None:
    for bad, got in BAD_TOKENS:
        with pytest.raises(ValueError, match=got):
            gstep.prune(bad, method=method)
    tokens = video(2, 3, 4)
    with pytest.raises(ValueError, match="evidence must map names to tensors; got Tensor"):
        gstep.prune(tokens, method=method, evidence=torch.zeros(2, 3))  # type: ignore[arg-type]
    for ratio in (0, 0.0, -0.25, 1.01, 25, float("nan"), float("inf"), "0.25", None, True):
        with pytest.raises(ValueError, match="retention_ratio"):
            prune(tokens, ratio, method)  # type: ignore[arg-type]
    for budget in (0, -1, 7, 2.0, "2", True, float("nan")):
        with pytest.raises(ValueError, match=r"budget .*in \[1, 6\]"):
            prune(tokens, method=method, budget=budget)


@pytest.mark.parametrize(("method", "params"), [("fastvid", {}), ("cdpruner", {}), ("fastv", {})])
def test_missing_and_bad_evidence_is_named_and_any_float_dtype_is_taken(method: str, params: dict[str, Any]) -> None:
    tokens = video(2, 3, 4)
    evidence = evidence_for(gstep.make_pruner(method, **params), tokens)
    for name, good in evidence.items():
        less = {other: value for other, value in evidence.items() if other != name}
        with pytest.raises(gstep.MissingEvidence, match=rf"'{method}' needs evidence .*: {name}$"):
            gstep.prune(tokens, method=method, evidence=less, **params)
        nan = good.clone()
        nan.view(-1)[-1] = float("nan")
        longer = torch.cat([good, good[:1]])
        bad: list[tuple[Any, str]] = [
            (good[None], r"must be \[.*; got shape \[1, "),
            (good.numpy(), "must be a tensor of floats; got ndarray"),
            (good.int(), "must be a tensor of floats; got torch.int32"),
            (good[:0], r"must be \[.*; got shape \[0"),
            (nan, "non-finite"),
            *([(longer, r"must be \[T.*\] = \[\d.* for these tokens; got shape")] if name != "text_embedding" else []),
        ]
        for value, message in bad:
            with pytest.raises(ValueError, match=f"evidence '{name}' .*{message}"):
                gstep.prune(tokens, method=method, evidence={**evidence, name: value}, **params)
    halved = {name: value.bfloat16() for name, value in evidence.items()}
    expected = gstep.prune(tokens, method=method, evidence={k: v.float() for k, v in halved.items()}, **params)
    assert_same(gstep.prune(tokens, method=method, evidence=halved, **params), expected)


@pytest.mark.parametrize(("method", "params"), CASES)
def test_at_most_is_a_bound(method: str, params: dict[str, Any]) -> None:
    """Of one that is exact it is what is kept; none is so wide that it says nothing. EVS keeps a frame at least."""
    pruner = gstep.make_pruner(method, **params)
    shapes = ((5, 13, 8), (9, 4, 16), (1, 30, 8))
    for ratio, (seed, shape) in product((0.001, 0.04, 0.15, 0.5), enumerate(shapes)):
        bound, budget = pruner.at_most(*shape, ratio), pruner.resolve_budget(shape[0] * shape[1], ratio)[0]
        pruned = prune(video(*shape, seed=seed), ratio, method, seed=seed, **params)
        kept = pruned.n_kept
        assert pruned.retention_ratio == (1.0 if method == "none" else ratio)
        assert kept == bound == budget if pruner.exact else kept <= bound
        least = shape[1] if method == "evs" else 1
        assert 1 <= bound <= max(least, min(shape[0] * shape[1], budget + 2 * shape[0]))


@pytest.mark.parametrize(("method", "params"), CASES)
def test_a_pruner_describes_itself_and_stands_in_the_table_of_what_it_looks_at(
    method: str, params: dict[str, Any]
) -> None:
    pruner = gstep.make_pruner(method, **params)
    assert pruner.name == method
    assert pruner.cacheable == (method in VIDEO_METHODS) != (method in QUESTION_METHODS)
    assert json.loads(json.dumps(pruner.params())) == pruner.params()
    again = gstep.make_pruner(method, **pruner.params())
    assert (again, again.needs) == (pruner, pruner.needs)
    with pytest.raises((FrozenInstanceError, AttributeError)):
        pruner.alpha = 0.1  # type: ignore[attr-defined]
