"""The benchmark runs every method on the same tokens and says where; nothing here asserts a time."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from gstep import PRUNERS
from jobs.benchmark import __main__ as benchmark
from jobs.benchmark.resume_times import ResumeTimes
from tests.paths import ROOT


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
        (["--json", "no-such-folder/times.json"], "no folder"),
    ],
)
def test_senseless_sizes_are_refused(capsys, wrong, named):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(["methods", *wrong])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_an_unknown_device_is_refused(capsys):
    assert benchmark.main(["methods", "--device", "tpu"]) == 2
    assert "tpu" in capsys.readouterr().err


def test_help_loads_no_torch():
    for argv in ([], ["methods"], ["selection"], ["resume"]):
        command = [sys.executable, "-X", "importtime", "-m", "jobs.benchmark", *argv, "--help"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
        assert "rich" in loaded and not loaded & {"torch", "ray", "pyarrow", "transformers", "matplotlib"}


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_resume_is_measured_on_real_files_and_names_its_first_limit(tmp_path, capsys, kind):
    file = tmp_path / "resume.json"
    argv = ["resume", "--videos", "300", "--videos-per-shard", "22", "--manifest", kind, "--folder", str(tmp_path)]
    assert benchmark.main([*argv, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert (record["videos"], record["shards"], record["ledger_bytes"]) == (300, 13, 64)
    assert all(seconds > 0 for seconds in record["seconds"].values()) and record["manifest_bytes"] > 64
    assert record["first_limit"]["videos"] > 300
    assert "first limit" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]


def test_the_first_limit_is_the_one_that_is_met_first():
    seconds = {"listing": 1.0, "manifest": 1.0, "cache": 36.0, "remaining": 1.0}
    found = ResumeTimes(1000, "csv", 100, 1, seconds, seconds, 100.0, 64.0, 200.0, memory=200 * 10**6)
    assert found.first_limit() == (100_000, "an hour for: read the videos shards")
    assert replace(found, memory=200 * 10**4).first_limit() == (10_000, "this machine's memory")
