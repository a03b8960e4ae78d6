"""Flags from a dataclass: ``add_flags`` writes them, ``from_flags`` reads them back."""

from __future__ import annotations

import argparse
import types
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Add one flag for each field; help, metavar, choices and ``positional`` come from the field's metadata."""
    hints = get_type_hints(config)
    for item in fields(config):
        _add(parser, item, hints[item.name])


def from_flags(config: type[T], namespace: argparse.Namespace) -> T:
    """The dataclass with the values that were parsed."""
    return config(**{item.name: getattr(namespace, item.name) for item in fields(config)})  # type: ignore[arg-type]


def _add(parser: argparse.ArgumentParser, item: Field[Any], hint: Any) -> None:
    default = item.default if item.default is not MISSING else []
    keywords: dict[str, Any] = {"default": default, "help": _help(item.metadata["help"], default)}
    for key in ("metavar", "choices"):
        if key in item.metadata:
            keywords[key] = item.metadata[key]
    kind = _value_type(hint)
    if kind is bool:
        keywords["action"] = "store_true"
    elif get_origin(hint) is list:
        keywords["action"] = "append"
    else:
        keywords["type"] = kind
    if item.metadata.get("positional"):
        parser.add_argument(item.name, nargs="?", **keywords)
    else:
        parser.add_argument("--" + item.name.replace("_", "-"), **keywords)


def _value_type(hint: Any) -> Any:
    """``int`` of ``int | None``; the hint itself otherwise."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return hint


def _help(text: str, default: Any) -> str:
    return text if default in (None, [], False) else f"{text} [{default}]"
