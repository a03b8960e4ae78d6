"""The values that were used last, each loaded once however many threads ask for it together."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

V = TypeVar("V")


class LoadedOnce(Generic[V]):
    """A cache like ``functools.lru_cache``, for what takes long to load, and for threads and forks.

    Threads that ask for the same value wait for one load. A process that was forked starts with none: what its parent
    had open, and a lock that one of the parent's threads may hold, is not touched.
    """

    def __init__(self, load: Callable[..., V], keep: int) -> None:
        """Keep the last ``keep`` values; all threads that wait get what ``load`` raises for their key."""
        self._load = load
        self._keep = keep
        self._held: dict[int, _Held[V]] = {}  # process id -> its values

    def __call__(self, *key: Hashable) -> V:
        held = self._of_this_process()
        with held.lock:
            found = held.values.get(key)
            if found is not None:
                held.values.move_to_end(key)
            else:
                mine = held.values[key] = Future()
                while len(held.values) > self._keep:
                    held.values.popitem(last=False)
        if found is not None:
            return found.result()
        try:
            value = self._load(*key)
        except BaseException as error:
            with held.lock:
                if held.values.get(key) is mine:
                    del held.values[key]
            mine.set_exception(error)
            raise
        mine.set_result(value)
        return value

    def __reduce__(self) -> tuple[type[LoadedOnce[V]], tuple[Callable[..., V], int]]:
        return LoadedOnce, (self._load, self._keep)  # another process loads its own

    def _of_this_process(self) -> _Held[V]:
        """Return the values of this process, none of its parent's."""
        pid = os.getpid()
        held = self._held.get(pid)
        return held if held is not None else self._held.setdefault(pid, _Held())


class _Held(Generic[V]):
    """The values that one process has loaded or is loading."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.values: OrderedDict[tuple[Hashable, ...], Future[V]] = OrderedDict()
