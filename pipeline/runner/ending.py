"""The last writes when an error or an interrupt ends a run: they share one time limit, and raise nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pipeline.errors import printable

#: Seconds that all last writes of an ending have together: schedulers send SIGKILL after half a minute.
LAST_WRITES_S = 15.0
NO_ANSWER = f"no answer within {LAST_WRITES_S:g} s"


def seconds_left(ending: BaseException) -> float:
    """Return the seconds left for the last writes of ``ending``. The first call starts the clock."""
    until: float = vars(ending).setdefault("last_writes_until", time.monotonic() + LAST_WRITES_S)
    return max(0.0, until - time.monotonic())


def write_last(ending: BaseException, write: Callable[[], object], spare_s: float = 0.0) -> str:
    """Do one of the last writes before ``ending`` leaves a run; return the reason if it failed, else "".

    Raises nothing. The write has the seconds left for ``ending``, without the last ``spare_s``, which are kept for
    later writes. A write that hangs is left behind in a thread, and may still be done late.
    """
    failures: list[str] = []

    def run() -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001 - it must not hide what ended the run
            failures.append(printable(str(error)) or type(error).__name__)

    thread = threading.Thread(target=run, name="last-write", daemon=True)
    left_s = max(0.0, seconds_left(ending) - spare_s)
    thread.start()
    thread.join(left_s)
    return NO_ANSWER if thread.is_alive() else "".join(failures)
