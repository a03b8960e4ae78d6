"""Tables from a name to a class that is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any


def load_object(target: str) -> Any:
    """The object that ``"package.module:Name"`` names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


class LazyTable(Mapping[str, Any]):
    """A read-only mapping whose values are given as ``"package.module:Name"`` and imported on first use.

    A missing name raises KeyError that lists the known ones, in the words of ``what``.
    """

    def __init__(self, what: str, targets: Mapping[str, str]) -> None:
        self._what = what
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> Any:
        if name not in self._targets:
            raise KeyError(f"unknown {self._what} {name!r}; known: {', '.join(self._targets)}")
        return load_object(self._targets[name])

    def __contains__(self, name: object) -> bool:  # without importing anything
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
