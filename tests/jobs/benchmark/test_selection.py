"""The benchmark of the selection: every form is run, compared with float64, drawn and written; no time is asserted."""

import json
import math

import pytest
import torch

from gstep.selection.reference import density_guided_fps
from jobs.benchmark import __main__ as benchmark
from jobs.benchmark import selection
from jobs.benchmark.selection_forms import Plain, all_forms, plain_steps
from jobs.benchmark.selection_report import seconds_text, slope
from jobs.benchmark.tokens import INPUTS

SMALL = ["--frames", "6", "12", "--tokens-per-frame", "36", "--hidden", "64", "--repeats", "1"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(the record, the picture's bytes) of a whole run on few tokens."""
    folder = tmp_path_factory.mktemp("selection")
    files = ["--json", str(folder / "times.json"), "--plot", str(folder / "times.png")]
    threads = torch.get_num_threads()
    try:
        assert benchmark.main(["selection", *SMALL, *files]) == 0
    finally:
        torch.set_num_threads(threads)
    return json.loads((folder / "times.json").read_text()), (folder / "times.png").read_bytes()


def test_every_form_is_measured_on_every_input_size_and_ratio(measured):
    record, _ = measured
    found = {(item["input"], item["n_tokens"], item["ratio"], item["form"]) for item in record["times"]}
    assert found == {(i, m, r, form) for i in INPUTS for m in (216, 432) for r in (0.25, 0.1) for form in all_forms()}
    assert all(item["seconds"] > 0 for item in record["times"])
    plain = [item for item in record["times"] if item["form"] == "plain"]
    assert all(item["to_plain"] == 1.0 and item["gb_per_s"] > 0 and not item["extrapolated"] for item in plain)
    lazy = [item for item in record["times"] if item["form"] == "lazy"]
    assert all(item["products"] > 0 and item["bounds"] == 0 for item in lazy)
    assert record["machine"]["processor"] and record["stream_gb_per_s"] > 0 and not record["interrupted"]
    assert {item["form"] for item in record["growth"]} == set(all_forms())


def test_all_forms_select_the_same(measured):
    record, _ = measured
    assert {item["against"] for item in record["agreements"]} >= {"plain", "lazy", "float64"}
    assert all(item["share"] == 1.0 for item in record["agreements"])


def test_the_picture_is_a_png(measured):
    assert measured[1].startswith(PNG)


@pytest.mark.parametrize("name", INPUTS)
def test_tokens_are_seeded_finite_and_no_two_are_the_same(name):
    tokens = INPUTS[name].make(40, 36, 48)
    assert tokens.shape == (40, 36, 48) and tokens.dtype == torch.bfloat16
    assert torch.equal(tokens, INPUTS[name].make(40, 36, 48))
    assert tokens.isfinite().all()
    assert len(torch.unique(tokens.flatten(0, 1), dim=0)) == 40 * 36


def test_the_plain_form_is_the_oracle():
    tokens = INPUTS["iid"].make(4, 25, 32).flatten(0, 1)
    density = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = density_guided_fps(tokens.double(), density, 50)
    assert torch.equal(Plain.of(tokens).select(density, 49), expected)


def test_the_plain_form_runs_whole_or_200_steps():
    assert plain_steps(6272, 3584, 1568) == 1567
    assert plain_steps(25088, 3584, 6272) == 200
    assert plain_steps(75264, 3584, 100) == 99


def test_growth_is_the_slope_of_the_logarithms():
    assert slope([(10, 3.0), (100, 300.0), (1000, 30000.0)]) == pytest.approx(2.0)
    assert slope([(10, 3.0), (10, 4.0)]) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.001234, "0.00123"), (0.5, "0.500"), (12.345, "12.3"), (1234.5, "1234")]
)
def test_seconds_are_shown_with_three_digits(seconds, text):
    assert seconds_text(seconds) == text
    assert math.isclose(float(text), seconds, rel_tol=5e-3)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--inputs", "noise"], "noise"),
        (["--threads", "0"], "at least 1"),
        (["--plot", "no-such-folder/times.png"], "no folder"),
    ],
)
def test_senseless_requests_are_refused(capsys, wrong, named):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(["selection", *wrong])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_an_unknown_form_is_refused(capsys):
    assert benchmark.main(["selection", "--forms", "quick"]) == 2
    assert "quick: not among plain, lazy" in capsys.readouterr().err


def test_without_matplotlib_a_picture_is_refused_before_anything_is_measured(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    assert benchmark.main(["selection", *SMALL, "--plot", str(tmp_path / "times.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
