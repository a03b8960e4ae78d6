"""Every method against golden selections and curves: of the paper, of official code, of code that is served.

See golden/README.md.
"""

import json
from typing import Any

import numpy as np
import pytest
import torch

import gstep
from gstep import density
from gstep.selection.reference import density_guided_fps
from tests.gstep.synthetic import needs_cuda
from tests.paths import GOLDEN

GSTEP, EVIDENCE = (dict(np.load(GOLDEN / f"{name}.npz")) for name in ("gstep", "methods"))
INPUTS = [key.removeprefix("H/") for key in GSTEP if key.startswith("H/")]
CURVES = [key for key in GSTEP if key.startswith("curve/")]
# Every token of the static video has a copy, so every nearest neighbour is at distance 0 and any start is a tie: ours
# takes the lowest index, the golden one followed the rounding noise (3e-16) of its distances.
TIED_START = {("static_T8_N49_D32", "isolated")}
METHODS = ("vidcom2", "fastvid", "visionzip", "holitom", "flashvid", "cdpruner", "fastv", "ottvid", "tango")


def read_cases(name: str) -> list[dict[str, Any]]:
    """Read the cases of a file, each with its "index" (of GSTEP in the order of selection) and what was merged."""
    table, data = json.loads((GOLDEN / f"{name}.json").read_text()), np.load(GOLDEN / f"{name}.npz")
    cases = [dict(zip(table["columns"], row, strict=True)) for row in table["cases"]]
    *parts, rest = np.split(
        data["orders" if name == "gstep" else "index"].astype(np.int64), np.cumsum([case["n_kept"] for case in cases])
    )
    flags, tokens = (np.unpackbits(data["merged"]), data["merged_tokens"]) if "merged" in data else ([], [])
    for case, case["index"] in zip(cases, parts, strict=True):
        if case.get("merges"):
            case["merged"], flags = np.split(flags.astype(bool), [case["n_kept"]])  # their bytes end with zeros
            hidden = GSTEP[f"H/{case['input']}"].shape[2]
            rows, tokens = np.split(tokens, [hidden * case["merged"].sum()])
            case["tokens"] = rows.reshape(-1, hidden)
    assert len(rest) == len(tokens) == 0
    return cases


OWN, SERVED = read_cases("gstep"), read_cases("served")
BASELINES = read_cases("methods") + read_cases("methods_2026")


def tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Integers are multiples of 1/64, exact in float16."""
    return (torch.from_numpy(values).double() / (64 if values.dtype == np.int16 else 1)).to(dtype)


def tokens_of(case: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    return tensor(GSTEP[f"H/{case['input']}"], dtype)


def test_all_cases_are_here() -> None:
    assert (len(OWN), len(BASELINES), sum(not case["stable"] for case in BASELINES)) == (808, 306 + 161, 9)
    assert {case["method"] for case in BASELINES} == set(METHODS)
    for method, stable in (("evs", 80), ("vidcom2", 73), ("vcast", 72)):
        cases = [case for case in SERVED if case["method"] == method]
        assert (len(cases), sum(case["stable"] for case in cases)) == (84, stable)


def run(case: dict[str, Any], tokens: torch.Tensor) -> gstep.PrunedTokens:
    places = {name: value for name, value in case["params"].items() if name in ("grid", "times")}
    params = {name: value for name, value in case["params"].items() if name not in places}
    pruner = gstep.make_pruner(case["method"], **params)
    names = pruner.needs | pruner.optional
    evidence = {name: tensor(EVIDENCE[f"{name}/{case['input']}"], torch.float32).to(tokens.device) for name in names}
    asked = {"retention_ratio": case["ratio"]} if case.get("budget") is None else {"budget": case["budget"]}
    return gstep.prune(tokens, method=case["method"], evidence=evidence, **asked, **places, **params)


def picks(pruned: gstep.PrunedTokens) -> list[int]:
    return pruned.index[pruned.compute_selection_order()].tolist()


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 1), (torch.float64, 11), (torch.float16, 17)], ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_the_order_of_the_paper(name: str, dtype: torch.dtype, step: int) -> None:
    wrong = []
    for case in (case for case in OWN[::step] if case["input"] == name):
        tokens = tokens_of(case, dtype)
        order, golden = picks(run(case, tokens)), case["index"].tolist()
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
    for case in OWN[::17]:
        tokens = tokens_of(case, torch.bfloat16)
        assert picks(run(case, tokens)) == picks(run(case, tokens.double())), case["case"]


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_order_of_the_paper_on_cuda(dtype: torch.dtype) -> None:
    wrong = []
    for case in OWN:
        order, golden = picks(run(case, tokens_of(case, dtype).cuda())), case["index"].tolist()
        prefix = case["reliable_prefix"] or 0
        tied = (case["input"], case["params"].get("start")) in TIED_START
        if not tied and (sorted(order) != sorted(golden) or order[:prefix] != golden[:prefix]):
            wrong.append(case["case"])
    assert wrong == []


def our_curve(kind: list[str], tokens: torch.Tensor) -> torch.Tensor:
    mean = density.compute_frame_means(tokens)
    if kind[0] == "spatial_density":
        return density.compute_spatial_density(tokens, mean)
    if kind[0] == "change_curve":
        return density.compute_change_curve(mean)
    smoothing, *rest = kind[1].split("_")
    assert kind[0] == "temporal" and (not kind[2:] or kind[2] in density.BOUNDARIES)
    params: dict[str, Any] = {"boundary": kind[2]} if kind[2:] else {}
    if rest and smoothing == "gaussian":
        params["sigma"] = float(rest[0].removeprefix("sigma"))
    elif rest:
        params["radius"] = int(rest[0].removeprefix("r"))
    return density.compute_temporal_density(mean, smoothing=smoothing, **params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_curves(dtype: torch.dtype) -> None:
    for key in CURVES:
        _, name, *kind = key.split("/")
        ours = our_curve(kind, tensor(GSTEP[f"H/{name}"], dtype)).numpy().reshape(GSTEP[key].shape)
        np.testing.assert_allclose(ours, GSTEP[key], rtol=1e-9, atol=1e-12, err_msg=key)


def list_differences(case: dict[str, Any], pruned: gstep.PrunedTokens) -> list[str]:
    """What of a case is not as it should be, in the method's own order."""
    order = torch.arange(pruned.n_kept) if pruned.order is None else pruned.order.cpu()
    index = pruned.index.cpu()[order].numpy()
    if len(index) != case["n_kept"]:
        return [f"{len(index)} tokens kept, not {case['n_kept']}"]
    known = case["index"] >= 0  # the official VisionZip does not say where its contextual tokens come from
    wrong = [] if np.array_equal(index[known], case["index"][known]) else ["index"]
    if case["merges"]:
        assert pruned.merged is not None
        if not np.array_equal(pruned.merged.cpu()[order], case["merged"]):
            return [*wrong, "merged"]
        merged = pruned.tokens.cpu()[order][case["merged"]].double().numpy()
        wrong += [] if np.allclose(merged, case["tokens"], rtol=0, atol=1e-4) else ["tokens"]
    return wrong


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_baselines_keep_and_merge_what_their_official_code_does(method: str, dtype: torch.dtype, device: str) -> None:
    found = {}
    for case in [case for case in BASELINES if case["method"] == method][:: 1 if dtype == torch.float32 else 4]:
        wrong = list_differences(case, run(case, tokens_of(case, dtype).to(device)))
        if wrong and case["stable"]:  # else a tie within rounding noise went the other way
            found[case["case"]] = wrong
    assert found == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_select_what_the_same_values_in_float32_do(dtype: torch.dtype) -> None:
    for case in BASELINES[::11]:
        tokens = tokens_of(case, dtype)
        pruned, expected = run(case, tokens), run(case, tokens.float())
        assert torch.equal(pruned.index, expected.index), case["case"]
        assert torch.equal(pruned.tokens, expected.tokens.to(dtype)), case["case"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("method", ["evs", "vcast"])
def test_the_tokens_of_served_code_are_kept(method: str, dtype: torch.dtype, device: str) -> None:
    wrong = []
    for case in (case for case in SERVED if case["method"] == method and case["stable"]):
        amount = {"budget": case["n_kept"]} if method == "vcast" else {"retention_ratio": case["ratio"]}
        pruned = gstep.prune(tokens_of(case, dtype).to(device), method=method, **amount)
        wrong += [] if pruned.index.tolist() == case["index"].tolist() else [case]
    assert wrong == []


def test_vidcom2_and_vllm_keep_the_same_tokens_up_to_their_number() -> None:
    """VLLM brings the number to floor(r x M), at least one a frame, where the authors' code rounds frame by frame."""
    for case in (case for case in SERVED if case["method"] == "vidcom2" and case["stable"]):
        tokens = tokens_of(case, torch.float32)
        ours, theirs = set(gstep.prune(tokens, case["ratio"], "vidcom2").index.tolist()), set(case["index"].tolist())
        assert len(theirs) == max(len(tokens), int(case["ratio"] * tokens[..., 0].numel() + 1e-9))
        if case["input"] != "edge_T3":  # there a token moves to another frame
            assert ours <= theirs or theirs <= ours, case
