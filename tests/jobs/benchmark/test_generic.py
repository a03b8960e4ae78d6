"""The benchmark of the family generic beside a family with code of its own; nothing here asserts a time."""

import json

import pytest

from jobs.benchmark import __main__ as benchmark
from jobs.benchmark import generic
from tests.builders import checkpoints


def test_both_ways_are_measured_on_the_same_clip_and_give_the_same_tokens(monkeypatch, capsys):
    monkeypatch.setattr(generic, "_SECONDS", 1)
    argv = ["generic", "--model", "tiny", "--height", "360", "--num-frames", "4", "--repeats", "1", "--json"]
    assert benchmark.main(argv) == 0
    shown = capsys.readouterr()
    fast, other = json.loads(shown.out)["videos"]
    assert [fast["way"], other["way"]] == [generic.FAST, generic.GENERIC]
    assert fast["n_tokens"] == other["n_tokens"] == 4 * 196 and fast["same"] and other["same"]
    assert fast["frame_bytes"] == 4 * 3 * 384 * 384 and other["frame_bytes"] == 4 * 3 * 360 * 640
    assert fast["prepare_s"] is None and other["prepare_s"] > 0
    for cost in (fast, other):
        assert cost["total_s"] == pytest.approx(
            sum(cost[f"{step}_s"] for step in ("decode", "copy", "encode", "prune"))
        )
    assert "the same tokens both ways" in shown.err


def test_a_model_without_code_of_its_own_is_refused(tmp_path, capsys):
    folder = checkpoints.make("smolvlm", tmp_path / "smolvlm")
    assert benchmark.main(["generic", "--model", str(folder)]) == 2
    assert "nothing to compare" in " ".join(capsys.readouterr().err.split())
