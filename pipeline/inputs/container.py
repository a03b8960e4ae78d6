"""The protocol of an input form: a file that holds many videos, what its index says, and how a video's bytes come.

A form is one file in this folder and a line in ``pipeline.inputs.forms``. The index is made once, by the driver; the
bytes of a video are read by the worker that decodes it. Nothing is ever unpacked to disk.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from pipeline.errors import FaultClass, printable
from pipeline.inputs.tables import is_text
from pipeline.storage.hub import is_remote, reach
from pipeline.storage.s3 import ObjectInfo, Objects

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_LONGEST = 1024  # characters of a member's name
_GAP = 2**20  # bytes between two spans that cost less than another request
_AT_ONCE = 2**26  # most bytes of a request, which memory holds
_TAIL = 2**16  # bytes at the end of an object that are fetched together
# Bytes of a request that was not planned: at a new place; and where one goes on, at most so far behind the last.
_LEAST, _AHEAD, _NEAR = 2**14, 2**22, 2**18


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
    """

    name: str
    offset: int
    size: int | None = None
    carried: str | None = None
    fault: str | None = None
    start_s: float | None = None
    end_s: float | None = None
    video_id: str | None = None


class Asked(NamedTuple):
    """The options about containers.

    Attributes:
        column: the column of a table that holds videos.
        clips_from: the names under which carried JSON has the start and the end of a clip.
    """

    column: str | None = None
    clips_from: tuple[str, str] | None = None


class Container(Protocol):
    """An opened container: the protocol that every input form implements.

    Attributes:
        unit: the most videos that share what is read: the rows of a row group.
    """

    unit: int

    def members(self, asked: Asked) -> Iterator[Member]:
        """Yield every video, broken ones too, in order. Raises OSError, or ManifestError for a request that fails."""

    def span(self, member: Member) -> tuple[int, int]:
        """Return the bytes (start, end) of the container that ``read`` reads for a video, to plan requests by."""

    def read(self, member: Member) -> Iterator[bytes]:
        """Yield a video's bytes, given its name, offset and size. Raises VideoFault or OSError."""


def fault(fault_class: FaultClass, message: str) -> str:
    """Return the text ``fault`` of a member: its class, which jobs report, and the message."""
    return f"{fault_class}: {message}"


def named_safely(member: Member) -> Member:
    """Return a member as it is if its name is safe as a part of an id, else with a fault and a printable name."""
    name = member.name
    if not is_text(name):
        why = "the member's name is not valid UTF-8; rename it"
        name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    elif name.startswith("/") or {"", ".", ".."} & set(name.split("/")) or _CONTROL.search(name):
        why = "the member's name leads out of its container, or holds control characters; rename it"
    elif len(name) > _LONGEST:
        why = f"the member's name has more than {_LONGEST} characters; rename it"
    else:
        return member
    return member._replace(name=f"{printable(name, _LONGEST)}@{member.offset}", fault=fault("policy", why))


def open_container(uri: str, objects: Objects, info: ObjectInfo | None = None) -> RandomFile:
    """Open a container for reading; ``info`` is what a listing said of a remote one. Raises OSError."""
    return RemoteFile(uri, objects, info) if is_remote(uri) else PlainFile(uri)


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

    def plan(self, spans: Sequence[tuple[int, int]]) -> None:
        """Drop the plan: a file on disk is read as it is asked for, and only a RemoteFile has use for one."""

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class RemoteFile:
    """An object of a store, used as a PlainFile. It holds the stretch that was fetched last, 64 MiB at most.

    Args:
        info: what a listing said of it; without that, ``size`` or ``mark`` may cost a request.
    """

    def __init__(self, uri: str, objects: Objects, info: ObjectInfo | None = None) -> None:
        self.uri = uri
        self._files, self._info = reach(uri, objects), info
        self._start, self._data = 0, b""
        self._spans: Sequence[tuple[int, int]] = ()
        self.fetched = 0

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

    def plan(self, spans: Sequence[tuple[int, int]]) -> None:
        """Note the stretches that will be read, in ascending order, so that few requests fetch them."""
        self._spans = spans

    def read(self, start: int, end: int) -> bytes:
        """Read bytes [start, end), or those of them that there are; one request or none. Raises OSError."""
        end = end if self._info is None else min(end, self._info.size)
        if start >= end:
            return b""
        if not (self._start <= start and end <= self._start + len(self._data)):
            first = start
            if self._info is not None and start >= self._info.size - _TAIL:
                first = max(0, self._info.size - _TAIL)  # directories and footers are read from their end
            found = self._files.read_slice(self.uri, first, self._stop(start, end))
            if self._info is not None and (found.size != self._info.size or first + len(found.data) < end):
                raise OSError(errno.ESTALE, "it has changed while it was read; run again", self.uri)
            self._info = self._info or ObjectInfo(self.uri, found.size)
            self._start, self._data = first, found.data
            self.fetched += len(found.data)
        return self._data[start - self._start : end - self._start]

    def _stop(self, start: int, end: int) -> int:
        """Choose where a request from ``start`` ends: behind what is planned next, or a little ahead."""
        planned, most = False, max(end, start + _AT_ONCE)
        for first, last in self._spans:
            if last > start and (first - end > _GAP or end == most):
                break
            if last > start:
                planned, end = True, max(end, min(last, most))
        if planned:
            return end
        near = 0 <= start - self._start - len(self._data) <= _NEAR and self._data
        return max(end, start + (_AHEAD if near else _LEAST))

    def close(self) -> None:
        """Drop what is held."""
        self._data = b""


#: A file that holds videos, on disk or remote.
RandomFile = PlainFile | RemoteFile


class SeekableFile(io.RawIOBase):
    """A RandomFile as a Python file with a position."""

    def __init__(self, file: RandomFile) -> None:
        super().__init__()
        self._file, self._place = file, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._file.size}[whence] + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(self._place, self._place + len(buffer))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)
