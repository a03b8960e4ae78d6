"""What was loaded last, by name, for threads that share it: each thing is loaded once, however many ask for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Loaded(Generic[K, V]):
    """The last ``keep`` results of ``load``. One that raises is forgotten, and everybody who waits for it gets the
    exception. It does not pickle; a forked child starts empty, since another thread may have been loading."""

    def __init__(self, load: Callable[[K], V], keep: int) -> None:
        self._load, self._keep = load, keep
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._held: dict[K, Future[V]] = {}  # the one asked for last comes last

    def __call__(self, key: K) -> V:
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            found = self._held.pop(key, None)
            future = self._held[key] = found or Future()
            if len(self._held) > self._keep:
                del self._held[next(iter(self._held))]
        if found is None:
            try:
                future.set_result(self._load(key))
            except BaseException as error:  # noqa: BLE001 - who waits for it gets it
                with self._lock:
                    if self._held.get(key) is future:
                        del self._held[key]
                future.set_exception(error)
        return future.result()
