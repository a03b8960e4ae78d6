"""The benchmark of the methods runs every one on the same tokens and says where; nothing here asserts a time."""

import json

from gstep import PRUNERS
from jobs.benchmark import __main__ as benchmark


def test_every_method_is_measured_beside_gstep(tmp_path, capsys):
    file = tmp_path / "times.json"
    sizes = ["--frames", "4", "20", "--tokens-per-frame", "16", "--hidden", "32", "--repeats", "2"]
    assert benchmark.main(["methods", *sizes, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert [(item["n_tokens"], item["method"]) for item in record["times"]] == [
        (16 * frames, name) for frames in (4, 20) for name in PRUNERS if name != "none"
    ]
    by_method = {(item["n_tokens"], item["method"]): item for item in record["times"]}
    assert by_method[320, "gstep"]["ratio"] == 1.0 and by_method[320, "gstep"]["n_kept"] == 80
    assert all(item["seconds"] > 0 and item["n_kept"] > 0 for item in record["times"])
    assert record["machine"]["processor"] and record["machine"]["threads"] > 0
    assert "fastvid" in capsys.readouterr().out


def test_an_unknown_device_is_refused(capsys):
    assert benchmark.main(["methods", "--device", "tpu"]) == 2
    assert "tpu" in capsys.readouterr().err


def test_the_device_may_be_left_to_the_machine(capsys):
    argv = ["methods", "--frames", "1", "--tokens-per-frame", "4", "--hidden", "4", "--repeats", "1"]
    assert benchmark.main([*argv, "--method", "gstep", "--device", "auto"]) == 0


def test_some_methods_can_be_named_and_gstep_is_there(tmp_path, capsys):
    argv = ["methods", "--frames", "4", "--tokens-per-frame", "9", "--hidden", "16", "--repeats", "1"]
    assert benchmark.main([*argv, "--method", "novelty", "--json", str(tmp_path / "m.json")]) == 0
    record = json.loads((tmp_path / "m.json").read_text())
    assert {row["method"] for row in record["times"]} == {"gstep", "novelty"}
    capsys.readouterr()
    assert benchmark.main([*argv, "--method", "novelty", "--json"]) == 0  # on stdout, where no file is named
    assert json.loads(capsys.readouterr().out).keys() == record.keys()
