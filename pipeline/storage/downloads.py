"""Bytes of an object that come piece by piece, in one request as long as its connection holds."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

_CHUNK = 2**14  # small, so that a slow download is noticed
# How often a download is resumed, without _PROGRESS bytes in between: stores end connections that wait long.
_RESUMES, _PROGRESS = 4, 2**24
_GRACE_S, _SLOWEST = 120, 2**18  # a download may take this long, and as long as its size takes at this rate (bytes/s)


class Incoming(Protocol):
    """Bytes of an object on their way.

    Attributes:
        size: bytes of the whole object.
    """

    size: int

    def __iter__(self) -> Iterator[bytes]: ...


def write_download(download: Incoming, write: Callable[[bytes], object], limit: int | None, uri: str) -> int:
    """Hand a whole object to ``write`` piece by piece, and return its size.

    Raises OSError with EFBIG, which names ``uri``, if the object has more than ``limit`` bytes; nothing is read then.
    The download is not closed.
    """
    if limit is not None and download.size > limit:
        message = f"the object has {download.size} bytes, more than the {limit} that are allowed"
        raise OSError(errno.EFBIG, message, uri)
    for piece in download:
        write(piece)
    return download.size


class Download(AbstractContextManager["Download"], Iterator[bytes]):
    """Bytes [start, end) of an object on their way: an iterator of pieces, in order. Close it after use.

    The store waits while nobody asks for the next piece. A connection that breaks is taken up where it broke, on the
    same content. Raises OSError, with ETIMEDOUT where the bytes only trickle.

    Args:
        ask: sends a GET, given the words of its range and the mark that the content must have, or None for each.
        errors: a context that converts the client's errors to OSError.
        broken: the client's errors of a connection that breaks.

    Attributes:
        size: bytes of the whole object.
        mark: its ETag, if the store has told one.
    """

    def __init__(
        self,
        ask: Callable[[str | None, str | None], Any],
        errors: Callable[[], AbstractContextManager[None]],
        broken: tuple[type[Exception], ...],
        start: int = 0,
        end: int | None = None,
    ) -> None:
        """Send the request, and wait until the store answers.

        Raises OSError, also if the store gives another range or does not say the size.
        """
        self._ask, self._errors, self._broken = ask, errors, broken
        self._at, self._last = start, "" if end is None else str(end - 1)
        self._resumes, self._since, self._spent_s = 0, 0, 0.0
        whole = not start and end is None
        with errors():
            answer = ask(None if whole else f"bytes={start}-{self._last}", None)
            self._body, self.mark = answer["Body"], answer.get("ETag")
            length, content_range = answer.get("ContentLength"), answer.get("ContentRange")
            wrong = None
            if length is None:  # a gateway with chunked transfer does not send the size
                wrong = "the store does not say how large the object is"
            elif not whole and not (content_range or "").startswith(f"bytes {start}-"):
                wrong = f"the store answered with another range than was asked for: {content_range}"
            if wrong:
                self.close()
                raise OSError(errno.EIO, wrong)
        self.size = int(length if whole else content_range.rpartition("/")[2])
        self._length = self._n_left = int(length)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, if bytes are left. May be called twice."""
        self._body.close()

    def __next__(self) -> bytes:
        """Return the next piece of the object, from a new connection where the last one broke.

        Raises OSError after _RESUMES breaks, for a break without a mark, and where the store cannot resume. A download
        that is too slow for its length fails with ETIMEDOUT. The time between two calls does not count.
        """
        if not self._n_left:
            raise StopIteration
        with self._errors():
            while True:
                began = time.monotonic()  # a store that is away may take minutes to be asked again
                try:
                    piece = bytes(self._body.read(_CHUNK))
                    break
                except self._broken:
                    self._resumes = 1 if self._since >= _PROGRESS else self._resumes + 1
                    self._since = 0
                    if self._resumes > _RESUMES or self.mark is None:
                        raise
                finally:
                    self._spent_s += time.monotonic() - began
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
