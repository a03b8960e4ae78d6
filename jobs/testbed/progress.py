"""How far a command of the testbed has come."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

_INTERVAL_S = 10.0


def video_progress(console: Console, total: int) -> Callable[[int], None]:
    """Return a callback that prints the number of finished videos every ten seconds."""
    said = time.monotonic()

    def progress(done: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _INTERVAL_S:
            said = time.monotonic()
            console.print(f"{done} of {total} videos", highlight=False)

    return progress
