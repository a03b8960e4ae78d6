"""What a cache says of the method that pruned it.

Whoever reads a cache imports no code that it names: of a method from outside gstep the cache itself says what the
method declared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from gstep import PRUNERS
from gstep.pruners import method_name
from gstep.pruners.base import Pruner
from pipeline.cache.header import CacheIdentity, PrunerIdentity


@dataclass(frozen=True)
class Declared:
    """The properties that a method's class declares of the tokens it keeps; see :class:`gstep.pruners.base.Pruner`."""

    nested: bool
    merges: bool
    exact: bool
    reorders: bool

    @classmethod
    def by(cls, kind: type[Pruner]) -> Declared:
        """Return what a method's class declares."""
        return cls(kind.nested, kind.merges, kind.exact, kind.reorders)


def describe_method(pruner: Pruner) -> PrunerIdentity:
    """Describe a method and its parameters, JSON-able, for the identity of a cache or of answers.

    Of a method from outside gstep it says what the method declares, too.

    Raises ValueError where a parameter has no form in JSON.
    """
    method, params = method_name(type(pruner)), pruner.params()
    try:
        same = json.loads(json.dumps(params, allow_nan=False)) == params
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(f"method {method!r}: parameters are recorded as JSON, which cannot hold {params}")
    identity: PrunerIdentity = {"method": method, "params": params}
    if method not in PRUNERS:
        identity["declares"] = asdict(Declared.by(type(pruner)))
    return identity


def declared_method(identity: CacheIdentity) -> Declared | None:
    """Return what the method that pruned a cache of this identity declares, or None where that is unknown here."""
    held = identity.get("pruner", {})
    if held.get("method") in PRUNERS:
        return Declared.by(PRUNERS[held["method"]])
    declares = held.get("declares")
    if not (isinstance(declares, Mapping) and declares.keys() == Declared.__dataclass_fields__.keys()):
        return None
    return Declared(**declares)
