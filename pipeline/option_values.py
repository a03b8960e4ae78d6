"""Options from a file or from Python, checked against the fields of the dataclass that declares them."""

from __future__ import annotations

import os
import types
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pipeline.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    C = TypeVar("C", bound=DataclassInstance)

# The Python types that a field of each type accepts, and how messages name these types.
_TEXT = (str, os.PathLike)
_ACCEPTED = {int: (Integral,), float: (Real,), bool: (bool,), str: (*_TEXT, Real)}
_LISTED = {str: "texts", float: "numbers"}
# Options that ask a command for something else than its work; from Python they would be passed over.
_OF_COMMANDS = frozenset(
    {"dry_run", "index", "plan", "probe", "gpus", "gpu_type", "decode_cores", "price"}
    | {"corpus_videos", "seconds", "size"}
)
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def checked_options(config: type, given: Mapping[str, object], where: str = "") -> dict[str, Any]:
    """Convert options from a file or from Python, by field name, to the types of the fields of ``config``.

    An int becomes a float, a number or a path text, a mapping a list of NAME=VALUE, and of a share a text in percent a
    number; nothing else is converted.
    Raises UsageError, whose message begins with ``where``, for an unknown name and a value of another type.
    """
    known = {item.name: item for item in fields(config)}
    if unknown := [name for name in given if name not in known]:
        near = [match for name in unknown for match in get_close_matches(name, known, 1)]
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
        raise UsageError(f"{where}unknown option {', '.join(unknown)}; {hint}")
    hints = get_type_hints(config)
    values = {
        name: _as_pairs(value) if known[name].metadata.get("metavar") == "NAME=VALUE" else value
        for name, value in given.items()
    }
    for name, value in values.items():
        if known[name].metadata.get("share"):
            values[name] = [_share(one) for one in value] if isinstance(value, list) else _share(value)
        if known[name].metadata.get("positional") and isinstance(value, _TEXT) and get_origin(hints[name]) is list:
            values[name] = [value]  # a single word of the command
    return {name: _checked(value, hints[name], f"{where}{name}") for name, value in values.items()}


def config_of(
    kind: type[C], function: str, options: Mapping[str, object], accepted: Collection[str] | None = None
) -> C:
    """Make a configuration from keyword arguments of ``function``, which accepts only the fields ``accepted``.

    Without ``accepted`` it takes all but ``dry_run``, plans, and what goes with these.

    Raises UsageError.
    """
    accepted = [item.name for item in fields(kind) if item.name not in _OF_COMMANDS] if accepted is None else accepted
    for name in sorted(options.keys() & {item.name for item in fields(kind)} - set(accepted)):
        raise UsageError(
            f"{function}() takes no {name}, which is for the command; it takes {', '.join(sorted(accepted))}"
        )
    return kind(**checked_options(kind, options, f"{function}(): "))


def share(text: str) -> float:
    """Parse a share of a whole: "0.25", or the same in percent, "25%". Raises ValueError."""
    number, percent, rest = text.partition("%")
    if rest.strip():
        raise ValueError(f"{text!r} is no share")
    return float(number) / 100 if percent else float(number)


def value_type(hint: Any) -> Any:
    """Return the type without None of an optional one (``int`` of ``int | None``), and any other as it is."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return hint


def _as_pairs(value: object) -> object:
    """Convert a mapping to a list of NAME=VALUE; return other values as they are."""
    if not isinstance(value, Mapping):
        return value
    return [f"{name}={str(of).lower() if of is None or isinstance(of, bool) else of}" for name, of in value.items()]


def _share(value: object) -> object:
    """Convert a text like "25%" to a number; return other values, and texts that are no share, as they are."""
    try:
        return share(value) if isinstance(value, str) and value.endswith("%") else value
    except ValueError:
        return value


def _checked(value: Any, hint: Any, where: str) -> Any:
    """Convert an option's value to its type. Raises UsageError."""
    kind = value_type(hint)
    if value is None and kind is not hint:
        return None
    if value is None and get_origin(kind) is list:
        return []
    if get_origin(kind) is list:
        (of,) = get_args(kind)
        if not isinstance(value, list | tuple) or (of is str and not all(isinstance(one, _TEXT) for one in value)):
            raise UsageError(f"{where} must be a list of {_LISTED[of]}, got {value!r}")
        return [_checked(item, of, where) for item in value]
    with suppress(OverflowError):  # of a number beyond all floats
        if isinstance(value, _ACCEPTED[kind]) and (kind is bool or not isinstance(value, bool)):
            return kind(value)
    raise UsageError(f"{where} must be {_WORDS[kind]}, got {value!r}")
