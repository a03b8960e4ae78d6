"""Tables from a name to a class that is imported on first use, near names, and contexts for large imports."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any


def load_object(target: str) -> Any:
    """Import the object that ``"package.module:Name"`` names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean KNOWN?)"`` for the known name nearest to a mistyped one, or "" if none is near."""
    near = get_close_matches(name, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""


@contextmanager
def importing_much() -> Iterator[None]:
    """Stop Python's garbage collector in this context, and exempt the imported objects from later collections.

    The objects of torch, transformers and Ray stay for ever. Searching them took a sixth of the time of importing them,
    and most of the time in which a process ends.
    """
    was_enabled, n_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > n_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def saying(say: Callable[[str], object], line: str, every_s: float = 4.0) -> Iterator[None]:
    """Call ``say`` with a line every ``every_s`` seconds in this context, from a thread: no log is silent."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(every_s):
            say(line)

    teller = threading.Thread(target=tell, name="saying", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def attributes_of(module: str, table: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module, which finds the names of ``table`` when they are first asked for."""

    def attribute(name: str) -> Any:
        if name in table:
            return table[name]
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return attribute


class LazyTable(Mapping[str, Any]):
    """A read-only mapping whose values are given as ``"package.module:Name"`` and imported on first use.

    A missing name raises KeyError that lists the known ones, in the words of ``what``.
    """

    def __init__(self, what: str, targets: Mapping[str, str]) -> None:
        self._what = what
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> Any:
        if name not in self._targets:
            hint = did_you_mean(name, self._targets)
            raise KeyError(f"unknown {self._what} {name!r}{hint}; known: {', '.join(self._targets)}")
        return load_object(self._targets[name])

    def __contains__(self, name: object) -> bool:  # without importing anything
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
