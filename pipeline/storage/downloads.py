"""Download an object piece by piece, in one request unless the connection breaks."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

_CHUNK = 2**14  # bytes per piece: small, so that a slow download is noticed
# Stores close connections that stay idle, so a download is resumed. Beyond this number of times without _PROGRESS bytes
# in between, the error is raised.
_RESUMES = 4
_PROGRESS = 2**24
_GRACE_S = 120  # seconds that every download may take, besides the time for its size at the slowest rate
_SLOWEST = 2**18  # bytes per second


class Incoming(Protocol):
    """An iterator over the bytes of an object that is being downloaded.

    Attributes:
        size: the size of the whole object in bytes.
    """

    size: int

    def __iter__(self) -> Iterator[bytes]: ...


def write_download(download: Incoming, write: Callable[[bytes], object], limit: int | None, uri: str) -> int:
    """Pass a whole object to ``write`` piece by piece, and return its size in bytes; ``download`` is not closed.

    Args:
        limit: the largest size allowed, in bytes; None for no limit.

    Raises:
        OSError: (EFBIG) the object is larger than ``limit``; nothing is read. The error names ``uri``.
    """
    if limit is not None and download.size > limit:
        message = f"the object has {download.size} bytes, more than the {limit} allowed"
        raise OSError(errno.EFBIG, message, uri)
    for piece in download:
        write(piece)
    return download.size


class Download(AbstractContextManager["Download"], Iterator[bytes]):
    """An iterator over the bytes [start, end) of an object, in pieces of up to 16 KiB. Close it after use.

    Attributes:
        size: the bytes of the whole object.
        mark: its ETag; None if the store does not give one.
    """

    def __init__(
        self,
        ask: Callable[[str | None, str | None], Any],
        errors: Callable[[], AbstractContextManager[None]],
        broken: tuple[type[Exception], ...],
        start: int = 0,
        end: int | None = None,
    ) -> None:
        """Send the request, and await the answer but not the data.

        Args:
            ask: sends a GET and returns botocore's answer. It gets the value of the Range header (None for the whole
                object) and the ETag that the content must have (None at first).
            errors: a context that converts the client's errors to OSError.
            broken: the client's exceptions for a connection that breaks.
            end: the first byte after the range; None for the end of the object.

        Raises:
            OSError: the request failed, the store sends another range, or it does not state the size.
        """
        self._ask = ask
        self._errors = errors
        self._broken = broken
        self._at = start
        self._last = "" if end is None else str(end - 1)
        self._resumes = 0
        self._since = 0
        self._spent_s = 0.0
        whole = not start and end is None
        with errors():
            answer = ask(None if whole else f"bytes={start}-{self._last}", None)
            self._body = answer["Body"]
            self.mark = answer.get("ETag")
            length = answer.get("ContentLength")
            content_range = answer.get("ContentRange")
            problem = None
            if length is None:  # a gateway with chunked transfer does not send the size
                problem = "the store does not state the size of the object"
            elif not whole and not (content_range or "").startswith(f"bytes {start}-"):
                problem = f"the store sent another range than requested: {content_range}"
            if problem:
                self.close()
                raise OSError(errno.EIO, problem)
        self.size = int(length if whole else content_range.rpartition("/")[2])
        self._length = self._n_left = int(length)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._body.close()

    def __next__(self) -> bytes:
        """Return the next piece; if the connection breaks, it is resumed where it broke.

        Raises:
            OSError: the connection broke for the fifth time without 16 MiB in between, or the store cannot resume, gave
                no ETag or has other content now. (ETIMEDOUT) The reads alone took more than two minutes plus the time
                for the range at 256 KiB/s.
        """
        if not self._n_left:
            raise StopIteration
        with self._errors():
            while True:
                started_at = time.monotonic()  # only reads count: new requests may take minutes during an outage
                try:
                    piece = bytes(self._body.read(_CHUNK))
                    break
                except self._broken:
                    self._resumes = 1 if self._since >= _PROGRESS else self._resumes + 1
                    self._since = 0
                    if self._resumes > _RESUMES or self.mark is None:
                        raise
                finally:
                    self._spent_s += time.monotonic() - started_at
                answer = self._ask(f"bytes={self._at}-{self._last}", self.mark)
                self._body = answer["Body"]
                if not answer.get("ContentRange", "").startswith(f"bytes {self._at}-"):
                    self.close()
                    raise OSError(errno.EIO, "the store cannot resume a broken download")
            self._at, self._n_left, self._since = (
                self._at + len(piece),
                self._n_left - len(piece),
                self._since + len(piece),
            )
            if self._spent_s > _GRACE_S + self._length / _SLOWEST:
                n_done = self._length - self._n_left
                raise OSError(errno.ETIMEDOUT, f"only {n_done} of {self._length} bytes came in time")
        return piece
