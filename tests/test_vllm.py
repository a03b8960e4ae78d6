"""What uses vLLM, in the environment that has it: .ci/vllm-environment makes one."""

import os
import subprocess

import pytest

from tests.paths import ROOT

NAME = "GSTEP_VLLM_PYTHON"
python = os.environ.get(NAME)


@pytest.mark.slow
@pytest.mark.skipif(not python, reason=f"{NAME} names no interpreter that has vLLM")
def test_the_tests_that_need_vllm_pass_where_it_is():
    environ = {name: value for name, value in os.environ.items() if name not in (NAME, "PYTHONPATH")}
    command = [str(python), "-m", "pytest", "-q", "-m", "vllm", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout.splitlines()[-1]
