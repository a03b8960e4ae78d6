"""The benchmark of the selection: the loop is the oracle, the selection takes the same tokens; no time is asserted."""

import json

import pytest
import torch

from gstep.selection.reference import density_guided_fps
from jobs.benchmark import __main__ as benchmark
from jobs.benchmark.selection.times import loop, loop_steps
from jobs.benchmark.tokens import INPUTS

SMALL = ["--frames", "6", "12", "--tokens-per-frame", "36", "--hidden", "64", "--repeats", "1"]


@pytest.fixture
def threads():
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def test_every_input_size_and_ratio_is_measured_and_the_same_tokens_are_taken(tmp_path, threads):
    assert benchmark.main(["selection", *SMALL, "--json", str(tmp_path / "times.json")]) == 0
    record = json.loads((tmp_path / "times.json").read_text())
    found = [(item["input"], item["n_tokens"], item["ratio"]) for item in record["times"]]
    assert sorted(found) == sorted((i, m, r) for i in INPUTS for m in (216, 432) for r in (0.25, 0.1))
    for item in record["times"]:
        assert item["same"] == 1.0 and item["loop_steps"] == item["n_kept"] - 1
        assert all(item[form] > 0 for form in ("loop", "selection", "gstep", "vidcom2"))
    assert record["machine"]["processor"]


def test_the_loop_is_the_oracle():
    tokens = INPUTS["iid"].make(4, 25, 32).flatten(0, 1)
    density = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit_DM = torch.nn.functional.normalize(tokens.float(), dim=1).T.contiguous()
    assert torch.equal(loop(unit_DM, density, 49), density_guided_fps(tokens.double(), density, 50))


def test_the_loop_runs_whole_or_200_steps():
    assert loop_steps(6272, 3584, 1568) == 1567
    assert loop_steps(25088, 3584, 6272) == 200
    assert loop_steps(75264, 3584, 100) == 99


def test_shares_are_shown_as_they_were_asked_for(capsys, threads):
    argv = ["selection", "--frames", "1", "--tokens-per-frame", "8", "--hidden", "4", "--repeats", "1"]
    assert benchmark.main([*argv, "--inputs", "iid", "--retention-ratios", "12.5%", "12%", "0.3%"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {share}% " in shown for share in ("12.5", "12", "0.3"))


def test_a_gpu_that_is_not_there_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert benchmark.main(["selection", *SMALL, "--device", "cuda"]) == 2
    assert "sees no CUDA device" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("wrong", "named"), [(["--inputs", "noise"], "noise"), (["--threads", "0"], "at least 1")])
def test_senseless_requests_are_refused(capsys, wrong, named):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(["selection", *wrong])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err
