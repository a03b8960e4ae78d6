"""A context for float32 matrix products in full precision, even where the caller allows TensorFloat-32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

_FULL = frozenset({"none", "ieee"})  # "none": not set

_lock = Lock()
_users = 0  # threads that are inside the context
_restore: Callable[[], None]


@contextmanager
def use_full_precision() -> Iterator[None]:
    """Compute float32 matrix products inside this context in float32, never in TensorFloat-32 or bfloat16.

    This is a setting of the process in torch. The first thread that enters the context changes it, and the last thread
    that leaves restores it. Until then, it applies to all other threads too.
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
    """Set full float32 precision for this process, and return a function that restores the previous settings.

    Both torch's process-wide setting and those of CUDA's and the CPU's matrix products are set. If torch 2.9 or newer
    already has full precision, nothing changes.
    """
    operators = _list_operators()
    precisions = [operator.fp32_precision for operator in operators]
    if operators and _FULL.issuperset(precisions):
        return lambda: None
    process_setting = _read_process_setting()
    if process_setting is not None:
        torch.set_float32_matmul_precision("highest")
    for operator in operators:
        operator.fp32_precision = "ieee"

    def restore() -> None:
        """Restore the previous settings."""
        if process_setting is not None:
            torch.set_float32_matmul_precision(process_setting)
        for operator, precision in zip(operators, precisions, strict=True):
            operator.fp32_precision = "none"
            if operator.fp32_precision != precision:  # otherwise the setting for all operators already has this value
                operator.fp32_precision = precision

    return restore


def _list_operators() -> tuple[Any, ...]:
    """List torch's settings for CUDA's and the CPU's matrix products, which override the process's.

    The result is empty before torch 2.9.
    """
    on_cpu = getattr(torch.backends.mkldnn, "matmul", None)
    return () if on_cpu is None else (torch.backends.cuda.matmul, on_cpu)


def _read_process_setting() -> str | None:
    """Return the value of torch.get_float32_matmul_precision, or None if a backend's setting contradicts it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch raises where the operators' settings disagree
        return None
