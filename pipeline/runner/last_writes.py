"""The writes that are left when an error or an interrupt ends a run: they share one bound, and raise nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pipeline.errors import printable

#: Seconds that all last writes of an ending have together: schedulers send SIGKILL after half a minute.
LAST_WRITES_S = 15.0
NO_ANSWER = f"no answer within {LAST_WRITES_S:g} s"


def seconds_left(ending: BaseException) -> float:
    """Return the seconds that the last writes have since the first of them, or the first such call."""
    until: float = vars(ending).setdefault("last_writes_until", time.monotonic() + LAST_WRITES_S)
    return max(0.0, until - time.monotonic())


def write_last(ending: BaseException, write: Callable[[], object], spare_s: float = 0.0) -> str:
    """Do one of the last writes before ``ending`` leaves a run; return why it was not done, "" where it was.

    A write that hangs is left behind in a thread: it may be done late, as that of a driver which was killed. Of the
    time ``spare_s`` is left for other writes.
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
