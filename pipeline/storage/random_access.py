"""Files read at random: a local one in place, an object by requests for stretches of it; the last ones stay open."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import pyarrow as pa

from pipeline.storage.s3 import Slice

V = TypeVar("V")
_TAIL = 2**16  # bytes fetched on opening: the footer of most shards


class _Slices(Protocol):
    """A client that reads byte ranges of objects."""

    def read_slice(self, uri: str, start: int, end: int | None = None) -> Slice: ...


class LocalFile:
    """A local file for random access, mapped into memory.

    Attributes:
        mapped: the file as Arrow reads it, without a copy.
    """

    def __init__(self, mapped: pa.NativeFile) -> None:
        self.mapped = mapped

    def size(self) -> int:
        """Return the file's size in bytes."""
        return int(self.mapped.size())

    def view(self, start: int, end: int) -> memoryview:
        """Return bytes [start, end) of the file, without a copy. Raises OSError."""
        return memoryview(self.mapped.get_stream(start, end - start).read_buffer(end - start))

    def fetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch nothing: a mapped file is read in place."""


class RangedObject:
    """An object in a store, for random access: its tail comes with the first request, other stretches with one each.

    It has no position, so that threads may share it; it holds no connection.
    """

    mapped = None  # Arrow reads the result of ``fetch``

    def __init__(self, objects: _Slices, uri: str) -> None:
        self._objects, self._uri = objects, uri
        tail = objects.read_slice(uri, -_TAIL)
        self._size = tail.size
        self._tail = Stretch(tail.size - len(tail.data), tail.data)

    def size(self) -> int:
        """Return the object's size in bytes."""
        return self._size

    def stretch(self, start: int, end: int) -> Stretch:
        """Return a stretch with bytes [start, end), cut at the object's end; at most one request.

        It is the whole tail if the bytes lie there. Raises OSError.
        """
        end = min(end, self._size)
        if start >= end:
            return Stretch(start, b"")
        if self._tail.holds(start, end):
            return self._tail
        return Stretch(start, self._objects.read_slice(self._uri, start, end).data)

    def view(self, start: int, end: int) -> memoryview:
        """Return bytes [start, end) of the object; at most one request. Raises OSError."""
        return self.stretch(start, end).view(start, end)

    def fetch(self, spans: Iterable[tuple[int, int]]) -> Fetched:
        """Fetch stretches of the object into memory, a request each. Raises OSError."""
        return Fetched([self.stretch(*span) for span in spans], self._size, self.stretch)


class Stretch(NamedTuple):
    """The bytes of a file from offset ``start`` on."""

    start: int
    data: bytes

    def holds(self, start: int, end: int) -> bool:
        """Return True if bytes [start, end) of the file are among these."""
        return self.start <= start and end <= self.start + len(self.data)

    def view(self, start: int, end: int) -> memoryview:
        """Return bytes [start, end) of the file, which this stretch must hold."""
        return memoryview(self.data)[start - self.start : end - self.start]


class Positioned(io.RawIOBase):
    """A file of ``size`` bytes that is read on from a position."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.place = size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.size}[whence] + offset
        return self.place


class Fetched(Positioned):
    """A file object over prefetched stretches of an object; for one reader, since it has a position."""

    def __init__(self, stretches: Sequence[Stretch], size: int, read_other: Callable[[int, int], Stretch]) -> None:
        """Hold ``stretches`` of an object of ``size`` bytes; ``read_other`` gets whatever else is read."""
        super().__init__(size)
        self._stretches, self._rest = stretches, read_other

    def view(self, start: int, end: int) -> memoryview:
        """Return bytes [start, end), or as many of them as the file has. Raises OSError."""
        stretch = next((s for s in self._stretches if s.holds(start, end)), None) or self._rest(start, end)
        return stretch.view(start, min(end, self.size))

    def readinto(self, buffer: Any) -> int:
        data = self.read_buffer(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read_buffer(self, n_bytes: int = -1) -> memoryview:
        """Return the next ``n_bytes`` as a view instead of a copy; pyarrow calls this."""
        data = self.view(self.place, self.size if n_bytes < 0 else self.place + n_bytes)
        self.place += len(data)
        return data


class LoadedOnce(Generic[V]):
    """A cache like ``functools.lru_cache``, for what takes long to load, and for threads and forks.

    Threads that ask for the same value wait for one load. A process that was forked starts with none: what its parent
    had open, and a lock that one of the parent's threads may hold, is not touched.
    """

    def __init__(self, load: Callable[..., V], keep: int) -> None:
        """Keep the last ``keep`` values; all threads that wait get what ``load`` raises for their key."""
        self._load = load
        self._keep = keep
        # Of each process: a lock, and the values that are loaded or being loaded by their keys, the last used last.
        self._by_process: dict[int, tuple[Lock, OrderedDict[tuple[Hashable, ...], Future[V]]]] = {}

    def __call__(self, *key: Hashable) -> V:
        """Return the value of a key: from memory, from another thread that loads it, or by loading it now.

        The value that was not used for the longest time may be dropped. An error of ``load`` is raised, and not kept.
        """
        lock, values = self._by_process.setdefault(os.getpid(), (Lock(), OrderedDict()))
        with lock:
            loading = values.get(key)
            if loading is not None:
                values.move_to_end(key)
            else:
                future = values[key] = Future()
                while len(values) > self._keep:
                    values.popitem(last=False)
        if loading is not None:
            return loading.result()
        try:
            value = self._load(*key)
        except BaseException as error:
            with lock:
                if values.get(key) is future:
                    del values[key]
            future.set_exception(error)
            raise
        future.set_result(value)
        return value

    def __reduce__(self) -> tuple[type[LoadedOnce[V]], tuple[Callable[..., V], int]]:
        return LoadedOnce, (self._load, self._keep)  # another process loads its own
