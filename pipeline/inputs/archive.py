"""The base class of input forms: files that hold many videos (archives or tables), and random access to their bytes."""

from __future__ import annotations

import errno
import math
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pipeline.errors import FaultClass, make_printable
from pipeline.inputs.left_out import LeftOut
from pipeline.inputs.listings import CONTROL
from pipeline.inputs.tables import is_text
from pipeline.storage.downloads import Download
from pipeline.storage.hub import Files, HubDownload, choose_client, is_remote
from pipeline.storage.location import Location
from pipeline.storage.random_access import PositionedFile
from pipeline.storage.s3 import ObjectInfo, Objects

CLIP_COLUMNS = ("start_s", "end_s")  # columns of a table that state the clip without an option
_MAX_NAME_CHARS = 1024  # characters of a member's name
_MAX_GAP_BYTES = 2**20  # unneeded bytes between two ranges that cost less than another request
_TAIL = 2**16  # bytes at the end of an object that are fetched together
_MIN_READ_BYTES = 2**14  # bytes of a single request that was not planned
# A slice is a request of _SLICE bytes for unplanned reads that advance by at most _STEP bytes on average. At 130 MB/s,
# _STEP bytes take as long as another request, 30 ms. A step longer than a slice counts as a slice.
_SLICE, _STEP = 2**25, 2**22


class Member(NamedTuple):
    """A video in an archive or a table, as its index lists it.

    Attributes:
        name: the end of its uri, and of its id unless there is a ``shown_name``.
        offset: a byte of an archive, or a row number of a table.
        size: in bytes; None if unknown before reading.
        carried: the carried columns, as JSON.
        fault: "class: message" if it cannot be read.
        video_id: its id, if that is not made from the names of the archive and the member.
        mark: a text from the archive that changes with the content.
        path: the file with the video, if the row of a table has a path instead of bytes.
        shown_name: the end of its id, if that differs from ``name``.
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
    path: str | None = None
    shown_name: str | None = None


class ArchiveOptions(NamedTuple):
    """The options for reading archives and tables.

    Attributes:
        column: the column of a table that holds videos.
        clips_from: the keys of the start and the end of a clip in carried JSON.
        zip_encoding: the encoding of names in zips that are not UTF-8; None for cp437.
    """

    column: str | None = None
    clips_from: tuple[str, str] | None = None
    zip_encoding: str | None = None


class Archive(ABC):
    """An open archive or table: the base class of every input form, constructed from a RandomFile.

    Attributes:
        rows_per_group: the rows of a table's largest row group or record batch, known once ``members`` has started; 1
            for tars and zips.
        note: a note for the user about the members, set while they are read; None if there is none.
    """

    rows_per_group = 1
    note: str | None = None

    @abstractmethod
    def members(self, options: ArchiveOptions) -> Iterator[Member]:
        """Yield every video in the order of the archive, also broken ones (with a ``format_fault``).

        Raises:
            ManifestError: the options do not fit the archive.
        """

    def pair_sidecars(self, videos: Sequence[Member]) -> tuple[list[Member], LeftOut]:
        """Return the videos that ``members`` has yielded so far with carried columns, and the left-out members."""
        return [*videos], LeftOut()

    @abstractmethod
    def span(self, location: Location) -> tuple[int, int]:
        """Return the byte range [start, end) for ``read``, from which requests are planned; it may be empty."""

    @abstractmethod
    def read(self, location: Location) -> Iterator[bytes]:
        """Yield the bytes of a video in pieces.

        Raises:
            VideoFault: the video is damaged, cannot be read, or has changed since it was indexed.
        """

    def sample(self, location: Location) -> int | None:
        """Return the ``hash_sample`` of a video's bytes, or None for a form that cannot read pieces of a video."""
        return None


def format_fault(fault_class: FaultClass, message: str) -> str:
    """Format the ``format_fault`` of a member: "class: message"."""
    return f"{fault_class}: {message}"


def check_name(member: Member, seen_names: set[str]) -> Member:
    """Return the member unchanged if its name is safe in an id; otherwise with a new fault and the name NAME@OFFSET.

    Its name is the ``shown_name`` if it has one. A name is unsafe ("policy") if it is not UTF-8, is absolute, has empty
    or dot segments or control characters, or is longer than 1,024 characters. It is "corrupt" if it is in
    ``seen_names``, to which it is added.
    """
    name = member.shown_name or member.name
    is_repeated = name in seen_names
    seen_names.add(name)
    kind: FaultClass = "policy"
    if not is_text(name):
        why = "the member's name is not valid UTF-8; rename it"
        name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    elif name.startswith("/") or {"", ".", ".."} & set(name.split("/")) or CONTROL.search(name):
        why = "the member's name leads out of its archive, or has control characters; rename it"
    elif len(name) > _MAX_NAME_CHARS:
        why = f"the member's name has more than {_MAX_NAME_CHARS} characters; rename it"
    elif is_repeated:
        kind = "corrupt"
        why = "an earlier member of the archive has the same name"
    else:
        return member
    shown = f"{make_printable(name, _MAX_NAME_CHARS)}@{member.offset}"
    return member._replace(name=shown, shown_name=None, fault=format_fault(kind, why))


