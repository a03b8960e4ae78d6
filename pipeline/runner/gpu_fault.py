"""The end of a GPU actor's process after an error that would fail all its later work."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import torch

from gstep.errors import is_out_of_memory


def exit_after_gpu_fault(item: str, error: Exception) -> None:
    """End this process if ``error`` broke its CUDA context, which would fail all later work too; else return.

    The GPU is asked, whatever the error says: Triton, cuDNN and drivers have words of their own for a broken context,
    and cuBLAS says "CUDA error" where it only has too little memory. Where this process has no CUDA context to ask, the
    error's words decide.
    """
    if not is_out_of_memory(error) and _is_broken(error):
        give_up_process(item, error)


def _is_broken(error: Exception) -> bool:
    """Return whether the GPU refuses all work since an error."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA error" in str(error)
    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - whatever it is, the next kernel would raise it too
        return True
    return False


def give_up_process(item: str, error: Exception) -> NoReturn:
    """End this process at once; ``item`` was in hand.

    Ray starts another process, which asks the heartbeats how many died with ``item`` (a video, a question) in hand.
    """
    print(f"{item}: {error}", file=sys.stderr, flush=True)
    os._exit(70)
