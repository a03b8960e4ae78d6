"""The baselines against what their official code selects (see golden/README.md)."""

import json
from typing import Any

import numpy as np
import pytest
import torch

import gstep
from tests.gstep.synthetic import needs_cuda
from tests.paths import GOLDEN

DATA = dict(np.load(GOLDEN / "methods.npz"))
TOKENS = {key.removeprefix("H/"): value for key, value in np.load(GOLDEN / "gstep.npz").items() if key.startswith("H/")}
FILES = {"methods": 306, "methods_2026": 161}  # file -> its number of cases
METHODS = ("vidcom2", "fastvid", "visionzip", "holitom", "flashvid", "cdpruner", "fastv", "ottvid", "tango")


def read_cases(name: str) -> list[dict[str, Any]]:
    table, data = json.loads((GOLDEN / f"{name}.json").read_text()), np.load(GOLDEN / f"{name}.npz")
    cases = [dict(zip(table["columns"], row, strict=True)) for row in table["cases"]]
    index, merged, tokens = data["index"].astype(np.int64), np.unpackbits(data["merged"]), data["merged_tokens"]
    for case in cases:
        case["index"], index = np.split(index, [case["n_kept"]])
        if case["merges"]:
            flags, merged = np.split(merged, [case["n_kept"]])  # their bytes end with zeros
            case["merged"] = flags.astype(bool)
            hidden = TOKENS[case["input"]].shape[2]
            rows, tokens = np.split(tokens, [hidden * flags.sum()])
            case["tokens"] = rows.reshape(-1, hidden)
    assert len(index) == len(tokens) == 0
    return cases


CASES = [case for name in FILES for case in read_cases(name)]


def tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Integers are multiples of 1/64, exact in float16."""
    return (torch.from_numpy(values).double() / (64 if values.dtype == np.int16 else 1)).to(dtype)


def run(case: dict[str, Any], tokens: torch.Tensor) -> gstep.PrunedTokens:
    places = {name: value for name, value in case["params"].items() if name in ("grid", "times")}
    params = {name: value for name, value in case["params"].items() if name not in places}
    pruner = gstep.make_pruner(case["method"], **params)
    names = pruner.needs | pruner.optional
    evidence = {name: tensor(DATA[f"{name}/{case['input']}"], torch.float32).to(tokens.device) for name in names}
    return gstep.prune(tokens, case["ratio"], case["method"], evidence=evidence, **places, **params)


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


def test_all_cases_are_here() -> None:
    assert len(CASES) == sum(FILES.values())
    assert {case["method"] for case in CASES} == set(METHODS)
    assert sum(not case["stable"] for case in CASES) == 9


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_selection(method: str, dtype: torch.dtype, device: str) -> None:
    found = {}
    for case in [case for case in CASES if case["method"] == method][:: 1 if dtype == torch.float32 else 4]:
        wrong = list_differences(case, run(case, tensor(TOKENS[case["input"]], dtype).to(device)))
        if wrong and case["stable"]:  # else a tie within rounding noise went the other way
            found[case["case"]] = wrong
    assert found == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_select_what_the_same_values_in_float32_do(dtype: torch.dtype) -> None:
    for case in CASES[::11]:
        tokens = tensor(TOKENS[case["input"]], dtype)
        pruned, expected = run(case, tokens), run(case, tokens.float())
        assert torch.equal(pruned.index, expected.index), case["case"]
        assert torch.equal(pruned.tokens, expected.tokens.to(dtype)), case["case"]
