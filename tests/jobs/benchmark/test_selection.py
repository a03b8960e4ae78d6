"""The benchmark of selecting tokens; nothing here asserts a time."""

import json

import torch

from gstep.selection.reference import density_guided_fps
from jobs.benchmark import __main__ as benchmark
from jobs.benchmark.selection import count_loop_steps, select_by_loop
from jobs.benchmark.tokens import INPUTS


def test_every_input_size_and_ratio_is_measured_and_the_same_tokens_are_taken(capsys):
    small = ["--frames", "6", "12", "--tokens-per-frame", "36", "--hidden", "64", "--repeats", "1"]
    assert benchmark.main(["selection", *small, "--retention-ratios", "25%", "12.5%", "--json"]) == 0
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    found = [(item["input"], item["n_tokens"], item["ratio"]) for item in record["times"]]
    assert sorted(found) == sorted((i, m, r) for i in INPUTS for m in (216, 432) for r in (0.25, 0.125))
    for item in record["times"]:
        assert item["same"] == 1.0 and item["loop_steps"] == item["n_kept"] - 1
        assert all(item[form] > 0 for form in ("loop", "selection", "gstep", "vidcom2"))
    about = record["machine"]
    assert about["processor"] and (about["threads"], about["torch"]) == (1, torch.__version__)
    assert f"on {about['processor']}, 1 thread, torch" in shown.err.replace("\n", " ") and " 12.5% " in shown.err


def test_the_loop_is_the_oracle():
    tokens = INPUTS["iid"](4, 25, 32).flatten(0, 1)
    density = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit_DM = torch.nn.functional.normalize(tokens.float(), dim=1).T.contiguous()
    assert torch.equal(select_by_loop(unit_DM, density, 49), density_guided_fps(tokens.double(), density, 50))


def test_the_loop_runs_whole_or_200_steps():
    assert count_loop_steps(6272, 3584, 1568) == 1567
    assert count_loop_steps(25088, 3584, 6272) == 200
    assert count_loop_steps(75264, 3584, 100) == 99
