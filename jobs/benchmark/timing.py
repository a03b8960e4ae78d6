"""How long pieces of work take, by wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import TypeVar

T = TypeVar("T")


def seconds_of(work: Callable[[], T]) -> tuple[float, T]:
    """Run ``work`` and return its wall seconds and its result."""
    started = time.perf_counter()
    done = work()
    return time.perf_counter() - started, done


def medians_in_turn(
    forms: Mapping[str, Callable[[], T]], repeats: int, wait: Callable[[T], object] = lambda done: None
) -> dict[str, tuple[float, T]]:
    """Run all forms in turn, again and again; return the median seconds and the last result of each, by its name.

    A disturbance of the machine falls on all of them so. ``wait`` returns once a GPU has what a form gives.
    """
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    done: dict[str, T] = {}
    for _ in range(repeats):
        for name, work in forms.items():
            started = time.perf_counter()
            done[name] = work()
            wait(done[name])
            seconds[name].append(time.perf_counter() - started)
    return {name: (median(taken), done[name]) for name, taken in seconds.items()}


def median_seconds(work: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Run ``work`` again and again; return its median seconds and its last result."""
    return medians_in_turn({"": work}, repeats)[""]
