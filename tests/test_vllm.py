"""What uses vLLM, in the environment that has it: .ci/vllm-environment makes one."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

NAME = "GSTEP_VLLM_PYTHON"
python = os.environ.get(NAME)
FILES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "tests").rglob("test_*.py")
    if "pytest.mark.vllm" in path.read_text() and path != Path(__file__)
)


@pytest.mark.slow
@pytest.mark.skipif(not python, reason=f"{NAME} names no interpreter that has vLLM")
@pytest.mark.parametrize("path", FILES)
def test_the_tests_that_need_vllm_pass_where_it_is(path):
    """A process each: vLLM looks into whatever modules are loaded, and trips over some that other tests use."""
    environ = {name: value for name, value in os.environ.items() if name not in (NAME, "PYTHONPATH")}
    command = [str(python), "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", path]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout.splitlines()[-1]


def test_there_are_such_tests():
    assert len(FILES) >= 4 and len(set(FILES)) == len(FILES)
