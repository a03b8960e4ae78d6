"""Flags from a dataclass: ``add_flags`` writes them, ``from_flags`` reads them back."""

from __future__ import annotations

import argparse
import types
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from pipeline.errors import UsageError

T = TypeVar("T")


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Add one flag for each field; help, metavar, choices and ``positional`` come from the field's metadata."""
    hints = get_type_hints(config)
    for item in fields(config):
        _add(parser, item, hints[item.name])


def read_config_file(path: str, config: type) -> dict[str, Any]:
    """The options of a YAML file, by field name, to be used as the flags' defaults.

    Raises UsageError where the file cannot be read, names an option that does not exist, or gives one the wrong type.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: expected options as NAME: VALUE, got {type(content).__name__}")
    hints = get_type_hints(config)
    if twice := [name for name in content if "-" in str(name) and str(name).replace("-", "_") in content]:
        raise UsageError(f"--config {path}: {', '.join(twice)} stands there twice, with - and with _")
    options = {str(name).replace("-", "_"): value for name, value in content.items()}
    if unknown := sorted(options.keys() - hints.keys()):
        raise UsageError(f"--config {path}: unknown option {', '.join(unknown)}; known: {', '.join(hints)}")
    return {name: _checked(value, hints[name], f"--config {path}: {name}") for name, value in options.items()}


def _checked(value: Any, hint: Any, where: str) -> Any:
    """A YAML value as the type of its field. An int is a float, a number is text; nothing else is converted."""
    kind = _value_type(hint)
    if value is None and kind is not hint:
        return None
    if value is None and get_origin(kind) is list:
        return []
    if get_origin(kind) is list:
        if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise UsageError(f"{where} must be a list of texts, got {value!r}")
        return value
    accepted = {float: (int, float), str: (str, int, float)}.get(kind, (kind,))
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{where} must be {_WORDS[kind]}, got {value!r}")
    return kind(value)


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


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
        keywords["action"] = argparse.BooleanOptionalAction  # a flag must be able to overrule a file
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
