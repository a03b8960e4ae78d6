"""The end of a GPU actor's process after an error that would fail all its later work."""

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

    Ray starts another process, which asks the heartbeats how many died with ``item`` (a video, a question) in hand.
    """
    print(f"{item}: {error}", file=sys.stderr, flush=True)
    os._exit(70)
