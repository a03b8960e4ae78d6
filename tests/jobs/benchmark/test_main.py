"""The command of all benchmarks."""

import subprocess
import sys

from tests.paths import ROOT


def test_help_loads_no_torch():
    for argv in ([], ["methods"], ["selection"], ["table"], ["read"], ["efficiency"], ["pipeline"]):
        command = [sys.executable, "-X", "importtime", "-m", "jobs.benchmark", *argv, "--help"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
        assert "rich" in loaded and not loaded & {"torch", "ray", "pyarrow", "transformers", "matplotlib"}
