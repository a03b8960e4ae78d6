"""The end of a GPU actor's process after an error that would fail all its later work."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def exit_after_gpu_fault(item: str, error: Exception) -> None:
    """End this process if ``error`` broke its CUDA context, which would fail all later work too; else return."""
    if "CUDA error" in str(error):
        give_up_process(item, error)


def give_up_process(item: str, error: Exception) -> NoReturn:
    """End this process at once; ``item`` was in hand.

    Ray starts another process, which asks the heartbeats how many died with ``item`` (a video, a question) in hand.
    """
    print(f"{item}: {error}", file=sys.stderr, flush=True)
    os._exit(70)
