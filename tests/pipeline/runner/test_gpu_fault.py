"""A broken CUDA context ends its process, whatever the error says; any other error is the item's own."""

import os
from unittest.mock import Mock

import pytest
import torch

from gstep.errors import is_out_of_memory
from pipeline.runner import worker_heartbeat as heartbeat
from pipeline.runner.worker_heartbeat import exit_after_gpu_fault
from tests.gstep.synthetic import needs_cuda
from tests.interpreter import run_python

ON_A_GPU = """
import torch
from pipeline.runner.worker_heartbeat import exit_after_gpu_fault
numbers = torch.zeros(8, device="cuda")
exit_after_gpu_fault("fine.mp4", RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED"))
print("went on", flush=True)
try:
    numbers[torch.full((4,), 10**6, device="cuda")].sum().item()
except Exception as error:
    exit_after_gpu_fault("a.mp4", ValueError("of another kind"))
print("went on with a broken context")
"""

NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]
OTHERS = [
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("CUDA error: device-side assert triggered"),
    ValueError("a video of another shape"),
    MemoryError("out of memory"),
]


def test_the_process_ends_at_once_and_says_on_what(capfd):
    """No device is there to be asked, so the words decide."""
    child = os.fork()
    if child == 0:
        try:
            exit_after_gpu_fault("a.mp4", RuntimeError("CUDA error: an illegal memory access was encountered"))
        finally:  # where it returns, or raises what could be caught
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 70
    assert capfd.readouterr().err.strip() == "a.mp4: CUDA error: an illegal memory access was encountered"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is asked whether it works, which says so unless it has a side effect."""
    asked = Mock()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", asked)
    monkeypatch.setattr(heartbeat.os, "_exit", Mock(side_effect=SystemExit))
    return asked


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_the_gpu_is_asked_whatever_the_error_says(gpu, error, capsys):
    exit_after_gpu_fault("a.mp4", error)
    assert gpu.call_count == 1 and capsys.readouterr().err == ""
    gpu.side_effect = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(SystemExit):
        exit_after_gpu_fault("a.mp4", error)
    assert capsys.readouterr().err.startswith(f"a.mp4: {error}")


@pytest.mark.parametrize("error", NO_MEMORY, ids=str)
def test_too_little_memory_breaks_nothing(gpu, error):
    assert is_out_of_memory(error)
    exit_after_gpu_fault("a.mp4", error)
    assert not gpu.called


@needs_cuda
def test_a_gpu_is_asked_itself():
    done = run_python("-c", ON_A_GPU)
    assert (done.returncode, done.stdout) == (70, "went on\n"), done.stderr
    assert "a.mp4: of another kind" in done.stderr
