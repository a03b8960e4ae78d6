"""Read files at random positions: local files in place, objects by range requests."""

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
_TAIL = 2**16  # bytes fetched when an object is opened: enough for the footer of most shards


class _Slices(Protocol):
    """A client that reads byte ranges of objects."""

    def read_slice(self, uri: str, start: int, end: int | None = None) -> Slice: ...


class LocalFile:
    """A memory-mapped local file for random access; threads may share it.

    Attributes:
        mapped: the mapped file, which Arrow reads without a copy.
    """

    def __init__(self, mapped: pa.NativeFile) -> None:
        self.mapped = mapped

    def size(self) -> int:
        """Return the file's size in bytes."""
        return int(self.mapped.size())

    def view(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end) of the file without a copy."""
        return memoryview(self.mapped.get_stream(start, end - start).read_buffer(end - start))

    def fetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Return None: a mapped file needs no fetching."""


class RangedObject:
    """An object in a store for random access, by range requests; threads may share it.

    Opening it fetches its size and last 64 KiB with one request.
    """

    mapped = None  # Arrow reads the result of ``fetch``

    def __init__(self, objects: _Slices, uri: str) -> None:
        self._objects = objects
        self._uri = uri
        tail = objects.read_slice(uri, -_TAIL)
        self._size = tail.size
        self._tail = Stretch(tail.size - len(tail.data), tail.data)

    def size(self) -> int:
        """Return the object's size in bytes."""
        return self._size

    def get_stretch(self, start: int, end: int) -> Stretch:
        """Return a stretch that contains the bytes [start, end), cut at the object's end; at most one request.

        If the last 64 KiB contain these bytes, they are returned as a whole.
        """
        end = min(end, self._size)
        if start >= end:
            return Stretch(start, b"")
        if self._tail.holds(start, end):
            return self._tail
        return Stretch(start, self._objects.read_slice(self._uri, start, end).data)

    def view(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end) of the object; at most one request."""
        return self.get_stretch(start, end).view(start, end)

    def fetch(self, spans: Iterable[tuple[int, int]]) -> FetchedFile:
        """Fetch ranges of the object, with at most one request each. Reads outside of them send further requests."""
        return FetchedFile([self.get_stretch(*span) for span in spans], self._size, self.get_stretch)


class Stretch(NamedTuple):
    """Consecutive bytes of a file.

    Attributes:
        start: the offset of the first byte in the file.
    """

    start: int
    data: bytes

    def holds(self, start: int, end: int) -> bool:
        """Return True if this stretch contains the bytes [start, end) of the file."""
        return self.start <= start and end <= self.start + len(self.data)

    def view(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end) of the file, which this stretch must contain, without a copy."""
        return memoryview(self.data)[start - self.start : end - self.start]


class PositionedFile(io.RawIOBase):
    """The base of file objects of ``size`` bytes with a position, ``place``; seeks are not limited to the file."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.place = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.size}[whence] + offset
        return self.place


class FetchedFile(PositionedFile):
    """A file object over fetched stretches of an object; it has a position, so threads may not share it."""

    def __init__(self, stretches: Sequence[Stretch], size: int, read_other: Callable[[int, int], Stretch]) -> None:
        """Create the file object at position 0.

        Args:
            read_other: called with [start, end) for bytes that no single stretch contains; returns a stretch that does.
        """
        super().__init__(size)
        self._stretches = stretches
        self._rest = read_other

    def view(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end), cut at the end of the object; what ``read_other`` raises passes."""
        stretch = next((s for s in self._stretches if s.holds(start, end)), None) or self._rest(start, end)
        return stretch.view(start, min(end, self.size))

    def readinto(self, buffer: Any) -> int:
        data = self.read_buffer(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read_buffer(self, n_bytes: int = -1) -> memoryview:
        """Return the next ``n_bytes`` (all if negative) as a view, and advance the position; pyarrow calls this."""
        data = self.view(self.place, self.size if n_bytes < 0 else self.place + n_bytes)
        self.place += len(data)
        return data


class LoadCache(Generic[V]):
    """A cache of the last used results of a slow function, for threads and forked processes.

    A forked process starts with an empty cache, so that it touches neither its parent's open files nor its locks. A
    pickled copy is empty too.
    """

    def __init__(self, load: Callable[..., V], keep: int) -> None:
        """Create an empty cache of the results of ``load`` for the last ``keep`` keys."""
        self._load = load
        self._keep = keep
        # Process id -> a lock, and the loaded values or the ones being loaded, by key, the last used last.
        self._by_process: dict[int, tuple[Lock, OrderedDict[tuple[Hashable, ...], Future[V]]]] = {}

    def __call__(self, *key: Hashable) -> V:
        """Return ``load(*key)``: from memory, from another thread that is calling it, or by calling it now.

        The least recently used results beyond ``keep`` are dropped. What ``load`` raises is raised in all threads that
        wait for this key, and is not kept: the next call tries again.
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

    def __reduce__(self) -> tuple[type[LoadCache[V]], tuple[Callable[..., V], int]]:
        return LoadCache, (self._load, self._keep)  # another process loads the values itself
