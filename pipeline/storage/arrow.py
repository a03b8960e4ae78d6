"""Google Cloud Storage and Azure as stores of caches, by the file systems of Arrow: gs:// and az://.

Credentials are those that the provider's own tools find (GOOGLE_APPLICATION_CREDENTIALS, a machine's identity); on
Azure AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY or an identity. Azure was tried
with its emulator azurite; Google Cloud Storage is **untested**, since no emulator at hand takes its uploads.

A write that breaks off may leave a truncated object: its name or the row that names it carries a hash, so no reader
takes it for a whole one. Videos are not read from these stores.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial

import pyarrow as pa
from pyarrow import fs

from pipeline.errors import UsageError
from pipeline.storage.s3 import ObjectInfo, Slice, Upload

SCHEMES = ("gs://", "az://")
# Arrow's own limit is 15 minutes, for which a machine without credentials would say nothing.
_GOOGLE_RETRIES = timedelta(minutes=1)
_IS_REFUSED = re.compile(
    r"\b40[13] (?:Forbidden|Unauthorized)|AuthenticationFailed|\bDefaultAzureCredential\b"
    r"|\bPERMISSION_DENIED\b|\bUNAUTHENTICATED\b|\bOAuth2 access token\b"
)
_AZURE = {"BlobEndpoint": "blob_storage_authority", "AccountName": "account_name", "AccountKey": "account_key"}


class ArrowObjects:
    """The client of an object store that Arrow's file systems reach. It pickles; a forked process connects again."""

    def __init__(self, scheme: str, connect: Callable[[], fs.FileSystem]) -> None:
        self._scheme, self._connect = scheme, connect
        self._connection: tuple[int, fs.FileSystem] | None = None  # (process, file system)

    @classmethod
    def at(cls, uri: str) -> ArrowObjects:
        """Return the client for the store of a URI.

        Raises UsageError for a malformed URI, and where the environment lacks the store's settings.
        """
        scheme, bucket = uri[:5], uri[5:].partition("/")[0]
        if not bucket or "?" in uri or "@" in uri:
            raise UsageError(f"{scheme}...: expected {scheme}BUCKET/PREFIX without user, host or query")
        if scheme == "gs://":
            return cls(scheme, partial(fs.GcsFileSystem, retry_time_limit=_GOOGLE_RETRIES))
        return cls(scheme, partial(fs.AzureFileSystem, **_azure_settings(uri)))

    def __reduce__(self) -> tuple[type[ArrowObjects], tuple[str, Callable[[], fs.FileSystem]]]:
        return ArrowObjects, (self._scheme, self._connect)

    def impatient(self) -> ArrowObjects:
        """Return this same client: these file systems have no time limits to set."""
        return self

    @contextmanager
    def _connect_to(self, uri: str) -> Iterator[tuple[fs.FileSystem, str]]:
        """Yield the file system and the object's path; errors inside the context become OSError that names the URI."""
        if self._connection is None or self._connection[0] != os.getpid():
            self._connection = os.getpid(), self._connect()
        try:
            yield self._connection[1], uri.removeprefix(self._scheme).rstrip("/")
        except OSError as error:
            message = str(error).partition(" Details:")[0].partition("\n")[0]
            if isinstance(error, FileNotFoundError) or not _IS_REFUSED.search(message):
                raise OSError(error.errno or errno.EIO, message, uri) from None
            source = _describe_credentials(self._scheme)
            message += f"; the credentials from {source} are wrong, have expired or do not allow this"
            raise PermissionError(errno.EACCES, message, uri) from None

    def list(self, prefix: str, *, deep: bool = False) -> Iterator[ObjectInfo]:
        """Yield the objects of a folder in order of their names, with ``deep`` also the objects of its subfolders.

        Nothing is yielded if there is no such folder. All are listed before the first is yielded.
        """
        with self._connect_to(prefix) as (files, path):
            infos = files.get_file_info(fs.FileSelector(path, recursive=deep, allow_not_found=True))
        for item in sorted(infos, key=lambda item: item.path):
            if item.type == fs.FileType.File:
                yield ObjectInfo(f"{self._scheme}{item.path}", item.size)

    def age(self, uri: str) -> timedelta:
        """Return the time since the object was written, by this machine's clock. Raises FileNotFoundError."""
        with self._connect_to(uri) as (files, path):
            info = files.get_file_info(path)
            if info.type == fs.FileType.NotFound:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            written_at: datetime = info.mtime
            return datetime.now(UTC) - written_at

    def exists(self, uri: str) -> bool:
        """Return True if there is such an object."""
        with self._connect_to(uri) as (files, path):
            return bool(files.get_file_info(path).type == fs.FileType.File)

    def read(self, uri: str) -> bytes:
        """Read a whole object. Raises FileNotFoundError."""
        return self.read_slice(uri, 0).data

    def read_slice(self, uri: str, start: int, end: int | None = None) -> Slice:
        """Read bytes [start, end) of an object, or its last ``-start`` bytes. Raises FileNotFoundError."""
        with self._connect_to(uri) as (files, path), files.open_input_file(path) as file:
            size = file.size()
            first, last, _ = slice(start, end).indices(size)
            return Slice(bytes(file.read_at(last - first, first)) if first < last else b"", size)

    def put(self, uri: str, data: bytes | pa.Buffer) -> None:
        """Write a whole object."""
        with self._connect_to(uri) as (files, path), files.open_output_stream(path) as stream:
            stream.write(data)

    def delete(self, uri: str) -> None:
        """Remove an object; nothing happens where there is none."""
        if self.exists(uri):
            with self._connect_to(uri) as (files, path):
                files.delete_file(path)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield no pending upload: these stores drop them by themselves."""
        return iter(())

    def abort(self, upload: Upload) -> None:
        """Clean nothing up: these stores have no pending uploads."""


def _describe_credentials(scheme: str) -> str:
    """Say where the credentials of a store come from, without a part of them."""
    if scheme == "gs://":
        path = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        return f"{path} (GOOGLE_APPLICATION_CREDENTIALS)" if path else "the login of gcloud or the machine's account"
    variables = ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_KEY")
    name = next((name for name in variables if os.environ.get(name)), None)
    return f"the environment ({name})" if name else "the machine's identity"


def _azure_settings(uri: str) -> dict[str, str]:
    """Return the arguments of AzureFileSystem that the environment holds; the connection string comes first.

    ``uri`` is for the message. Raises UsageError without the name of an account.
    """
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    settings = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    settings = {argument: settings[name] for name, argument in _AZURE.items() if name in settings}
    if endpoint := settings.pop("blob_storage_authority", ""):
        scheme, _, host = endpoint.partition("://")
        for kind in ("blob", "dfs"):
            settings |= {f"{kind}_storage_scheme": scheme, f"{kind}_storage_authority": host.partition("/")[0]}
    for argument, name in (("account_name", "AZURE_STORAGE_ACCOUNT"), ("account_key", "AZURE_STORAGE_KEY")):
        if argument not in settings and os.environ.get(name):
            settings[argument] = os.environ[name]
    if "account_name" not in settings:
        raise UsageError(f"{uri}: set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY")
    return settings
