"""Full precision for products of float32, whatever a caller allows for its own."""

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
    """Keep float32 matrix products within this context from TensorFloat-32 or bfloat16, on a GPU or by oneDNN.

    torch has these settings once a process: the first thread that enters changes them, where they need it, and the last
    one that leaves restores them. Products of other threads are as precise meanwhile.
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
    """Set full float32 precision, and return the function that restores the previous settings."""
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
            if operator.fp32_precision != precision:  # otherwise a setting for all operators gives it already
                operator.fp32_precision = precision

    return restore


def _operators() -> tuple[Any, ...]:
    """List torch's backend objects whose own precision setting, since torch 2.9, overrides the process-wide one."""
    of_cpu = getattr(torch.backends.mkldnn, "matmul", None)
    return () if of_cpu is None else (torch.backends.cuda.matmul, of_cpu)


def _older_setting() -> str | None:
    """Return the value of set_float32_matmul_precision, or None where a backend's own setting overrides that."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch raises where the operators' settings disagree
        return None
