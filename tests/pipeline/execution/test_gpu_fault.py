"""A broken CUDA context ends its process; any other error is the item's own."""

import subprocess
import sys

import pytest

from pipeline.execution.gpu_fault import exit_after_gpu_fault
from tests.paths import ROOT

CODE = """
import atexit
from pipeline.execution.gpu_fault import exit_after_gpu_fault
atexit.register(print, "said goodbye")
exit_after_gpu_fault("a.mp4", RuntimeError("CUDA error: an illegal memory access was encountered"))
print("went on")
"""


def test_the_process_ends_at_once_and_says_on_what():
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (70, "")
    assert done.stderr.strip() == "a.mp4: CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("cuda"), OSError(5, "CUDA is not it")])
def test_other_errors_end_nothing(error, capsys):
    exit_after_gpu_fault("a.mp4", error)
    assert capsys.readouterr().err == ""
