"""Random draws as Python's own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def shuffled(rng: np.random.Generator, items: Sequence[T]) -> list[T]:
    """Return the items in a random order."""
    return [items[i] for i in rng.permutation(len(items)).tolist()]


def one_of(rng: np.random.Generator, items: Sequence[T]) -> T:
    """Draw one item."""
    return items[int(rng.integers(len(items)))]


def whole(rng: np.random.Generator, limits: tuple[int, int]) -> int:
    """Draw a whole number from a range, both ends included."""
    return int(rng.integers(limits[0], limits[1] + 1))


def real(rng: np.random.Generator, limits: tuple[float, float]) -> float:
    """Draw a number from a range, uniformly."""
    return float(rng.uniform(*limits))
