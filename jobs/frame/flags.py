"""Flags from a dataclass: ``add_flags`` adds them to a parser, ``from_flags`` makes the object from parsed flags.

tyro, cyclopts, jsonargparse, simple-parsing, pydantic-settings, cappa and typed-settings were tried instead. Each lacks
something that is needed here, such as dataclasses, ``--no-x``, or repeated flags that add to the file's list.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Collection
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pipeline.errors import UsageError
from pipeline.options import REQUIRED, check_options, get_value_type, parse_share

T = TypeVar("T")


def add_flags(parser: argparse.ArgumentParser, config: type, names: Collection[str] | None = None) -> None:
    """Add a flag for each field of a configuration class to ``parser``, in the groups of the help.

    A field belongs to the group that its ``option`` names, or to the group of the field before it. Positional arguments
    come first, then the fields of the class itself, then inherited fields.

    Args:
        names: the fields to add; None adds all. If given, a field is absent from the parsed namespace unless its flag
            is given.
    """
    hints = get_type_hints(config)
    groups: dict[str, argparse._ArgumentGroup] = {}
    title = ""
    for item in _list_fields(config):
        title = item.metadata.get("group", title)
        if names is not None and item.name not in names:
            continue
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        action = _add_flag(groups[title], item, hints[item.name], getattr(config, "item", ""))
        if names is not None:
            action.default = argparse.SUPPRESS


def read_config_file(path: str, config: type) -> dict[str, object]:
    """Read options from a YAML file; an empty file has none. Names may be written with "-" or "_".

    Returns:
        Field name -> converted value, to be used as defaults of the flags.

    Raises:
        UsageError: the file cannot be read or is not a mapping, or an option is unknown, repeated, or has a value of
            the wrong type.
    """
    import yaml  # noqa: PLC0415 - not needed for --help

    try:
        text = Path(path).read_text(encoding="utf-8")
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: expected options as NAME: VALUE, got {type(content).__name__}")
    if duplicates := [name for name in content if "-" in str(name) and str(name).replace("-", "_") in content]:
        raise UsageError(f"--config {path}: {', '.join(duplicates)} is given twice, with - and with _")
    assert isinstance(node, yaml.MappingNode)
    counts = Counter(key.value for key, _ in node.value)
    if repeated := [name for name, count in counts.items() if count > 1]:  # YAML would take the last silently
        raise UsageError(f"--config {path}: {', '.join(map(str, repeated))} is given twice")
    options = {str(name).replace("-", "_"): value for name, value in content.items()}
    return check_options(config, options, f"--config {path}: ")


def from_flags(config: type[T], namespace: argparse.Namespace) -> T:
    """Create the configuration object from parsed flags, ignoring other values in the namespace.

    Raises:
        UsageError: a required option is missing, or a value is invalid.
    """
    values = {item.name: getattr(namespace, item.name) for item in fields(config)}  # type: ignore[arg-type]
    required = [item for item in fields(config) if item.default is MISSING and item.default_factory is MISSING]  # type: ignore[arg-type]
    if missing := [_format_flag_name(item) for item in required if values[item.name] is None]:
        raise UsageError(f"the following arguments are required: {', '.join(missing)}")
    return config(**values)


def _list_fields(config: type) -> list[Field[Any]]:
    """List the fields of a dataclass: positional arguments, then its own fields, then the fields of its bases."""
    depths = {item.name: n for n, cls in enumerate(config.__mro__) if is_dataclass(cls) for item in fields(cls)}
    return sorted(fields(config), key=lambda item: (not item.metadata.get("positional"), depths[item.name]))


def _add_flag(group: argparse._ArgumentGroup, item: Field[Any], hint: Any, item_name: str) -> argparse.Action:
    """Add the flag or positional argument of one field to an argument group, and return its action.

    A bool gets ``--x`` and ``--no-x``, or only its own flag if it begins with ``no_``. A list is extended by each use
    of its flag. Positional arguments and required options may be absent for argparse, since a file may give them.

    Args:
        hint: the field's type.
        item_name: the noun that completes "{item}" in the help text.
    """
    default = item.default if item.default_factory is MISSING else item.default_factory()
    # The keywords of argparse differ from one kind of flag to the next.
    help_text = _format_help(item.metadata["help"].format(item=item_name), default)
    if default is REQUIRED:
        default = None  # argparse must not demand the flag, because --config may give the option
    keywords: dict[str, Any] = {"default": default, "help": help_text}
    for key in ("metavar", "choices"):
        if key in item.metadata:
            keywords[key] = item.metadata[key]
    kind = get_value_type(hint)
    if kind is bool:
        # A flag must be able to override a file; the opposite of --no-x would be --no-no-x.
        keywords["action"] = "store_true" if item.name.startswith("no_") else argparse.BooleanOptionalAction
    elif get_origin(hint) is list:
        keywords["type"] = parse_share if item.metadata.get("share") else get_args(hint)[0]
        # A flag can take several values only if no positional word follows it.
        keywords |= {"action": "extend", "nargs": "+"} if item.metadata.get("several") else {"action": "append"}
    else:
        keywords["type"] = parse_share if item.metadata.get("share") else kind
    if item.metadata.get("positional"):
        keywords.pop("action", None)  # words replace the default and a file's value, and one argument takes all words
        return group.add_argument(item.name, nargs="*" if get_origin(hint) is list else "?", **keywords)
    return group.add_argument(_format_flag_name(item), dest=item.name, **keywords)


def _format_flag_name(item: Field[Any]) -> str:
    """Return the name of a field's flag, or the metavar of a positional argument."""
    if item.metadata.get("positional"):
        return str(item.metadata["metavar"])
    return str(item.metadata.get("flag", "--" + item.name.replace("_", "-")))


def _format_help(text: str, default: Any) -> str:
    """Append the default in brackets to a help text, unless it is None, False or empty; a required option says so."""
    words = "required" if default is REQUIRED else default
    if isinstance(default, list):
        words = " ".join(map(str, default))
    return text if words is None or words is False or words == "" else f"{text} [{words}]"
