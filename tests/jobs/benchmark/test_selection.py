"""The benchmark of the selection: every form is run, compared with float64, drawn and written; no time is asserted."""

import json

import pytest
import torch

from jobs.benchmark import __main__ as benchmark
from jobs.benchmark import selection
from jobs.benchmark.selection_forms import all_forms
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
