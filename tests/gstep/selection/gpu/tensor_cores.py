"""How tensor cores multiply, in numpy, for Triton's interpreter.

As measured by Fasi, Higham, Mikaitis and Pranesh (Numerical behavior of NVIDIA tensor cores, 2021) on V100 to A100, and
by others on H100 since: products of 16-bit numbers are exact; k of them and the accumulator are aligned to the largest
exponent among them and cut off there; so is their sum. Assumed are 8 a step and no guard bits, or 16 and two.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from triton.runtime.interpreter import TensorHandle

_BITS = 24  # of a float32
GUARD_BITS = {8: 0, 16: 2}


def accumulate(total: NDArray[np.float64], terms: NDArray[np.float64], guard: int) -> NDArray[np.float64]:
    """Add ``terms`` [k,X,Y] to ``total`` [X,Y] in one step."""
    largest = np.maximum(np.abs(terms).max(axis=0), np.abs(total))
    unit = np.ldexp(1.0, np.frexp(largest)[1] - _BITS - guard)
    added = (np.trunc(total / unit) + np.trunc(terms / unit).sum(axis=0)) * unit
    unit = np.ldexp(1.0, np.frexp(np.abs(added))[1] - _BITS)
    return np.trunc(added / unit) * unit


def dot(a: NDArray[Any], b: NDArray[Any], total: NDArray[Any], k: int) -> NDArray[np.float32]:
    """Return total + a @ b for [X,D] and [D,Y], k channels a step."""
    terms = a.T.astype(np.float64)[:, :, None] * b.astype(np.float64)[:, None, :]
    total = total.astype(np.float64)
    for start in range(0, len(terms), k):
        total = accumulate(total, terms[start : start + k], GUARD_BITS[k])
    return total.astype(np.float32)


def create_dot(k: int) -> Any:
    """Make a product in place of the interpreter's own, which rounds to nearest and by a row's place."""

    def created(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return TensorHandle(dot(a.data, b.data, d.data, k), d.dtype.scalar)

    return created
