"""The pruning methods: one a file, found by name through PRUNERS, built by make_pruner."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from gstep.lazy import LazyTable
from gstep.methods import METHODS
from gstep.pruners.base import Pruner

PRUNERS = LazyTable("method", METHODS)


def make_pruner(method: str = "gstep", **params: Any) -> Pruner:
    """The pruner of that name with these hyper-parameters, reusable for any number of videos.

    Raises ValueError that names what is accepted for an unknown method, an unknown parameter or a bad value.
    """
    if not isinstance(method, str) or method not in PRUNERS:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(PRUNERS)}")
    pruner_class: type[Pruner] = PRUNERS[method]
    accepted = [field.name for field in fields(pruner_class)]
    if unknown := [name for name in params if name not in accepted]:
        listed = ", ".join(accepted) or "none"
        raise ValueError(f"unknown parameter {', '.join(unknown)} of method {method!r}; it accepts: {listed}")
    return pruner_class(**params)
