"""The parameters of pruning methods: read from texts, checked, and what a method checks of a video."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from numbers import Integral, Real
from typing import Any, Literal, SupportsFloat, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from gstep.evidence import EVIDENCE_SHAPES
from gstep.lazy import did_you_mean
from gstep.pruners.base import Pruner

_NONE = type(None)
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", _NONE: "none"}


def check_params(kind: type[Pruner], params: Mapping[str, Any], called: str) -> dict[str, Any]:
    """Convert parameters to the types of their fields: an int to a float where one is wanted, numbers to Python's own.

    Args:
        called: the method's name, for messages.

    Raises ValueError for an unknown parameter, a missing one and one of another type, naming what is accepted.
    """
    known = {item.name: item for item in fields(kind) if item.init}
    if unknown := [name for name in params if name not in known]:
        hinted = ", ".join(name + did_you_mean(name, known) for name in unknown)
        raise ValueError(f"unknown parameter {hinted} of method {called!r}; it accepts: {', '.join(known) or 'none'}")
    if missing := [name for name, item in known.items() if name not in params and _is_required(item)]:
        raise ValueError(f"method {called!r} needs a value of {', '.join(missing)}")
    hints = _hints(kind, called)
    return {name: _check_value(name, value, list(_alternatives(hints[name])), called) for name, value in params.items()}


def read_params(kind: type[Pruner], texts: Mapping[str, str], called: str) -> dict[str, Any]:
    """Read parameters given as text by the types of their fields; "none" is None where that is accepted.

    Raises ValueError for text that is no value of the field's type. A name that is no field's is left as it is, for
    :func:`check_params` to refuse.
    """
    hints = _hints(kind, called)
    return {
        name: _read_value(name, text, list(_alternatives(hints[name])), called) if name in hints else text
        for name, text in texts.items()
    }


def _is_required(item: Field[Any]) -> bool:
    """Return whether a dataclass field has no default."""
    return item.default is MISSING and item.default_factory is MISSING


def _hints(kind: type[Pruner], called: str) -> dict[str, Any]:
    """Return the annotation of each field."""
    try:
        hints = get_type_hints(kind)
    except Exception as error:  # annotations are code of the method's author
        raise ValueError(f"method {called!r}: its annotations cannot be read: {error}") from error
    return {item.name: hints[item.name] for item in fields(kind)}


def _alternatives(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, or the type itself if it is none."""
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _alternatives(part)
    else:
        yield hint


def _check_value(name: str, value: Any, accepted: list[Any], called: str) -> Any:
    """Return ``value`` in the first accepted type that it fits. Raises ValueError, naming the types."""
    for kind in accepted:
        fits, own = _converted(kind, value)
        if fits:
            return own
    raise ValueError(f"method {called!r}: {name} must be {_describe_types(accepted)}; got {value!r}")


def _converted(kind: Any, value: Any) -> tuple[bool, Any]:
    """Return whether ``value`` is of the type, and the value converted to it."""
    if get_origin(kind) is Literal:
        same = [choice for choice in get_args(kind) if type(choice) is type(value) and choice == value]
        return bool(same), value
    if kind in (int, float):
        fits = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
        fits = fits and (kind is int or math.isfinite(as_float(value)))
        return fits, kind(value) if fits else value
    return (isinstance(value, kind), value) if kind in _WORDS else (True, value)


def _read_value(name: str, text: str, accepted: list[Any], called: str) -> Any:
    """Parse ``text`` by the narrowest accepted type that it fits. Raises ValueError, naming the types."""
    choices = [choice for kind in accepted if get_origin(kind) is Literal for choice in get_args(kind)]
    for choice in choices:
        if text == str(choice) or (isinstance(choice, bool) and text == str(choice).lower()):
            return choice
    for value in _readings(text):
        if type(value) in accepted and _converted(type(value), value)[0]:
            return value
    unreadable = not (choices or set(accepted) & _WORDS.keys())
    why = " and cannot be given as text" if unreadable else ""
    raise ValueError(f"method {called!r}: {name} must be {_describe_types(accepted)}{why}; got {text!r}")


def _readings(text: str) -> Iterator[Any]:
    """Yield the values that ``text`` may stand for, those of the narrowest type first: anything is text."""
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        yield words[text.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            yield kind(text)
    yield text


def _describe_types(accepted: list[Any]) -> str:
    """Describe the accepted types for a message: "an integer or none"."""
    parts = []
    for kind in accepted:
        if get_origin(kind) is Literal:
            parts.append("one of " + ", ".join(map(str, get_args(kind))))
        else:
            parts.append(_WORDS.get(kind, f"of type {getattr(kind, '__name__', kind)}"))
    return " or ".join(parts)


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_number(name: str, value: Any, accepted: str, is_accepted: Callable[[float], bool]) -> float:
    """Return ``value`` as a float, if it is a finite number (no bool) for which ``is_accepted`` holds."""
    if isinstance(value, Real) and not isinstance(value, bool):
        number = as_float(value)
        if math.isfinite(number) and is_accepted(number):
            return number
    raise ValueError(f"{name} must be a number {accepted}; got {value!r}")


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int, if it is an integer (no bool) in [low, high]."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= low and (high is None or number <= high):
            return number
    accepted = f"at least {low}" if high is None else f"in [{low}, {high}]"
    raise ValueError(f"{name} must be an integer {accepted}; got {value!r}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return ``value``, if it is one of ``choices``."""
    if not (isinstance(value, str) and value in choices):
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    return value


def check_tokens(tokens: Any) -> None:
    """Raise ValueError unless ``tokens`` is a finite [T,N,D] tensor of a float dtype with T, N, D >= 1."""
    wanted = "tokens must be a tensor [T,N,D] (frames, tokens a frame, hidden size), each at least 1"
    if not isinstance(tokens, Tensor):
        raise ValueError(f"{wanted}; got {type(tokens).__name__}")
    if tokens.layout != torch.strided or tokens.is_nested:
        raise ValueError(f"{wanted}, dense; got {'a nested one' if tokens.is_nested else tokens.layout}")
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


def check_evidence(evidence: Mapping[str, Any], n_frames: int, per_frame: int) -> None:
    """Raise ValueError unless evidence is finite floats whose shapes fit T frames of N tokens, and each other."""
    lengths = {"T": n_frames, "N": per_frame, "T*N": n_frames * per_frame}
    for name, value in evidence.items():
        if not isinstance(value, Tensor) or value.dtype not in _DTYPES:
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"evidence {name!r} must be a tensor of floats; got {got}")
        if name in EVIDENCE_SHAPES:
            axes = EVIDENCE_SHAPES[name]
            found = dict(zip(axes, value.shape, strict=False))
            if len(axes) != value.ndim or value.numel() == 0 or {**found, **lengths} != {**lengths, **found}:
                wanted = ", ".join(str(lengths.get(axis, axis)) for axis in axes)
                raise ValueError(
                    f"evidence {name!r} must be [{','.join(axes)}] = [{wanted}] for these tokens; "
                    f"got shape {list(value.shape)}"
                )
            lengths |= found
        if not torch.isfinite(value).all():
            raise ValueError(f"evidence {name!r} holds non-finite values (NaN or infinity): find out where they arose")


def as_float(value: SupportsFloat) -> float:
    """Convert a number to a float; one beyond the range of floats becomes infinity."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
