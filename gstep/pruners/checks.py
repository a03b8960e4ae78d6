"""Checks of what users pass in; every error is a ValueError that names the argument, what it accepts and what came."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_number(name: str, value: Any, accepted: str, is_accepted: Callable[[float], bool]) -> float:
    """``value`` as a float, if it is a finite number (no bool) for which ``is_accepted`` holds."""
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number) and is_accepted(number):
            return number
    raise ValueError(f"{name} must be a number {accepted}; got {value!r}")


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """``value`` as an int, if it is an integer (no bool) in [low, high]."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= low and (high is None or number <= high):
            return number
    accepted = f"at least {low}" if high is None else f"in [{low}, {high}]"
    raise ValueError(f"{name} must be an integer {accepted}; got {value!r}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """``value``, if it is one of ``choices``."""
    if not (isinstance(value, str) and value in choices):
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    return value


def check_tokens(tokens: Any) -> None:
    """Refuses what is not a finite [T,N,D] tensor of a float dtype with T, N, D >= 1."""
    wanted = "tokens must be a tensor [T,N,D] (frames, tokens a frame, hidden size), each at least 1"
    if not isinstance(tokens, Tensor):
        raise ValueError(f"{wanted}; got {type(tokens).__name__}")
    if tokens.ndim != 3 or tokens.numel() == 0:
        raise ValueError(f"{wanted}; got shape {list(tokens.shape)}")
    if tokens.dtype not in _DTYPES:
        raise ValueError(f"tokens must be float16, bfloat16, float32 or float64; got {tokens.dtype}")
    if not all(math.isfinite(edge) for edge in torch.stack(torch.aminmax(tokens)).tolist()):
        bad_TN = (~torch.isfinite(tokens)).sum(dim=-1)
        frame, token = divmod(int((bad_TN > 0).flatten().int().argmax()), tokens.shape[1])
        raise ValueError(
            f"tokens hold {int(bad_TN.sum())} non-finite values (NaN or infinity), the first at frame {frame}, "
            f"token {token}: find out why the encoder made them"
        )
