"""Numbers with the range in which they are expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from pipeline.rows import Json


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
        """Return 1 divided by this."""
        return Interval(*(1 / end if end else math.inf for end in reversed(self)))


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


def as_json(value: object) -> Json:
    """Convert plans and what they hold to JSON: an interval becomes a mapping of its three numbers."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, tuple | list) else value  # type: ignore[return-value]


def mean_of(values: Sequence[float], least: float = 0.1, population: float = math.inf) -> Interval:
    """Estimate the mean of a corpus of ``population`` values from a sample: two standard errors to both sides.

    The range holds at least the share ``least`` of the mean on both sides. One value alone stands for a corpus that may
    be half or twice as much, unless it is all of it. Raise ValueError for no value.
    """
    if not values:
        raise ValueError("a mean needs at least one value")
    mean, left_out = fmean(values), 1 - len(values) / population
    if len(values) == 1:
        factor = 2.0 if left_out > 0 else 1 + least
        return Interval(mean / factor, mean, mean * factor)
    half = math.hypot(2 * stdev(values) * math.sqrt(max(0.0, left_out) / len(values)), least * mean)
    return Interval(max(mean - half, 0.0), mean, mean + half)


def share_of(count: int, total: int, population: float = math.inf) -> Interval:
    """Estimate a share of a corpus from ``count`` of ``total`` in a sample, by Wilson's interval of 95 %."""
    share = count / total if total else 0.0
    if total >= population or not total:
        return Interval.exactly(share)
    z2 = 1.96**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = 1.96 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    return Interval(max(0.0, centre - half) if count else 0.0, share, min(1.0, centre + half))
