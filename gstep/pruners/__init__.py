"""The pruning methods: one a file, found by name through PRUNERS or by import path, built by make_pruner."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gstep.lazy import LazyTable, did_you_mean, load_object
from gstep.methods import METHODS
from gstep.pruners.base import Pruner
from gstep.pruners.params import check_params, read_params

PRUNERS = LazyTable("method", METHODS)


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
