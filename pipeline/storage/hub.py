"""Read files of Hugging Face datasets through huggingface_hub: hf://datasets/USER/NAME[@REVISION]/PATH.

The endpoint and the token are those that huggingface_hub finds on each node (HF_ENDPOINT, HF_TOKEN, its login).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import UsageError
from pipeline.storage.s3 import ObjectInfo, Objects, Slice, is_s3

SCHEME = "hf://"
_PIECE = 2**26


def is_remote(uri: str) -> bool:
    """Return True if a URI begins with s3:// or hf://."""
    return is_s3(uri) or uri.startswith(SCHEME)


class HubFiles:
    """A client that reads files of datasets on the hub.

    All methods raise OSErrors that name the URI (FileNotFoundError, PermissionError), and UsageError if huggingface_hub
    is not installed.
    """

    def list(self, prefix: str, *, deep: bool = False) -> Iterator[ObjectInfo]:
        """Yield the files whose URIs begin with ``prefix``, sorted by name, after their folder was listed.

        ``deep`` includes subfolders.
        """
        folder = prefix.rpartition("/")[0]
        with _connect_to(folder) as (hub, path):
            entries = hub.find(path, maxdepth=None if deep else 1, detail=True)
        for name in sorted(entries):
            if f"{SCHEME}{name}".startswith(prefix) and entries[name]["type"] == "file":
                yield _make_object_info(entries[name])

    def info(self, uri: str) -> ObjectInfo:
        """Return a file's URI, its size, and the hash of its content as the mark; a folder raises FileNotFoundError."""
        with _connect_to(uri) as (hub, path):
            entry = hub.info(path)
        if entry["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "it is a folder", uri)
        return _make_object_info(entry)

    def read(self, uri: str) -> bytes:
        """Read a whole file."""
        return self.read_slice(uri, 0).data

    def read_slice(self, uri: str, start: int, end: int | None = None) -> Slice:
        """Read bytes [start, end) of a file, cut at its end; a negative ``start`` counts from the end."""
        with _connect_to(uri) as (hub, path), hub.open(path, "rb", cache_type="none") as file:
            size = int(file.size)
            first, last, _ = slice(start, end).indices(size)
            file.seek(first)
            return Slice(file.read(last - first) if first < last else b"", size)

    def download(self, uri: str, start: int = 0, end: int | None = None) -> HubDownload:
        """Return an iterator over bytes [start, end) of a file."""
        return HubDownload(self, uri, start, end)


class HubDownload(Iterator[bytes]):
    """An iterator over the bytes [start, end) of a file on the hub, in pieces of up to 64 MiB.

    Attributes:
        size: the bytes of the whole file.
        mark: the hash of its content; "" if unknown.
    """

    def __init__(self, files: HubFiles, uri: str, start: int, end: int | None) -> None:
        """Fetch the size and hash of the file; ``end`` is None for the file's end."""
        self._files = files
        self._uri = uri
        self._at = start
        _, self.size, self.mark = files.info(uri)
        self._end = self.size if end is None else min(end, self.size)

    def __next__(self) -> bytes:
        """Fetch the next piece; the range is cut at the size that the file had at first.

        Raises:
            OSError: the request failed, or the file has become shorter.
        """
        if self._at >= self._end:
            raise StopIteration
        piece = self._files.read_slice(self._uri, self._at, min(self._at + _PIECE, self._end)).data
        if not piece:
            raise OSError(errno.EIO, "the file has become shorter", self._uri)
        self._at += len(piece)
        return piece

    def close(self) -> None:
        """Do nothing."""


#: A client that reads videos from a store.
Files = Objects | HubFiles


def choose_client(uri: str, objects: Objects) -> Files:
    """Return the client that reads a file: ``objects`` for s3://, a new HubFiles for hf://datasets/.

    Raises:
        UsageError: the URI begins in another way.
    """
    if is_s3(uri):
        return objects
    if uri.startswith(f"{SCHEME}datasets/"):
        return HubFiles()
    raise UsageError(f"{uri}: only local paths, s3:// and hf://datasets/ are read")


def _make_object_info(entry: dict[str, Any]) -> ObjectInfo:
    """Convert an entry of the hub's file system; the mark is the hash of the content, or ""."""
    mark = (entry.get("lfs") or {}).get("sha256") or entry.get("blob_id") or ""
    return ObjectInfo(f"{SCHEME}{entry['name']}", int(entry["size"]), str(mark))


@contextmanager
def _connect_to(uri: str) -> Iterator[tuple[Any, str]]:
    """Yield (the hub's file system, the path in it); any error in the context becomes an OSError that names the URI.

    Raises:
        UsageError: huggingface_hub is not installed.
        FileNotFoundError: there is no such file or repository, or the token may not see it.
        PermissionError: the hub answered 401 or 403.
    """
    try:
        from huggingface_hub import HfFileSystem  # noqa: PLC0415 - only where the hub is used
    except ImportError:
        raise UsageError(f"{uri}: the hub needs huggingface_hub: pip install huggingface_hub") from None

    try:
        yield HfFileSystem(), uri.removeprefix(SCHEME)
    except FileNotFoundError as error:
        message = f"the hub has no such file ({type(error).__name__})"
        if "repository not found" in str(error):  # the message for private repositories too
            message = f"the hub has no such repository, or does not show it: {_describe_token()}"
        raise FileNotFoundError(errno.ENOENT, message, uri) from None
    except Exception as error:  # noqa: BLE001 - the hub's clients raise errors of several libraries
        reason = str(error).strip().split("\n", 1)[0]
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            message = f"the hub refuses the request: {reason}; {_describe_token()}"
            raise PermissionError(errno.EACCES, message, uri) from None
        raise OSError(errno.EIO, f"the hub does not answer: {type(error).__name__}: {reason}", uri) from None


def _describe_token() -> str:
    """Describe the source of the token (a variable or a file), or say that there is none; no secret is in the text."""
    from huggingface_hub import constants  # noqa: PLC0415 - only where the hub is used

    variables = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    name = next((name for name in variables if os.environ.get(name)), None)
    if name is None and not Path(constants.HF_TOKEN_PATH).exists():
        return "no credentials are configured: set HF_TOKEN, or run hf auth login"
    return f"check that the credentials (the token of {name or constants.HF_TOKEN_PATH}) are valid and allowed"
