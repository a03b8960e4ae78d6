"""The pruning methods, one per file, and the functions that make a method from its name or import path."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gstep.lazy import LazyTable, format_suggestion, load_object
from gstep.methods import METHODS
from gstep.pruners.base import Pruner
from gstep.pruners.checks import as_float

PRUNERS = LazyTable("method", METHODS)

_NONE = type(None)
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", _NONE: "none"}


def make_pruner(method: str | Pruner = "gstep", /, **params: Any) -> Pruner:
    """Make a method with these hyper-parameters; the object can prune any number of videos.

    Args:
        method: A name of PRUNERS, the import path ``module:Class`` of another method (the module is imported), or a
            Pruner object, which is checked and returned.
        params: The hyper-parameters, by the names of the class's fields. None are allowed with a Pruner object.

    Raises:
        ValueError: The method is unknown, cannot be imported or is not valid, or a parameter is unknown, missing or
            invalid. The message gives the accepted values.
    """
    if not isinstance(method, Pruner):
        return _build_pruner(find_method(method), params, method)
    label = get_method_name(check_method(type(method)))
    if params:
        raise ValueError(f"{', '.join(params)}: an object of {label} has its parameters: pass them to its class")
    check_params(type(method), {item.name: getattr(method, item.name) for item in fields(method) if item.init}, label)
    return method


def read_pruner(method: str, texts: Mapping[str, str], *, family: str | None = None) -> Pruner:
    """Make a method from hyper-parameters given as text, as on a command line.

    Args:
        method: A name of PRUNERS or ``module:Class``.
        texts: Parameter name -> text.
        family: The model's family (``ModelFamily.variant``), the default of the field that ``Pruner.family_parameter``
            names. Ignored if the method names no field.

    Raises:
        ValueError: The method is unknown, cannot be imported or is not valid, or a parameter is unknown, missing or
            invalid.
    """
    kind = find_method(method)
    params = read_params(kind, texts, method)
    if family is not None and kind.family_parameter is not None:
        params = {kind.family_parameter: family, **params}
    return _build_pruner(kind, params, method)


def find_method(method: str) -> type[Pruner]:
    """Return the class of a method: a name of PRUNERS, or ``module:Class``, whose module is imported.

    Raises:
        ValueError: The name is unknown, the import raises any error, the class is not a valid method or was defined
            under a name that now means another object, or ``method`` is a class.
    """
    if isinstance(method, str) and ":" in method:
        kind = check_method(_import_class(method), method)
        path = _get_import_path(kind)
        if path != method and _import_class(path) is not kind:
            raise ValueError(f"method {method!r} was defined as {path}, which is another object now: restore the name")
        return kind
    if isinstance(method, type) and issubclass(method, Pruner):
        raise ValueError(f"method {method.__name__} is a class: pass an object, {method.__name__}(...), or its path")
    if not isinstance(method, str) or method not in PRUNERS:
        hint = format_suggestion(str(method), PRUNERS)
        raise ValueError(f"unknown method {method!r}{hint}; known: {', '.join(PRUNERS)}, or your own module:Class")
    method_class: type[Pruner] = PRUNERS[method]
    return method_class


def get_method_name(kind: type[Pruner]) -> str:
    """Return the name by which :func:`find_method` finds a top-level class: its key in PRUNERS, or ``module:Class``."""
    return next((name for name, target in METHODS.items() if target == _get_import_path(kind)), _get_import_path(kind))


def check_method(kind: Any, label: str | None = None) -> type[Pruner]:
    """Check that ``kind`` is the class of a method, and return it; ``label`` is its name in messages.

    Raises:
        ValueError: ``kind`` is not a subclass of Pruner, is abstract, is not itself decorated as a dataclass, or does
            not declare ``name`` (a string) and ``nested`` (a bool).
    """
    if not (isinstance(kind, type) and issubclass(kind, Pruner)):
        raise ValueError(f"method {label or kind!r} is not a subclass of gstep.pruners.base.Pruner")
    label = repr(label or _get_import_path(kind))
    if inspect.isabstract(kind):
        raise ValueError(
            f"method {label} is abstract: it does not define {', '.join(sorted(kind.__abstractmethods__))}"
        )
    if "__dataclass_params__" not in vars(kind):
        raise ValueError(
            f"method {label} is not a dataclass: put @dataclass(frozen=True, kw_only=True) above its class"
        )
    for name, field_type in (("name", str), ("nested", bool)):
        if not isinstance(getattr(kind, name, None), field_type):
            raise ValueError(f"method {label} does not declare {name}: ClassVar[{field_type.__name__}] (see Pruner)")
    return kind


def _build_pruner(kind: type[Pruner], params: Mapping[str, Any], label: str) -> Pruner:
    """Check the parameters and construct the method.

    Raises:
        ValueError: A parameter is unknown, missing or of the wrong type, or the constructor raises any exception; its
            own ValueError passes unchanged.
    """
    values = check_params(kind, params, label)
    try:
        return kind(**values)
    except ValueError:
        raise
    except Exception as error:  # the method's checks may raise anything
        raise ValueError(f"method {label!r} cannot be made with {values}: {type(error).__name__}: {error}") from error


def _get_import_path(kind: type[Pruner]) -> str:
    """Return the import path ``module:Class`` of a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _import_class(path: str) -> Any:
    """Import the object that ``module:Class`` names; an error of the import becomes a ValueError."""
    try:
        return load_object(path)
    except Exception as error:  # importing runs the author's code
        raise ValueError(
            f"method {path!r} cannot be imported: {type(error).__name__}: {error}; its module must be importable on "
            "every machine that prunes: in a package that is installed there, or in a folder on PYTHONPATH"
        ) from error


