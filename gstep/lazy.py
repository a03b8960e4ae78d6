"""Lazy imports: tables of import paths, suggestions for mistyped names, and contexts for slow imports."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


def load_object(target: str) -> Any:
    """Import ``package.module`` and return its attribute ``Name``, for a target ``"package.module:Name"``.

    Raises:
        ImportError: The module cannot be imported. Any other error of the module's code is passed on.
        AttributeError: The module has no such attribute, or ``target`` has no ":".
    """
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def find_torchvision_mismatch() -> str | None:
    """Return the version of the installed torchvision if it was built for CUDA but torch was not; None otherwise.

    Such a torchvision cannot be imported, and neither can the models of transformers. The result is also None if this
    process has already imported torchvision, or has a substitute for the submodule that fails. Only torch is imported
    here.
    """
    if sys.modules.get("torchvision") or "torchvision._meta_registrations" in sys.modules:
        return None
    import torch  # noqa: PLC0415 - seconds, for modules that do without

    if hasattr(torch.ops.torchvision, "nms"):  # the operator that is missing otherwise
        return None
    spec = PathFinder.find_spec("torchvision")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if torch.version.cuda is not None or file is None or not file.is_file():
        return None
    version = re.search(r"__version__ = '([^']*\+cu[^']*)'", file.read_text())
    return version[1] if version else None


def format_suggestion(name: str, names: Iterable[str]) -> str:
    """Return ``" (did you mean NAME?)"`` for the most similar name; "" if no name has a difflib ratio of 0.6."""
    matches = get_close_matches(name, list(names), 1)
    return f" (did you mean {matches[0]}?)" if matches else ""


@contextmanager
def pause_garbage_collector() -> Iterator[None]:
    """Disable Python's garbage collector inside this context, which makes slow imports faster.

    It is enabled again at the end only if it was enabled before. If the context imported any module, all objects that
    exist at its end are exempt from later collections.
    """
    was_enabled = gc.isenabled()
    n_modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > n_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def repeat_line(say: Callable[[str], object], line: str, every_s: float = 4.0) -> Iterator[None]:
    """Call ``say(line)`` every ``every_s`` seconds inside this context, from a thread, first after ``every_s`` seconds.

    On exit, the context waits for a call that is in progress.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            say(line)

    thread = threading.Thread(target=repeat, name="repeat_line", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def make_getattr(module: str, lazy_objects: Mapping[str, Any]) -> Callable[[str], Any]:
    """Make a module-level ``__getattr__`` that returns ``lazy_objects[name]`` and raises AttributeError otherwise.

    Objects are not stored in the module: each access looks them up again. ``module`` is the module's name in the error.
    """

    def load_attribute(name: str) -> Any:
        if name in lazy_objects:
            return lazy_objects[name]
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return load_attribute


class LazyTable(Mapping[str, Any]):
    """A read-only mapping from names to objects that are given as ``"package.module:Name"`` and imported on lookup.

    Iteration, ``len`` and ``in`` import nothing.

    Args:
        kind: The noun for a name in the message of a KeyError, such as "method".
        targets: name -> ``"package.module:Name"``.
    """

    def __init__(self, kind: str, targets: Mapping[str, str]) -> None:
        self._kind = kind
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> Any:
        """Import the module of this entry and return the object.

        Raises:
            KeyError: The name is unknown. The message suggests the most similar name and lists all names.
        """
        if name not in self._targets:
            hint = format_suggestion(name, self._targets)
            raise KeyError(f"unknown {self._kind} {name!r}{hint}; known: {', '.join(self._targets)}")
        return load_object(self._targets[name])

    def __contains__(self, name: object) -> bool:  # without importing anything
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
