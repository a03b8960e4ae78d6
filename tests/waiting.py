"""The one way to wait in tests: for something that comes about elsewhere, with a limit and a word about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    what: str | Callable[[], object],
    timeout: float = 120,
    meanwhile: Callable[[], object] | None = None,
) -> T:
    """Look again and again until ``condition`` gives something true; returns that. Most of the time it waits.

    Args:
        what: what is waited for, in words, or a function that says how far it is; for the failure.
        meanwhile: called between two looks; it raises where waiting is in vain.
    """
    deadline = time.monotonic() + timeout
    while True:
        began = time.monotonic()
        if found := condition():
            return found
        if meanwhile is not None:
            meanwhile()
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(max(0.02, 3 * (time.monotonic() - began)))