def check_params(kind: type[Pruner], params: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Convert parameters to the types of their fields, and return them by name.

    For example, an int for a float field becomes a float, and NumPy numbers become Python's. Values for types other
    than int, float, bool, str, None and Literal are returned as they are.

    Raises:
        ValueError: A parameter is unknown, has no value and no default, or does not have an accepted type; or an
            annotation of the class cannot be evaluated.
    """
    init_fields = {item.name: item for item in fields(kind) if item.init}
    if unknown := [name for name in params if name not in init_fields]:
        names = ", ".join(name + format_suggestion(name, init_fields) for name in unknown)
        raise ValueError(
            f"unknown parameter {names} of method {label!r}; it accepts: {', '.join(init_fields) or 'none'}"
        )
    if missing := [name for name, item in init_fields.items() if name not in params and _is_required(item)]:
        raise ValueError(f"method {label!r} needs a value of {', '.join(missing)}")
    hints = _read_field_types(kind, label)
    return {
        name: _check_value(name, value, list(_iter_union_members(hints[name])), label) for name, value in params.items()
    }


def read_params(kind: type[Pruner], texts: Mapping[str, str], label: str) -> dict[str, Any]:
    """Parse the text of parameters by the types of their fields; "none" is None if the field accepts None.

    Text for an unknown name is returned unparsed, so that :func:`check_params` refuses it.

    Raises:
        ValueError: A text is not a value of the field's type, or an annotation of the class cannot be evaluated.
    """
    hints = _read_field_types(kind, label)
    return {
        name: _read_value(name, text, list(_iter_union_members(hints[name])), label) if name in hints else text
        for name, text in texts.items()
    }


def _is_required(item: Field[Any]) -> bool:
    """Return True if a dataclass field has no default."""
    return item.default is MISSING and item.default_factory is MISSING


def _read_field_types(kind: type[Pruner], label: str) -> dict[str, Any]:
    """Return the evaluated annotation of each dataclass field, by name.

    Raises:
        ValueError: An annotation cannot be evaluated.
    """
    try:
        hints = get_type_hints(kind)
    except Exception as error:  # annotations are the author's code
        raise ValueError(f"method {label!r}: its annotations cannot be read: {error}") from error
    return {item.name: hints[item.name] for item in fields(kind)}


def _iter_union_members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union type, including those of nested unions; yield any other type itself."""
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _iter_union_members(part)
    else:
        yield hint


def _check_value(name: str, value: Any, accepted: list[Any], label: str) -> Any:
    """Convert ``value`` to the first of the accepted types that it fits; raise ValueError if it fits none."""
    for candidate in accepted:
        fits, converted = _convert_value(candidate, value)
        if fits:
            return converted
    raise ValueError(f"method {label!r}: {name} must be {_describe_types(accepted)}; got {value!r}")


def _convert_value(kind: Any, value: Any) -> tuple[bool, Any]:
    """Return whether ``value`` fits the type ``kind``, and the value converted to it (unchanged if it does not fit).

    Any integer fits int and any finite real number fits float, NumPy's included, but no bool does. Only its choices fit
    a Literal, compared with their types. Any value fits types that are neither a Literal nor in _WORDS.
    """
    if get_origin(kind) is Literal:
        matches = [choice for choice in get_args(kind) if type(choice) is type(value) and choice == value]
        return bool(matches), value
    if kind in (int, float):
        fits = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
        fits = fits and (kind is int or math.isfinite(as_float(value)))
        return fits, kind(value) if fits else value
    return (isinstance(value, kind), value) if kind in _WORDS else (True, value)


def _read_value(name: str, text: str, accepted: list[Any], label: str) -> Any:
    """Parse ``text`` as a choice of a Literal, or otherwise as the narrowest accepted type that it fits.

    Only finite numbers fit float. Text never fits types other than int, float, bool, str, None and Literal.

    Raises:
        ValueError: The text fits no type.
    """
    choices = [choice for kind in accepted if get_origin(kind) is Literal for choice in get_args(kind)]
    for choice in choices:
        if text == str(choice) or (isinstance(choice, bool) and text == str(choice).lower()):
            return choice
    for value in _iter_candidate_values(text):
        if type(value) in accepted and _convert_value(type(value), value)[0]:
            return value
    has_no_text = not (choices or set(accepted) & _WORDS.keys())
    hint = " and cannot be given as text" if has_no_text else ""
    raise ValueError(f"method {label!r}: {name} must be {_describe_types(accepted)}{hint}; got {text!r}")


def _iter_candidate_values(text: str) -> Iterator[Any]:
    """Yield what ``text`` may stand for: None or a bool (in any case), then an int, a float, and last the text."""
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        yield words[text.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            yield kind(text)
    yield text


def _describe_types(accepted: list[Any]) -> str:
    """Format the accepted types for a message, joined by "or", such as "an integer or none" or "one of a, b"."""
    parts = []
    for kind in accepted:
        if get_origin(kind) is Literal:
            parts.append("one of " + ", ".join(map(str, get_args(kind))))
        else:
            parts.append(_WORDS.get(kind, f"of type {getattr(kind, '__name__', kind)}"))
    return " or ".join(parts)
