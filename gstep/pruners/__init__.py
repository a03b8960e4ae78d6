"""The pruning methods: one a file, found by name through PRUNERS or by import path, built by make_pruner."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gstep.lazy import LazyTable, did_you_mean, load_object
from gstep.methods import METHODS
from gstep.pruners.base import Pruner
from gstep.pruners.checks import as_float

PRUNERS = LazyTable("method", METHODS)

_NONE = type(None)
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", _NONE: "none"}


def make_pruner(method: str | Pruner = "gstep", /, **params: Any) -> Pruner:
    """Make a method with these hyper-parameters, reusable for any number of videos.

    Args:
        method: a name of PRUNERS, the import path ``module:Class`` of a method from elsewhere, or an object of one,
            which has its parameters already.

    Raises ValueError that names what is accepted for an unknown method, a class that is no method, an unknown parameter
    or a bad value.
    """
    if not isinstance(method, Pruner):
        return _build(find_method(method), params, method)
    called = method_name(check_method(type(method)))
    if params:
        raise ValueError(f"{', '.join(params)}: an object of {called} has its parameters already; give its class them")
    check_params(type(method), {item.name: getattr(method, item.name) for item in fields(method) if item.init}, called)
    return method


def read_pruner(method: str, texts: Mapping[str, str], *, family: str | None = None) -> Pruner:
    """Make a method with hyper-parameters that were given as text, as on a command line.

    Args:
        method: a name of PRUNERS or ``module:Class``.
        family: the rules of the model's family, for a method that has some for each (``Pruner.family_parameter``),
            where ``texts`` says nothing else.

    Raises ValueError as :func:`make_pruner`.
    """
    kind = find_method(method)
    params = read_params(kind, texts, method)
    if family is not None and kind.family_parameter is not None:
        params = {kind.family_parameter: family, **params}
    return _build(kind, params, method)


def find_method(method: str) -> type[Pruner]:
    """Find the class of a method: a name of PRUNERS, or ``module:Class``, whose module is imported.

    Raises ValueError for an unknown name, a path that cannot be imported, and a class that is no method.
    """
    if isinstance(method, str) and ":" in method:
        kind = check_method(_imported(method), method)
        if _target(kind) != method and _imported(_target(kind)) is not kind:
            raise ValueError(f"method {method!r} was defined as {_target(kind)}, where something else is now")
        return kind
    if isinstance(method, type) and issubclass(method, Pruner):
        raise ValueError(f"method {method.__name__} is a class: give an object, {method.__name__}(...), or its path")
    if not isinstance(method, str) or method not in PRUNERS:
        hint = did_you_mean(str(method), PRUNERS)
        raise ValueError(f"unknown method {method!r}{hint}; known: {', '.join(PRUNERS)}, or module:Class of your own")
    found: type[Pruner] = PRUNERS[method]
    return found


def method_name(kind: type[Pruner]) -> str:
    """Return the name that finds the class again, here and on other machines: one of PRUNERS, else ``module:Class``."""
    return next((name for name, target in METHODS.items() if target == _target(kind)), _target(kind))


def check_method(kind: Any, called: str | None = None) -> type[Pruner]:
    """Return ``kind`` if it is the class of a method.

    Raises ValueError where it is no subclass of Pruner, has no ``select``, is no frozen dataclass itself, or does not
    declare what every method has to.
    """
    if not (isinstance(kind, type) and issubclass(kind, Pruner)):
        raise ValueError(f"method {called or kind!r} is no subclass of gstep.pruners.base.Pruner")
    called = repr(called or _target(kind))
    if inspect.isabstract(kind):
        raise ValueError(
            f"method {called} is abstract: it does not define {', '.join(sorted(kind.__abstractmethods__))}"
        )
    if "__dataclass_params__" not in vars(kind):
        raise ValueError(f"method {called} is no dataclass: put @dataclass(frozen=True, kw_only=True) above its class")
    for name, wanted in (("name", str), ("nested", bool)):
        if not isinstance(getattr(kind, name, None), wanted):
            raise ValueError(f"method {called} does not declare {name}: ClassVar[{wanted.__name__}] (see Pruner)")
    return kind


def _build(kind: type[Pruner], params: Mapping[str, Any], called: str) -> Pruner:
    """Make an object of a method's class from checked parameters. Raises ValueError."""
    checked = check_params(kind, params, called)
    try:
        return kind(**checked)
    except ValueError:
        raise
    except Exception as error:  # the method's own check may raise anything
        raise ValueError(f"method {called!r} cannot be made with {checked}: {type(error).__name__}: {error}") from error


def _target(kind: type[Pruner]) -> str:
    """Return the import path ``module:Class`` of a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _imported(path: str) -> Any:
    """Import the class that ``module:Class`` names. Raises ValueError where there is none."""
    try:
        return load_object(path)
    except Exception as error:  # importing runs code of the method's author
        raise ValueError(
            f"method {path!r} cannot be imported: {type(error).__name__}: {error}; its module must be importable on "
            "every machine that prunes: in a package that is installed there, or in a folder on PYTHONPATH"
        ) from error


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
