"""Checks of arguments, whose ValueErrors name the argument, the accepted values and the given value."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from gstep.evidence import EVIDENCE_SHAPES

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_number(name: str, value: Any, accepted: str, is_accepted: Callable[[float], bool]) -> float:
    """Return ``value`` as a float if it is a finite real number, not a bool, for which ``is_accepted`` returns True.

    ``accepted`` describes the accepted numbers in the ValueError that is raised otherwise, such as "in [0, 1]".
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        number = as_float(value)
        if math.isfinite(number) and is_accepted(number):
            return number
    raise ValueError(f"{name} must be a number {accepted}; got {value!r}")


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int if it is an integer, not a bool, in [low, high]; otherwise raise ValueError.

    ``high`` None means no limit.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= low and (high is None or number <= high):
            return number
    accepted = f"at least {low}" if high is None else f"in [{low}, {high}]"
    raise ValueError(f"{name} must be an integer {accepted}; got {value!r}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return ``value`` if it is a string in ``choices``; otherwise raise ValueError."""
    if not (isinstance(value, str) and value in choices):
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    return value


def check_tokens(tokens: Any) -> None:
    """Raise ValueError unless ``tokens`` is a finite, dense, nonempty [T,N,D] tensor of 16-, 32- or 64-bit floats."""
    rule = "tokens must be a tensor [T,N,D] (frames, tokens per frame, hidden size), each at least 1"
    if not isinstance(tokens, Tensor):
        raise ValueError(f"{rule}; got {type(tokens).__name__}")
    if tokens.layout != torch.strided or tokens.is_nested:
        raise ValueError(f"{rule}, dense; got {'a nested one' if tokens.is_nested else tokens.layout}")
    if tokens.ndim != 3 or tokens.numel() == 0:
        raise ValueError(f"{rule}; got shape {list(tokens.shape)}")
    if tokens.dtype not in _DTYPES:
        raise ValueError(f"tokens must be float16, bfloat16, float32 or float64; got {tokens.dtype}")
    if not all(math.isfinite(edge) for edge in torch.stack(torch.aminmax(tokens)).tolist()):
        bad_TN = (~torch.isfinite(tokens)).sum(dim=-1)
        frame, token = divmod(int((bad_TN > 0).flatten().int().argmax()), tokens.shape[1])
        raise ValueError(
            f"tokens hold {int(bad_TN.sum())} non-finite values (NaN or infinity), the first at frame {frame}, "
            f"token {token}: check the encoder"
        )


def check_grid_and_times(grid: Any, times: Any, n_frames: int, per_frame: int) -> None:
    """Raise ValueError unless the grid and the times fit T frames of N tokens.

    Args:
        grid: A sequence of two positive Python ints (rows, columns) with rows * columns = N, or None.
        times: A sequence of T finite numbers, not bools, or None.
    """
    if grid is not None:
        sides = grid if isinstance(grid, Sequence) and len(grid) == 2 else (0, 0)
        if not all(isinstance(side, int) and side > 0 for side in sides) or sides[0] * sides[1] != per_frame:
            raise ValueError(f"grid must be (rows, columns) of the {per_frame} tokens of a frame; got {grid!r}")
    if times is not None:
        seconds = times if isinstance(times, Sequence) and len(times) == n_frames else (math.nan,)
        if not all(isinstance(at, Real) and not isinstance(at, bool) and math.isfinite(as_float(at)) for at in seconds):
            raise ValueError(f"times must be the seconds of the {n_frames} frames, finite numbers; got {times!r}")


def check_evidence(evidence: Mapping[str, Any], n_frames: int, per_frame: int) -> None:
    """Raise ValueError unless evidence is finite float tensors whose shapes fit T frames of N tokens, and each other.

    Tensors of names in EVIDENCE_SHAPES must not be empty, and must have the lengths of the tokens; an axis that several
    of them share, such as De, must have the same length in all. Other names may have any shape.
    """
    lengths = {"T": n_frames, "N": per_frame, "T*N": n_frames * per_frame}
    for name, value in evidence.items():
        if not isinstance(value, Tensor) or value.dtype not in _DTYPES:
            value_type = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"evidence {name!r} must be a tensor of floats; got {value_type}")
        if name in EVIDENCE_SHAPES:
            axes = EVIDENCE_SHAPES[name]
            sizes = dict(zip(axes, value.shape, strict=False))
            if len(axes) != value.ndim or value.numel() == 0 or {**sizes, **lengths} != {**lengths, **sizes}:
                expected_shape = ", ".join(str(lengths.get(axis, axis)) for axis in axes)
                raise ValueError(
                    f"evidence {name!r} must be [{','.join(axes)}] = [{expected_shape}] for these tokens; "
                    f"got shape {list(value.shape)}"
                )
            lengths |= sizes
        if not torch.isfinite(value).all():
            raise ValueError(f"evidence {name!r} holds non-finite values (NaN or infinity): check its encoder")


def as_float(value: SupportsFloat) -> float:
    """Convert a number to a float; return infinity if it is too large, even if it is negative."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
