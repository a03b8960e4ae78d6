"""Where a cache lives: whole files that appear in one step or not at all, in a folder or below an S3 prefix."""

from __future__ import annotations

import errno
import io
import os
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from pipeline.errors import UsageError
from pipeline.storage.s3 import Objects, Slice, check_uri, is_object

NOTE = ".running"  # how the notes of runs end; see pipeline.execution.claim
_TAIL = 2**16  # bytes fetched on opening: the footer of most shards
_READERS = 16


class FileInfo(NamedTuple):
    """One file of a store: its name and its size in bytes."""

    name: str
    size: int


class Store(Protocol):
    """Named files below one root; names are POSIX paths relative to it. It pickles; ``str`` is the root as named."""

    def make(self) -> None:
        """Make the root where that is needed. Raises UsageError."""

    def taken(self) -> bool:
        """Whether anything is below the root already, besides the notes of runs."""

    def impatient(self) -> Store:
        """The same for requests that are worth nothing when they come late."""

    def put(self, name: str, data: bytes | pa.Buffer) -> None:
        """Write a file in one atomic step: it is complete under ``name`` afterwards, or absent. Raises OSError."""

    def read(self, name: str) -> bytes:
        """The whole file. Raises FileNotFoundError."""

    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        """The whole files, in this order."""

    def read_slice(self, name: str, start: int, end: int | None = None) -> Slice:
        """Bytes [start, end) of a file, or its last ``-start`` bytes, in one read. Raises FileNotFoundError."""

    def open(self, name: str) -> pa.NativeFile | RangedObject:
        """The file for random access, which threads may share. Raises FileNotFoundError."""

    def names(self, folder: str, suffix: str) -> list[str]:
        """The finished files of a folder, sorted."""

    def listed(self, folder: str) -> list[FileInfo]:
        """All files of a folder ("" is the root) with their sizes, unfinished ones too, sorted."""

    def exists(self, name: str) -> bool: ...

    def age(self, name: str) -> timedelta:
        """How long ago a file was written. Raises FileNotFoundError."""

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens where there is none. Raises OSError."""


def store_at(place: str | Path, objects: Objects | None = None) -> Store:
    """The store at a folder or ``s3://bucket/prefix``. Raises UsageError for any other address."""
    text = str(place)
    if is_object(text):
        check_uri(text)
        return ObjectStore(text, objects or Objects.from_environment())
    if "://" in text and not text.startswith("file:///"):
        raise UsageError(f"{text}: a cache is a folder or s3://bucket/prefix")
    return LocalStore(text.removeprefix("file://"))


def below(name: str) -> str:
    """``name``, where it stays below the root of a store: those of shards stand in files that anybody may have written.

    Raises FileNotFoundError.
    """
    if name.startswith("/") or ".." in name.split("/"):
        raise FileNotFoundError(errno.ENOENT, "the name leads out of the cache", name)
    return name


