"""A broken CUDA context ends its process, whatever the error says; any other error is the item's own."""

import pytest
import torch

from gstep.errors import is_out_of_memory
from pipeline.runner import worker_heartbeat as heartbeat
from pipeline.runner.worker_heartbeat import exit_after_gpu_fault
from tests.gstep.synthetic import needs_cuda
from tests.interpreter import run_python

CODE = """
import atexit
from pipeline.runner.worker_heartbeat import exit_after_gpu_fault
atexit.register(print, "said goodbye")
exit_after_gpu_fault("a.mp4", RuntimeError("CUDA error: an illegal memory access was encountered"))
"""

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


def test_the_process_ends_at_once_and_says_on_what():
    """No device is there to be asked, so the words decide."""
    done = run_python("-c", CODE)
    assert (done.returncode, done.stdout) == (70, "")
    assert done.stderr.strip() == "a.mp4: CUDA error: an illegal memory access was encountered"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that refuses all work since an error, or not; ``asked`` counts how often it was asked."""

    class Gpu:
        broken, asked = False, 0

        def synchronize(self) -> None:
            self.asked += 1
            if self.broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def exit_at_once(code):
        raise SystemExit(code)

    made = Gpu()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(heartbeat.os, "_exit", exit_at_once)
    return made


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_the_gpu_is_asked_whatever_the_error_says(gpu, error, capsys):
    exit_after_gpu_fault("a.mp4", error)
    assert gpu.asked == 1 and capsys.readouterr().err == ""
    gpu.broken = True
    with pytest.raises(SystemExit, match="70"):
        exit_after_gpu_fault("a.mp4", error)
    assert capsys.readouterr().err.startswith(f"a.mp4: {error}")


@pytest.mark.parametrize("error", NO_MEMORY, ids=str)
def test_too_little_memory_breaks_nothing(gpu, error):
    assert is_out_of_memory(error)
    exit_after_gpu_fault("a.mp4", error)
    assert gpu.asked == 0


@needs_cuda
def test_a_gpu_is_asked_itself():
    done = run_python("-c", ON_A_GPU)
    assert (done.returncode, done.stdout) == (70, "went on\n"), done.stderr
    assert "a.mp4: of another kind" in done.stderr
