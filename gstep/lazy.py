"""Late imports: tables whose classes are imported on first use, near names, and contexts for slow imports."""

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
    """Import the object that ``"package.module:Name"`` names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def find_torchvision_mismatch() -> str | None:
    """Return the version of an installed torchvision that is built for CUDA beside a torch that is not, else None.

    Such a torchvision cannot be imported, nor can the models of transformers, which import it wherever it is installed.
    None too if this process has imported it already, or has a stand-in for the part that fails.
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


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ``" (did you mean NAME?)"`` with the nearest of ``names`` to a mistyped name; "" if none is near."""
    matches = get_close_matches(name, list(names), 1)
    return f" (did you mean {matches[0]}?)" if matches else ""


@contextmanager
def pause_garbage_collector() -> Iterator[None]:
    """Pause Python's garbage collector in this context, for slow imports.

    If the context imports a module, all objects that live at its end are exempt from later collections. The objects of
    torch, transformers and Ray live as long as the process. Scanning them took a sixth of the import time, and most of
    the time in which a process exits.
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
def repeat_line(say: Callable[[str], object], line: str, every_s: float = 4.0) -> Iterator[None]:
    """Call ``say(line)`` every ``every_s`` seconds in this context, from a thread: a slow step is never silent."""
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
    """Make the ``__getattr__`` of a module, which looks names up in ``lazy_objects``.

    The mapping itself must import an object at its lookup, as LazyTable does. Nothing is kept in the module. The
    returned function raises AttributeError for any other name.
    """

    def attribute(name: str) -> Any:
        if name in lazy_objects:
            return lazy_objects[name]
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return attribute


class LazyTable(Mapping[str, Any]):
    """A read-only mapping whose values are given as ``"package.module:Name"`` and imported on first use.

    An unknown name raises KeyError with the nearest and all known names.

    Args:
        kind: the noun for a name in that error, such as "method".
        targets: name -> ``"package.module:Name"``.
    """

    def __init__(self, kind: str, targets: Mapping[str, str]) -> None:
        self._kind = kind
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> Any:
        """Import and return the object of this name. Raises KeyError that lists the known names."""
        if name not in self._targets:
            hint = did_you_mean(name, self._targets)
            raise KeyError(f"unknown {self._kind} {name!r}{hint}; known: {', '.join(self._targets)}")
        return load_object(self._targets[name])

    def __contains__(self, name: object) -> bool:  # without importing anything
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
