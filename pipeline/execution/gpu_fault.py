"""What a GPU actor does after an error that no later work of its process would survive."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def exit_after_gpu_fault(item: str, error: Exception) -> None:
    """End the process where ``error`` broke the CUDA context: everything after it would fail too."""
    if "CUDA error" in str(error):
        give_up_process(item, error)


def give_up_process(item: str, error: Exception) -> NoReturn:
    """End the process.

    Ray starts another one, which asks the heartbeats how often ``item`` (a video, a question) was in hand then.
    """
    print(f"{item}: {error}", file=sys.stderr, flush=True)
    os._exit(70)
