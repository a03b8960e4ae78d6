"""The command of all benchmarks."""

import subprocess
import sys

import pytest
import torch

from jobs.benchmark import __main__ as benchmark
from tests.paths import ROOT


def test_help_loads_no_torch():
    for argv in ([], ["methods"], ["selection"], ["table"], ["read"], ["efficiency"], ["pipeline"]):
        command = [sys.executable, "-X", "importtime", "-m", "jobs.benchmark", *argv, "--help"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
        assert "rich" in loaded and not loaded & {"torch", "ray", "pyarrow", "transformers", "matplotlib"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["passes", "--model", "a/b/c"], "'a/b/c' is no folder on this machine"),
        (["passes", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["pipeline", "--s3"], "--s3 goes with --forms"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(capsys, argv, said):
    assert benchmark.main(argv) == 2 and said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["selection", "methods", "passes"])
def test_a_gpu_that_is_not_there_is_refused(capsys, name):
    assert benchmark.main([name, "--device", "cuda"]) == 2
    assert "device 'cuda' was asked for" in " ".join(capsys.readouterr().err.split())