class LocalStore:
    """A folder."""

    def __init__(self, root: Path | str) -> None:
        self._shown = str(root)
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - workers have other working folders; links stay

    def _path(self, name: str) -> Path:
        return self.root / below(name)

    def make(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self}: the folder cannot be made: {error.strerror}") from error

    def taken(self) -> bool:
        root = self.root
        return root.is_file() or any(path.is_file() and path.suffix != NOTE for path in root.rglob("*"))

    def impatient(self) -> LocalStore:
        return self

    def put(self, name: str, data: bytes | pa.Buffer) -> None:
        path = self._path(name)
        for folder in reversed(path.relative_to(self.root).parents[:-1]):
            (self.root / folder).mkdir(exist_ok=True)  # never the root: one that is gone took all its rows with it
        temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:  # "No space left on device" alone would not say where
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            temporary.unlink(missing_ok=True)  # gone already where it was renamed
        fsync_folder(path.parent)

    def read(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        return map(self.read, names)

    def read_slice(self, name: str, start: int, end: int | None = None) -> Slice:
        with self._path(name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = max(0, size + start) if start < 0 else start
            last = size if end is None else min(end, size)
            return Slice(os.pread(file.fileno(), max(0, last - first), first), size)

    def open(self, name: str) -> pa.NativeFile:
        return pa.memory_map(str(self._path(name)), "r")

    def names(self, folder: str, suffix: str) -> list[str]:
        try:
            with os.scandir(self.root / folder) as entries:
                found = [f"{folder}/{entry.name}" for entry in entries if _finished(entry, suffix)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(found)

    def listed(self, folder: str) -> list[FileInfo]:
        root = self.root / folder
        found = []
        for path in root.iterdir() if root.is_dir() else ():
            with suppress(FileNotFoundError):  # a run that writes beside us has renamed it since
                if path.is_file():
                    found.append(FileInfo(path.relative_to(self.root).as_posix(), path.stat().st_size))
        return sorted(found)

    def exists(self, name: str) -> bool:
        return self._path(name).is_file()

    def age(self, name: str) -> timedelta:
        return datetime.now(UTC) - datetime.fromtimestamp(self._path(name).stat().st_mtime, UTC)

    def delete(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def __str__(self) -> str:
        return self._shown


class ObjectStore:
    """Objects below an S3 prefix. A file is one PUT, so that there is no partial upload to leave behind."""

    def __init__(self, root: str, objects: Objects) -> None:
        self.root = root.rstrip("/")
        self.objects = objects

    def impatient(self) -> ObjectStore:
        return ObjectStore(self.root, self.objects.impatient())

    def _uri(self, name: str) -> str:
        return f"{self.root}/{below(name)}"

    def make(self) -> None:
        """Prefixes need no making."""

    def taken(self) -> bool:
        first = islice(self.objects.list(f"{self.root}/", deep=True), 100)
        return any(not found.uri.endswith(NOTE) for found in first)

    def put(self, name: str, data: bytes | pa.Buffer) -> None:
        self.objects.put(self._uri(name), data)

    def read(self, name: str) -> bytes:
        return self.objects.read(self._uri(name))

    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        with ThreadPoolExecutor(_READERS) as pool:  # latency, not bandwidth, is what many small files cost
            for start in range(0, len(names), 8 * _READERS):
                yield from pool.map(self.read, names[start : start + 8 * _READERS])

    def read_slice(self, name: str, start: int, end: int | None = None) -> Slice:
        return self.objects.read_slice(self._uri(name), start, end)

    def open(self, name: str) -> RangedObject:
        return RangedObject(self.objects, self._uri(name))

    def names(self, folder: str, suffix: str) -> list[str]:
        listed = self.objects.list(f"{self.root}/{folder}/")
        return [found.uri.removeprefix(f"{self.root}/") for found in listed if found.uri.endswith(suffix)]

    def listed(self, folder: str) -> list[FileInfo]:
        found = self.objects.list(f"{self.root}/{folder}/" if folder else f"{self.root}/")
        return [FileInfo(item.uri.removeprefix(f"{self.root}/"), item.size) for item in found]

    def exists(self, name: str) -> bool:
        return self.objects.exists(self._uri(name))

    def age(self, name: str) -> timedelta:
        return self.objects.age(self._uri(name))

    def delete(self, name: str) -> None:
        self.objects.delete(self._uri(name))

    def __str__(self) -> str:
        return self.root


class RangedObject:
    """An object for random access: its tail comes with the first request, any other stretch with one more.

    It has no position, so that threads may share it; it holds no connection.
    """

    def __init__(self, objects: Objects, uri: str) -> None:
        self._objects, self._uri = objects, uri
        tail = objects.read_slice(uri, -_TAIL)
        self._size = tail.size
        self._tail = Stretch(tail.size - len(tail.data), tail.data)

    def size(self) -> int:
        """Bytes of the object."""
        return self._size

    def stretch(self, start: int, end: int) -> Stretch:
        """Bytes [start, end), or those of them that there are; at most one request. Raises OSError."""
        end = min(end, self._size)
        if start >= end:
            return Stretch(start, b"")
        return self._tail if self._tail.holds(start, end) else Stretch(start, self._read(start, end))

    def _read(self, start: int, end: int) -> bytes:
        return self._objects.read_slice(self._uri, start, end).data


class Stretch(NamedTuple):
    """Bytes of a file from ``start`` on."""

    start: int
    data: bytes

    def holds(self, start: int, end: int) -> bool:
        return self.start <= start and end <= self.start + len(self.data)

    def view(self, start: int, end: int) -> memoryview:
        """Bytes [start, end) of the file, which it holds."""
        return memoryview(self.data)[start - self.start : end - self.start]


class Fetched(io.RawIOBase):
    """A file of which the stretches that will be read are in memory; for one reader, since it has a position."""

    def __init__(self, stretches: Sequence[Stretch], rest: RangedObject) -> None:
        """``rest`` is asked for what else is read."""
        super().__init__()
        self._stretches, self._rest, self._place = stretches, rest, 0

    def view(self, start: int, end: int) -> memoryview:
        """Bytes [start, end), or those of them that there are."""
        found = next((s for s in self._stretches if s.holds(start, end)), None) or self._rest.stretch(start, end)
        return found.view(start, min(end, self._rest.size()))

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._rest.size()}[whence]
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        data = self.read_buffer(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read_buffer(self, n_bytes: int = -1) -> memoryview:
        """What Arrow calls, so that it gets a view instead of a copy."""
        end = self._rest.size() if n_bytes < 0 else self._place + n_bytes
        data = self.view(self._place, end)
        self._place += len(data)
        return data


def _finished(entry: os.DirEntry[str], suffix: str) -> bool:
    return entry.name.endswith(suffix) and not entry.name.startswith(".") and entry.is_file()


def fsync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