def open_archive(uri: str, objects: Objects, info: ObjectInfo | None = None) -> RandomFile:
    """Open an archive or table for random access; a remote file is first requested when it is read.

    Args:
        objects: the client for S3.
        info: the listing's entry of a remote file, which saves a request.

    Raises:
        OSError: a local path cannot be opened or is not a regular file.
        UsageError: the address is not on S3 or in a dataset on the hub.
    """
    return RemoteFile(uri, objects, info) if is_remote(uri) else PlainFile(uri)


def merge_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort byte ranges, drop empty ones, and merge those at most 1 MiB apart."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and start - joined[-1][1] <= _MAX_GAP_BYTES:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


class PlainFile:
    """A regular file on this machine with random access.

    Attributes:
        mark: a text that changes when the file is modified.
        fetched: bytes that came from a store: always 0.
    """

    fetched = 0

    def __init__(self, path: str) -> None:
        """Open the file; raise OSError if that fails or it is not a regular file."""
        self.uri = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "not a regular file", path)
        self.size = status.st_size
        self.mark = f"{status.st_size}-{status.st_mtime_ns}"

    def read(self, start: int, end: int) -> bytes:
        """Read bytes [start, end); fewer if the file ends before ``end``."""
        parts: list[bytes] = []
        while start < end and (part := os.pread(self._descriptor, end - start, start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def plan(self, spans: Sequence[tuple[int, int]], *, keep: bool = False) -> None:
        """Do nothing: reads of a local file need no plan."""

    def close(self) -> None:
        """Close the file. Calling this twice is allowed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Range:
    """A byte range of an object that one request fetches when it is first read.

    Args:
        whole: True keeps the whole range in memory. False streams it: earlier bytes are dropped, and going back costs
            another request.
        gap: number of unread bytes that cost less than another request.

    Attributes:
        size: the size of the whole object, as the store states it; 0 before the first read.
        fetched: the number of bytes received.
    """

    def __init__(self, files: Files, uri: str, start: int, end: int, *, whole: bool, gap: int = _MAX_GAP_BYTES) -> None:
        """Describe the range; nothing is requested."""
        self._files = files
        self._uri = uri
        self.start = start
        self.end = end
        self.whole = whole
        self._gap = gap
        self._first = start  # the buffer begins at ``_first``
        self._buffer = bytearray()
        self._coming: Download | HubDownload | None = None
        self.size = self.fetched = 0

    def read(self, start: int, end: int) -> bytes:
        """Read bytes [start, end) of the range, fewer if the object ends before ``end``.

        The first read of a ``whole`` range, or after ``close``, fetches all of it.
        """
        if not self.whole:
            self._stream(start, end)
        elif not self._buffer:
            answer = self._files.read_slice(self._uri, self.start, self.end)
            self._buffer = bytearray(answer.data)
            self.size = answer.size
            self.fetched = len(answer.data)
        return bytes(self._buffer[start - self._first : end - self._first])

    def _stream(self, start: int, end: int) -> None:
        """Receive bytes up to ``end``, and drop the bytes before ``start``.

        A new request starts if ``start`` is before the buffer, or more than ``gap`` bytes after it, or the last one
        failed.
        """
        if self._coming is None or not self._first <= start <= self._first + len(self._buffer) + self._gap:
            self.close()
            self._first = start
            self._coming = self._files.download(self._uri, start, self.end)
            self.size = self._coming.size
        self._drop_before(start)
        try:
            while self._first + len(self._buffer) < end and (piece := next(self._coming, b"")):
                self._buffer += piece
                self.fetched += len(piece)
                self._drop_before(start)
        except OSError:
            self.close()  # the next read sends a new request
            raise

    def _drop_before(self, start: int) -> None:
        """Drop the buffered bytes before ``start``."""
        n_dropped = min(start - self._first, len(self._buffer))
        del self._buffer[:n_dropped]
        self._first += n_dropped

    def close(self) -> None:
        """Drop the buffered bytes and end the request. A later read starts a new one."""
        if self._coming is not None:
            self._coming.close()
        self._coming = None
        self._buffer = bytearray()


class RemoteFile:
    """An object of a store with random access, with the interface of PlainFile.

    Each planned range is one request. An unplanned read is a small request, or a slice of 32 MiB if reads advance in
    short steps, as between the headers of a tar of small members.

    Args:
        info: the listing's entry; without it, ``size`` or ``mark`` may cost a request.
    """

    def __init__(self, uri: str, objects: Objects, info: ObjectInfo | None = None) -> None:
        """Prepare to read the object; nothing is requested yet.

        Args:
            objects: the client for S3.

        Raises:
            UsageError: the address is not on S3 or in a dataset on the hub.
        """
        self.uri = uri
        self._files = choose_client(uri, objects)
        self._info = info
        self._ranges: list[_Range] = []  # planned ranges
        self._last: _Range | None = None  # the last unplanned range
        self._at: int | None = None  # the end of the last read
        self._steps, self._step_bytes = 0, 0.0  # the number of reads that advanced, and the sum of their steps
        self._fetched = 0

    @property
    def fetched(self) -> int:
        """The number of bytes received from the store."""
        return self._fetched + sum(coming.fetched for coming in (*self._ranges, self._last) if coming is not None)

    @property
    def size(self) -> int:
        """The size of the object in bytes."""
        return self._get_info().size

    @property
    def mark(self) -> str:
        """The object's ETag or hash; "" if unknown, or once read without ``info``."""
        return self._get_info().mark

    def _get_info(self) -> ObjectInfo:
        """Return the entry of the listing or of the first read; without either, request it from the store."""
        if self._info is None:
            self._info = self._files.info(self.uri)
        return self._info

    def plan(self, spans: Sequence[tuple[int, int]], *, keep: bool = False) -> None:
        """Replace the planned ranges by ``spans``; nothing is requested yet.

        With ``keep``, each is buffered whole and can be read in any order; otherwise, going back costs a request.
        """
        self._end(self._ranges)
        self._ranges = [_Range(self._files, self.uri, *span, whole=keep) for span in spans]

    def read(self, start: int, end: int) -> bytes:
        """Read bytes [start, end), cut at the end of the object; usually one request or none.

        Raises:
            OSError: a request fails; with ESTALE if the object has another size than when it was listed or first read,
                or ends early.
        """
        end = end if self._info is None else min(end, self._info.size)
        if start >= end:
            return b""
        forward = self._record_step(start)
        self._at = end
        for coming in (*self._ranges, self._last):
            if coming is not None and coming.start <= start < coming.end:
                return self._read_range(coming, start, end)
        self._end([self._last])
        self._last = self._next(start, end, forward=forward)
        return self._read_range(self._last, start, end)

    def _read_range(self, coming: _Range, start: int, end: int) -> bytes:
        """Read bytes [start, end), of which ``start`` is inside ``coming``; those after its end take further requests.

        If a streamed slice of 32 MiB of an unplanned read fails, the read is repeated as a small request, and no slices
        are used from then on. Errors of other ranges pass. The first read without a listing's entry makes one, with the
        object's size and no mark.

        Raises:
            OSError: a request fails; with ESTALE if the object has another size than when it was listed or first read,
                or ends early.
        """
        until = min(end, coming.end)
        try:
            data = coming.read(start, until)
        except OSError:
            if coming is not self._last or coming.whole:
                raise
            self._end([coming])  # a slice may be too much for a slow store: no more slices
            self._last = None
            self._step_bytes = math.inf
            return self.read(start, end)
        if self._info is not None and (coming.size != self._info.size or len(data) < until - start):
            raise OSError(errno.ESTALE, "it has changed while it was read; run again", self.uri)
        self._info = self._info or ObjectInfo(self.uri, coming.size)
        return data + self.read(until, end)

    def _record_step(self, start: int) -> bool:
        """Record the start of a read; return True if it continues short steps, for which a slice is cheaper.

        Only steps of more than 16 KiB are averaged: they must be at most 4 MiB on average, where a longer step than 32
        MiB counts as 32 MiB. The first read, a read that goes back, and any read while ranges are planned give False,
        and so does every read after a slice has failed.
        """
        step = -1 if self._at is None else start - self._at
        if step > _MIN_READ_BYTES:
            self._steps, self._step_bytes = self._steps + 1, self._step_bytes + min(step, _SLICE)
        return not self._ranges and step >= 0 and self._step_bytes <= _STEP * self._steps

    def _next(self, start: int, end: int, *, forward: bool) -> _Range:
        """Return the range to request for an unplanned read of bytes [start, end).

        With ``forward`` it is a slice of 32 MiB, streamed; the size of the object may cost a request. Otherwise it has
        at least 16 KiB and is buffered whole; if ``start`` is known to be in the last 64 KiB, the range begins with
        these.
        """
        if forward:
            return _Range(self._files, self.uri, start, min(start + _SLICE, self.size), whole=False, gap=_SLICE)
        end = max(end, start + _MIN_READ_BYTES)
        if self._info is not None and start >= self._info.size - _TAIL:
            start = max(0, self._info.size - _TAIL)  # directories and footers are read from their end
        return _Range(self._files, self.uri, start, end, whole=True)

    def close(self) -> None:
        """Drop the buffers and end all requests. Calling this twice is allowed."""
        self._end([*self._ranges, self._last])

    def _end(self, ranges: Iterable[_Range | None]) -> None:
        """Drop the buffers of these ranges and end their requests; their ``fetched`` stays counted."""
        for coming in ranges:
            if coming is not None:
                self._fetched += coming.fetched
                coming.fetched = 0
                coming.close()


#: A file that holds videos, on disk or remote.
RandomFile = PlainFile | RemoteFile


class SeekableFile(PositionedFile):
    """A RandomFile as a Python file object with a position."""

    def __init__(self, file: RandomFile) -> None:
        super().__init__(file.size)
        self._file = file

    def read(self, size: int = -1) -> bytes:  # instead of readinto, whose callers copy the bytes
        data = self._file.read(self.place, self.size if size < 0 else self.place + size)
        self.place += len(data)
        return data
