"""The base of an input form: a file that holds many videos, what its index says, and how a video's bytes come.

A form is one file in this folder and a line in ``pipeline.inputs.forms``. The index is made once, by the driver; the
bytes of a video are read by the worker that decodes it. Nothing is ever unpacked to disk.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pipeline.errors import FaultClass, printable
from pipeline.inputs.left_out import LeftOut
from pipeline.inputs.listings import CONTROL
from pipeline.inputs.tables import is_text
from pipeline.storage.downloads import Download
from pipeline.storage.hub import Files, HubDownload, is_remote, reach
from pipeline.storage.random_access import Positioned
from pipeline.storage.s3 import ObjectInfo, Objects

_LONGEST = 1024  # characters of a member's name
_GAP = 2**20  # bytes between two spans that cost less than another request
_TAIL = 2**16  # bytes at the end of an object that are fetched together
_LEAST = 2**14  # bytes of a single request that was not planned
# Bytes of a slice, which comes in one request where reads that were not planned go forward in steps of at most _STEP on
# the mean. At 130 MB/s so many bytes take as long as another request, 30 ms. A longer step counts as one of a slice.
_SLICE, _STEP = 2**25, 2**22


class Member(NamedTuple):
    """A video in a container.

    Attributes:
        name: the end of its id, by which messages call it too.
        offset: where the container's form finds it: a byte or a row.
        size: its bytes; None where only reading it tells.
        carried: columns that are carried along, as JSON.
        fault: "class: message" where it cannot be read.
        start_s: start of the clip in seconds.
        end_s: end of the clip in seconds.
        video_id: its id, where that is not the container's and ``name``.
        mark: what the container says of its content, by which another one is noticed.
    """

    name: str
    offset: int
    size: int | None = None
    carried: str | None = None
    fault: str | None = None
    start_s: float | None = None
    end_s: float | None = None
    video_id: str | None = None
    mark: str | None = None


class ContainerOptions(NamedTuple):
    """The options about containers.

    Attributes:
        column: the column of a table that holds videos.
        clips_from: the names under which carried JSON has the start and the end of a clip.
        zip_encoding: the encoding of names in zips that are not UTF-8; None for cp437.
    """

    column: str | None = None
    clips_from: tuple[str, str] | None = None
    zip_encoding: str | None = None


class Container(ABC):
    """An opened container: the base of every input form, which is made of a RandomFile.

    Attributes:
        unit: the most videos that share what is read: the rows of a row group.
        note: what the user should know of the members, once they are read.
    """

    unit = 1
    note: str | None = None

    @abstractmethod
    def members(self, asked: ContainerOptions) -> Iterator[Member]:
        """Yield every video, broken ones too, in order, called as the container calls it.

        Raises OSError, or ManifestError for a request that fails.
        """

    def paired(self, videos: Sequence[Member]) -> tuple[list[Member], LeftOut]:
        """Return the videos that ``members`` has yielded so far, with what is carried with each, and what is left out.

        What is carried with a video may lie behind it.
        """
        return [*videos], LeftOut()

    @abstractmethod
    def span(self, member: Member) -> tuple[int, int]:
        """Return the bytes (start, end) of the container that ``read`` reads for a video, to plan requests by."""

    @abstractmethod
    def read(self, member: Member) -> Iterator[bytes]:
        """Yield a video's bytes, given its name, offset and size. Raises VideoFault or OSError."""

    def sample(self, member: Member) -> int | None:
        """Return the ``sample_key`` of a video's bytes; None where a form does not read parts of it. Raises OSError."""
        return None


def fault(fault_class: FaultClass, message: str) -> str:
    """Return the text ``fault`` of a member: its class, which jobs report, and the message."""
    return f"{fault_class}: {message}"


def named_safely(member: Member, seen: set[str]) -> Member:
    """Return a member as it is if its name is safe as a part of an id, else with a fault and a printable name.

    ``seen`` has the names of the members before it, and gets this one's.
    """
    name, again = member.name, member.name in seen
    seen.add(name)
    kind: FaultClass = "policy"
    if not is_text(name):
        why = "the member's name is not valid UTF-8; rename it"
        name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    elif name.startswith("/") or {"", ".", ".."} & set(name.split("/")) or CONTROL.search(name):
        why = "the member's name leads out of its container, or holds control characters; rename it"
    elif len(name) > _LONGEST:
        why = f"the member's name has more than {_LONGEST} characters; rename it"
    elif again:
        kind, why = "corrupt", "an earlier member of the container has the same name"
    else:
        return member
    return member._replace(name=f"{printable(name, _LONGEST)}@{member.offset}", fault=fault(kind, why))


