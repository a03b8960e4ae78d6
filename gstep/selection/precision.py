"""Products of float32 in float32, whatever a caller allows for its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

_FULL = frozenset({"none", "ieee"})  # "none": nothing was set

_lock = Lock()
_users = 0  # threads that are inside
_restore: Callable[[], None]


@contextmanager
def full_precision() -> Iterator[None]:
    """Within, no matrix product of float32 is computed from TensorFloat-32 or bfloat16, on a GPU or by oneDNN.

    torch has these settings once a process: the first thread that enters changes them, where they need it, and the last
    that leaves sets them back. What other threads multiply meanwhile is as precise.
    """
    global _users, _restore  # noqa: PLW0603 - as torch's settings are
    with _lock:
        if _users == 0:
            _restore = _set_full()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _restore()


def _set_full() -> Callable[[], None]:
    """Returns what undoes it."""
    operators = _operators()
    held = [operator.fp32_precision for operator in operators]
    if operators and _FULL.issuperset(held):
        return lambda: None
    older = _older_setting()
    if older is not None:
        torch.set_float32_matmul_precision("highest")
    for operator in operators:
        operator.fp32_precision = "ieee"

    def restore() -> None:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for operator, precision in zip(operators, held, strict=True):
            operator.fp32_precision = "none"
            if operator.fp32_precision != precision:  # else it has it from a setting for all operators
                operator.fp32_precision = precision

    return restore


def _operators() -> tuple[Any, ...]:
    """What multiplies matrices and has a setting of its own, since torch 2.9."""
    of_cpu = getattr(torch.backends.mkldnn, "matmul", None)
    return () if of_cpu is None else (torch.backends.cuda.matmul, of_cpu)


def _older_setting() -> str | None:
    """Of set_float32_matmul_precision, which allow_tf32 moves too; None where an operator's own has overtaken it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch tells it only where both agree
        return None
