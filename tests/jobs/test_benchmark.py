"""The benchmark runs every method on the same tokens and says where; nothing here asserts a time."""

import json

import pytest

from gstep import PRUNERS
from jobs import benchmark


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


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--frames", "0"], "at least 1"),
        (["--retention-ratio", "2"], "in (0, 1]"),
        (["--device", "tpu"], "tpu"),
        (["--json", "no-such-folder/times.json"], "no folder"),
    ],
)
def test_senseless_sizes_are_refused(capsys, wrong, named):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(["methods", *wrong])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err