def open_container(uri: str, objects: Objects, info: ObjectInfo | None = None) -> RandomFile:
    """Open a container for reading; ``info`` is what a listing said of a remote one. Raises OSError."""
    return RemoteFile(uri, objects, info) if is_remote(uri) else PlainFile(uri)


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge spans of bytes that lie within a MiB of each other, for which one request is cheaper than two."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if found and start - found[-1][1] <= _GAP:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


class PlainFile:
    """A regular file of this machine that is read in stretches.

    Attributes:
        uri: its path.
        size: its bytes.
        mark: a text that differs once the file was changed.
        fetched: how many bytes came from a store: none.
    """

    fetched = 0

    def __init__(self, path: str) -> None:
        self.uri = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "not a regular file", path)
        self.size, self.mark = status.st_size, f"{status.st_size}-{status.st_mtime_ns}"

    def read(self, start: int, end: int) -> bytes:
        """Read bytes [start, end), or those of them that there are. Raises OSError."""
        parts: list[bytes] = []
        while start < end and (part := os.pread(self._descriptor, end - start, start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def plan(self, spans: Sequence[tuple[int, int]], *, keep: bool = False) -> None:
        """Drop the plan: a file on disk is read as it is asked for, and only a RemoteFile has use for one."""

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Range:
    """A range of an object that comes in one request once it is read.

    Args:
        whole: whether it is held as a whole, to be read in any order; else it is read in ascending order while it
            comes, what lies before the last read is dropped, and going back costs another request.
        gap: so many bytes that nobody reads cost less than another request.

    Attributes:
        size: bytes of the object, as the store's answer has it.
        fetched: bytes that came.
    """

    def __init__(self, files: Files, uri: str, start: int, end: int, *, whole: bool, gap: int = _GAP) -> None:
        self._files, self._uri, self.start, self.end, self.whole, self._gap = files, uri, start, end, whole, gap
        self._first, self._held = start, bytearray()  # what is held begins at ``_first``
        self._coming: Download | HubDownload | None = None
        self.size = self.fetched = 0

    def read(self, start: int, end: int) -> bytes:
        """Read bytes [start, end) of the range. Raises OSError."""
        if not self.whole:
            self._stream(start, end)
        elif not self._held:
            found = self._files.read_slice(self._uri, self.start, self.end)
            self._held, self.size, self.fetched = bytearray(found.data), found.size, len(found.data)
        return bytes(self._held[start - self._first : end - self._first])

    def _stream(self, start: int, end: int) -> None:
        """Let bytes come up to ``end``, and drop those before ``start``."""
        if self._coming is None or not self._first <= start <= self._first + len(self._held) + self._gap:
            self.close()
            self._first = start
            self._coming = self._files.download(self._uri, start, self.end)
            self.size = self._coming.size
        self._drop(start)
        try:
            while self._first + len(self._held) < end and (piece := next(self._coming, b"")):
                self._held += piece
                self.fetched += len(piece)
                self._drop(start)
        except OSError:
            self.close()  # the next read asks anew
            raise

    def _drop(self, start: int) -> None:
        """Drop what is held before ``start``."""
        gone = min(start - self._first, len(self._held))
        del self._held[:gone]
        self._first += gone

    def close(self) -> None:
        """Drop what is held, and end the request."""
        if self._coming is not None:
            self._coming.close()
        self._coming, self._held = None, bytearray()


class RemoteFile:
    """An object of a store, used as a PlainFile. What is planned comes in a request for each range.

    Reads that were not planned are single small requests, or slices that are read through where they go forward in
    short steps, as those of a tar's headers do between small members.

    Args:
        info: what a listing said of it; without that, ``size`` or ``mark`` may cost a request.
    """

    def __init__(self, uri: str, objects: Objects, info: ObjectInfo | None = None) -> None:
        self.uri = uri
        self._files, self._info = reach(uri, objects), info
        self._ranges: list[_Range] = []  # that were planned
        self._last: _Range | None = None  # that was not
        self._at: int | None = None  # the end of the last read
        self._steps, self._stepped = 0, 0.0  # reads that went forward, and by how many bytes
        self._fetched = 0

    @property
    def fetched(self) -> int:
        """The number of bytes that came from the store."""
        return self._fetched + sum(coming.fetched for coming in (*self._ranges, self._last) if coming is not None)

    @property
    def size(self) -> int:
        """The size of the object in bytes."""
        return self._told().size

    @property
    def mark(self) -> str:
        """The object's ETag or hash, which differs once it was changed."""
        return self._told().mark

    def _told(self) -> ObjectInfo:
        """Return what the store says of the object; asked once."""
        if self._info is None:
            self._info = self._files.info(self.uri)
        return self._info

    def plan(self, spans: Sequence[tuple[int, int]], *, keep: bool = False) -> None:
        """Note the ranges that will be read, each in ascending order, or in any with ``keep``, which holds them."""
        self._end(self._ranges)
        self._ranges = [_Range(self._files, self.uri, *span, whole=keep) for span in spans]

    def read(self, start: int, end: int) -> bytes:
        """Read bytes [start, end), or those of them that there are; one request or none. Raises OSError."""
        end = end if self._info is None else min(end, self._info.size)
        if start >= end:
            return b""
        forward = self._goes_forward(start)
        self._at = end
        for coming in (*self._ranges, self._last):
            if coming is not None and coming.start <= start < coming.end:
                return self._read_range(coming, start, end)
        self._end([self._last])
        self._last = self._next(start, end, forward=forward)
        return self._read_range(self._last, start, end)

    def _read_range(self, coming: _Range, start: int, end: int) -> bytes:
        """Read bytes [start, end), which begin in a range and may end behind it. Raises OSError."""
        until = min(end, coming.end)
        try:
            found = coming.read(start, until)
        except OSError:
            if coming is not self._last or coming.whole:
                raise
            self._end([coming])  # a slice may be too much for a slow store: from here on ask for no more than is read
            self._last, self._stepped = None, math.inf
            return self.read(start, end)
        if self._info is not None and (coming.size != self._info.size or len(found) < until - start):
            raise OSError(errno.ESTALE, "it has changed while it was read; run again", self.uri)
        self._info = self._info or ObjectInfo(self.uri, coming.size)
        return found + self.read(until, end)

    def _goes_forward(self, start: int) -> bool:
        """Note where a read begins; return whether such reads go forward in so short steps that a slice is cheaper."""
        step = -1 if self._at is None else start - self._at
        if step > _LEAST:
            self._steps, self._stepped = self._steps + 1, self._stepped + min(step, _SLICE)
        return not self._ranges and step >= 0 and self._stepped <= _STEP * self._steps

    def _next(self, start: int, end: int, *, forward: bool) -> _Range:
        """Return the range to ask for where bytes [start, end) were not planned: a slice, or some bytes more."""
        if forward:
            return _Range(self._files, self.uri, start, min(start + _SLICE, self.size), whole=False, gap=_SLICE)
        end = max(end, start + _LEAST)
        if self._info is not None and start >= self._info.size - _TAIL:
            start = max(0, self._info.size - _TAIL)  # directories and footers are read from their end
        return _Range(self._files, self.uri, start, end, whole=True)

    def close(self) -> None:
        """Drop what is held, and end all requests. May be called twice."""
        self._end([*self._ranges, self._last])

    def _end(self, ranges: Iterable[_Range | None]) -> None:
        """Drop what is held of some ranges, and end their requests."""
        for coming in ranges:
            if coming is not None:
                self._fetched += coming.fetched
                coming.fetched = 0
                coming.close()


#: A file that holds videos, on disk or remote.
RandomFile = PlainFile | RemoteFile


class SeekableFile(Positioned):
    """A RandomFile as a Python file with a position."""

    def __init__(self, file: RandomFile) -> None:
        super().__init__(file.size)
        self._file = file

    def read(self, size: int = -1) -> bytes:  # not readinto, whose callers copy what they get
        data = self._file.read(self.place, self.size if size < 0 else self.place + size)
        self.place += len(data)
        return data
