"""The method against golden selections and curves (see golden/README.md)."""

import json
from typing import Any

import numpy as np
import pytest
import torch

import gstep
from gstep.density import (
    BOUNDARIES,
    compute_change_curve,
    compute_frame_means,
    compute_spatial_density,
    compute_temporal_density,
)
from gstep.selection.reference import density_guided_fps
from tests.gstep.synthetic import needs_cuda
from tests.paths import GOLDEN

DATA = dict(np.load(GOLDEN / "gstep.npz"))
INPUTS = {key.removeprefix("H/"): value for key, value in DATA.items() if key.startswith("H/")}
CURVES = [key for key in DATA if key.startswith("curve/")]
# Every token of the static video has a copy, so every nearest neighbour is at distance 0 and any start is a tie: ours
# takes the lowest index, the golden one followed the rounding noise (3e-16) of its distances.
TIED_START = {("static_T8_N49_D32", "isolated")}


def read_cases() -> list[dict[str, Any]]:
    table = json.loads((GOLDEN / "gstep.json").read_text())
    cases = [dict(zip(table["columns"], row, strict=True)) for row in table["cases"]]
    ends = np.cumsum([case["n_kept"] for case in cases])
    for case, end in zip(cases, ends, strict=True):
        case["order"] = DATA["orders"][end - case["n_kept"] : end].astype(np.int64)
    return cases


CASES = read_cases()


def tokens_of(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.from_numpy(INPUTS[name]).double() / 64).to(dtype)


def prune_case(case: dict[str, Any], tokens: torch.Tensor) -> gstep.PrunedTokens:
    asked = {"retention_ratio": case["ratio"]} if case["budget"] is None else {"budget": case["budget"]}
    return gstep.prune(tokens, method=case["method"], **asked, **case["params"])


def picks(pruned: gstep.PrunedTokens) -> list[int]:
    return pruned.index[pruned.compute_selection_order()].tolist()


def test_all_cases_are_here() -> None:
    assert len(CASES) == 808
    assert len(DATA["orders"]) == sum(case["n_kept"] for case in CASES)


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 1), (torch.float64, 11), (torch.float16, 17)], ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_selection(name: str, dtype: torch.dtype, step: int) -> None:
    wrong = []
    for case in (case for case in CASES[::step] if case["input"] == name):
        tokens = tokens_of(name, dtype)
        order, golden = picks(prune_case(case, tokens)), case["order"].tolist()
        if (name, case["params"].get("start")) in TIED_START:
            assert order[0] == 0
            chosen_start = torch.zeros(tokens.shape[0] * tokens.shape[1])
            chosen_start[golden[0]] = 1
            order = density_guided_fps(tokens.flatten(0, 1), chosen_start, len(golden), alpha=1.0).tolist()
        if case["method"] == "random":
            order = sorted(order)
        # Products of these inputs are exact in float32, so the whole order agrees, exact ties and near-ties included:
        # the reliable prefix needs no special treatment.
        wrong += [] if order == golden else [case["case"]]
    assert wrong == []


def test_bfloat16_selects_what_the_same_values_in_float64_do() -> None:
    for case in CASES[::17]:
        tokens = tokens_of(case["input"], torch.bfloat16)
        assert picks(prune_case(case, tokens)) == picks(prune_case(case, tokens.double())), case["case"]


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_selection_on_cuda(dtype: torch.dtype) -> None:
    wrong = []
    for case in CASES:
        order, golden = picks(prune_case(case, tokens_of(case["input"], dtype).cuda())), case["order"].tolist()
        prefix = case["reliable_prefix"] or 0
        tied = (case["input"], case["params"].get("start")) in TIED_START
        if not tied and (sorted(order) != sorted(golden) or order[:prefix] != golden[:prefix]):
            wrong.append(case["case"])
    assert wrong == []


def our_curve(name: str, kind: list[str], tokens: torch.Tensor) -> torch.Tensor:
    mean = compute_frame_means(tokens)
    if kind[0] == "spatial_density":
        return compute_spatial_density(tokens, mean)
    if kind[0] == "change_curve":
        return compute_change_curve(mean)
    smoothing, *rest = kind[1].split("_")
    assert kind[0] == "temporal" and (not kind[2:] or kind[2] in BOUNDARIES)
    params: dict[str, Any] = {"boundary": kind[2]} if kind[2:] else {}
    if rest and smoothing == "gaussian":
        params["sigma"] = float(rest[0].removeprefix("sigma"))
    elif rest:
        params["radius"] = int(rest[0].removeprefix("r"))
    return compute_temporal_density(mean, smoothing=smoothing, **params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_curves(dtype: torch.dtype) -> None:
    for key in CURVES:
        _, name, *kind = key.split("/")
        ours = our_curve(name, kind, tokens_of(name, dtype)).numpy().reshape(DATA[key].shape)
        np.testing.assert_allclose(ours, DATA[key], rtol=1e-9, atol=1e-12, err_msg=key)
