"""The benchmarks of selecting and reading tokens; nothing here asserts a time."""

import json

import pytest
import torch

from gstep.selection.reference import density_guided_fps
from jobs.benchmark import __main__ as benchmark
from jobs.benchmark.read import TimedReader
from jobs.benchmark.selection import loop_steps, select_by_loop
from jobs.benchmark.tokens import INPUTS


@pytest.fixture
def threads():
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


@pytest.mark.parametrize("name", INPUTS)
def test_made_up_tokens_are_seeded_finite_and_no_two_are_the_same(name):
    tokens = INPUTS[name].make(40, 36, 48)
    assert tokens.shape == (40, 36, 48) and tokens.dtype == torch.bfloat16
    assert torch.equal(tokens, INPUTS[name].make(40, 36, 48)) and tokens.isfinite().all()
    assert len(torch.unique(tokens.flatten(0, 1), dim=0)) == 40 * 36


def test_every_input_size_and_ratio_is_measured_and_the_same_tokens_are_taken(capsys, threads):
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
    tokens = INPUTS["iid"].make(4, 25, 32).flatten(0, 1)
    density = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit_DM = torch.nn.functional.normalize(tokens.float(), dim=1).T.contiguous()
    assert torch.equal(select_by_loop(unit_DM, density, 49), density_guided_fps(tokens.double(), density, 50))


def test_the_loop_runs_whole_or_200_steps():
    assert loop_steps(6272, 3584, 1568) == 1567
    assert loop_steps(25088, 3584, 6272) == 200
    assert loop_steps(75264, 3584, 100) == 99


def test_all_ways_of_reading_are_measured_on_a_real_cache(tmp_path, capsys):
    sizes = ["--videos", "5", "--tokens", "40", "--hidden", "8", "--videos-per-shard", "3", "--repeats", "2"]
    assert benchmark.main(["read", *sizes, "--s3", "--folder", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    ways = {way["name"]: way for way in json.loads(shown.out)["ways"]}
    assert len(ways) == 4 + 7 + 1 + 7 and all(len(way["seconds"]) == 2 for way in ways.values())
    assert {way["n_bytes"] for name, way in ways.items() if "10 %" not in name} == {5 * 40 * 16}
    assert {way["n_bytes"] for name, way in ways.items() if "10 %" in name} == {5 * 16 * 16}
    assert all(way["beside"] in {"", *ways} for way in ways.values())
    assert ways["S3: boto3, a GET a video"]["requests"] == 5 and ways["get, in order of index"]["requests"] is None
    assert ways["S3: get, in order of index"]["requests"] == 0  # so small that all came with the footer
    assert "get_many" in shown.err and not list(tmp_path.iterdir())


def test_shares_are_of_the_same_round_and_of_bytes():
    plain = TimedReader("plain", print, "", 100, [1.0, 2.0, 9.0], [1.0, 1.0, 1.0])
    half = TimedReader("half", print, "plain", 50, [1.0, 2.0, 9.0], [0.25, 0.25, 0.25])
    assert half.shares(plain) == ("50%", "200%") and plain.shares(None) == ("", "")
