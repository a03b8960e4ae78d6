"""EVS, V-CAST and DivPrune: their equations, and what the code that is served selects (see golden/README.md)."""

import json
from typing import Any

import numpy as np
import pytest
import torch

import gstep
from gstep.pruners.vcast import compute_curvature, divide_budget
from tests.gstep.oracle import exact_tokens, oracle
from tests.gstep.synthetic import needs_cuda, video
from tests.paths import GOLDEN

TOKENS = {key.removeprefix("H/"): value for key, value in np.load(GOLDEN / "gstep.npz").items() if key.startswith("H/")}


def read_cases() -> list[dict[str, Any]]:
    table = json.loads((GOLDEN / "served.json").read_text())
    cases = [dict(zip(table["columns"], row, strict=True)) for row in table["cases"]]
    ends = np.cumsum([case["n_kept"] for case in cases])
    parts = np.split(np.load(GOLDEN / "served.npz")["index"].astype(np.int64), ends)
    assert len(parts.pop()) == 0
    return [{**case, "index": part.tolist()} for case, part in zip(cases, parts, strict=True)]


CASES = read_cases()


def tokens_of(case: dict[str, Any], dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return (torch.from_numpy(TOKENS[case["input"]]).double() / 64).to(device, dtype)  # exact in float16


def test_all_cases_are_here() -> None:
    for method, stable in (("evs", 80), ("vidcom2", 73), ("vcast", 72)):
        cases = [case for case in CASES if case["method"] == method]
        assert (len(cases), sum(case["stable"] for case in cases)) == (84, stable)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", ["evs", "vcast"])
def test_the_same_tokens_are_kept(method: str, dtype: torch.dtype, device: str) -> None:
    wrong = []
    for case in (case for case in CASES if case["method"] == method and case["stable"]):
        amount = {"budget": case["n_kept"]} if method == "vcast" else {"retention_ratio": case["ratio"]}
        pruned = gstep.prune(tokens_of(case, dtype, device), method=method, **amount)
        wrong += [] if pruned.index.tolist() == case["index"] else [case]
    assert wrong == []


def test_vidcom2_and_vllm_keep_the_same_tokens_up_to_their_number() -> None:
    """VLLM brings the number to floor(r x M), at least one a frame, where the authors' code rounds frame by frame."""
    for case in (case for case in CASES if case["method"] == "vidcom2" and case["stable"]):
        tokens = tokens_of(case)
        ours, theirs = set(gstep.prune(tokens, case["ratio"], "vidcom2").index.tolist()), set(case["index"])
        assert len(theirs) == max(len(tokens), int(case["ratio"] * tokens[..., 0].numel() + 1e-9))
        if case["input"] != "edge_T3":  # there a token moves to another frame
            assert ours <= theirs or theirs <= ours, case


# EVS


def test_evs_keeps_the_first_frame_and_the_largest_changes_and_says_how_much_room_that_needs() -> None:
    for budget in (1, 8, 9, 48):
        pruned = gstep.prune(video(6, 8, 12), method="evs", budget=budget)
        assert pruned.n_kept == max(8, budget) and pruned.index[:8].tolist() == list(range(8))
    for n_frames, ratio, expected in ((16, 0.05, 196), (16, 0.0625, 196), (32, 0.05, 313), (1, 0.25, 196)):
        assert gstep.make_pruner("evs").at_most(n_frames, 196, 8, ratio) == expected


# V-CAST


def test_vcast_gives_a_frame_more_where_the_video_turns() -> None:
    straight, back = [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 0.0, 1.0]
    for along, turns in ((straight, [1.0, 0.0, 0.0, 1.0]), (back, [1.0, 2.0, 2.0, 1.0])):
        centre = torch.tensor([[value, 0.0, 1.0] for value in along], dtype=torch.float64)
        assert compute_curvature(centre).tolist() == turns
    still = torch.ones(5, 3, dtype=torch.float64)
    assert compute_curvature(still).tolist() == [1.0] * 5
    assert compute_curvature(still[:1]).tolist() == [1.0]


@pytest.mark.parametrize(
    ("weights", "budget", "per_frame", "expected"),
    [
        ([0.5, 0.3, 0.2], 13, 20, [6, 4, 3]),  # 1 each, 5 + 3 + 2
        ([0.56, 0.26, 0.18], 13, 20, [6, 3, 4]),  # 1 each, 5.6 2.6 1.8 rounded down; 2 more to the largest fraction
        ([0.8, 0.1, 0.1], 13, 7, [7, 4, 2]),  # the first is full; equal fractions: the earlier one
        ([0.9, 0.06, 0.04], 2, 20, [2, 0, 0]),  # less than one a frame: 1.8 0.12 0.08
        ([0.5, 0.3, 0.2], 60, 20, [20, 20, 20]),
        ([1 / 3] * 3, 12, 20, [4, 4, 4]),
    ],
)
def test_vcast_divides_a_budget(weights: list[float], budget: int, per_frame: int, expected: list[int]) -> None:
    assert divide_budget(torch.tensor(weights, dtype=torch.float64), budget, per_frame).tolist() == expected


# DivPrune


def test_divprune_takes_the_farthest_from_the_most_isolated_on() -> None:
    tokens = exact_tokens(60, seed=5)
    pruned = gstep.prune(torch.from_numpy(tokens).reshape(6, 10, 12), method="divprune", budget=25)
    expected, _ = oracle(tokens, np.ones(60), 25, alpha=1.0, start="isolated")
    assert pruned.index[pruned.compute_selection_order()].tolist() == expected
