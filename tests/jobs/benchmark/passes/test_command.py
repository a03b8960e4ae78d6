"""The command that times shared passes, on the smallest model."""

import json

import pytest

from jobs.benchmark import __main__ as benchmark


@pytest.mark.parametrize("wrong", [["--model", "no/such/folder"], ["--dtype", "int9"], ["--device", "cuda"]])
def test_what_cannot_be_timed_is_refused(wrong, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert benchmark.main(["passes", *wrong]) == 2
    assert wrong[1] in capsys.readouterr().err


def test_each_number_of_videos_is_timed_both_ways(tmp_path, capsys):
    file = tmp_path / "passes.json"
    argv = ["passes", "--videos", "1", "3", "--frames", "3", "--model", "tiny-qwen3-vl", "--repeats", "1"]
    assert benchmark.main([*argv, "--dtype", "float32", "--json", str(file)]) == 0
    one, three = json.loads(file.read_text())["cells"]
    assert (one["videos a pass"], three["videos a pass"]) == (1, 3) and min(three.values()) > 0
    assert one["tokens of the same bits"] <= 1 and "in one pass, ms" in capsys.readouterr().out
