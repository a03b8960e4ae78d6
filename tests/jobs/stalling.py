"""``python -m tests.jobs.stalling FILE ARGUMENTS``: jobs.prune, whose watchdog counts seconds once there is FILE.

However slowly a busy machine starts the workers, nothing passes for a stall before.
"""

import sys
import time
from functools import partial
from pathlib import Path

from jobs import prune
from pipeline.runner import driver


class LateClock:
    """Seconds since a file is there; 0 until then."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._since: float | None = None

    def __call__(self) -> float:
        if self._since is None and self._file.exists():
            self._since = time.monotonic()
        return 0.0 if self._since is None else time.monotonic() - self._since


if __name__ == "__main__":
    file, *argv = sys.argv[1:]
    driver.Watchdog = partial(driver.Watchdog, clock=LateClock(Path(file)))  # type: ignore[assignment,misc]
    sys.exit(prune.main(argv))
