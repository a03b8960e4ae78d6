"""Numbers with the range in which they are expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple


class Interval(NamedTuple):
    """A number that is not known exactly: its expected value, and the range that holds it."""

    low: float
    expected: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Interval:
        """Return a number without a range."""
        return cls(value, value, value)

    def scaled(self, factor: float) -> Interval:
        """Multiply by a number that is known."""
        return Interval(*(factor * end for end in self))

    def inverse(self) -> Interval:
        """Return 1 divided by this. Every end must be above 0."""
        return Interval(*(1 / end for end in reversed(self)))


NONE = Interval.exactly(0.0)


def spread(function: Callable[..., float], *parts: Interval) -> Interval:
    """Compute a function of several intervals, at all lower ends, all expected values and all upper ends.

    The function must rise with each part, so that its range is the widest that the parts allow.
    """
    return Interval(*(function(*ends) for ends in zip(*parts, strict=True)))


def product(*parts: Interval) -> Interval:
    """Multiply intervals."""
    return spread(lambda *ends: math.prod(ends), *parts)


def total(*parts: Interval) -> Interval:
    """Add intervals up."""
    return spread(lambda *ends: math.fsum(ends), *parts)


def mean_of(values: Sequence[float], population: int, least: float = 0.0) -> Interval:
    """Estimate the mean of a corpus of ``population`` values from a sample: two standard errors to both sides.

    The range holds at least the share ``least`` of the mean on both sides. One value alone stands for a corpus that may
    be half or twice as much, unless it is all of it.
    """
    mean, left_out = fmean(values), 1 - len(values) / population
    if len(values) == 1:
        factor = 2.0 if left_out > 0 else 1 + least
        return Interval(mean / factor, mean, mean * factor)
    half = math.hypot(2 * stdev(values) * math.sqrt(left_out / len(values)), least * mean)
    return Interval(max(mean - half, 0.0), mean, mean + half)
