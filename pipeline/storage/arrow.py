"""Use Google Cloud Storage (gs://) and Azure (az://) as stores of caches, through the file systems of Arrow.

Credentials are those that the provider's tools find, and on Azure AZURE_STORAGE_CONNECTION_STRING, or
AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY. Azure was tested with its emulator; Google Cloud Storage is **untested**.
A write that breaks off may leave a truncated object, but its name, or the row that names it, has a hash, so no reader
takes it for a complete one.
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
# Arrow's default is 15 minutes, in which a machine without credentials would print nothing.
_GOOGLE_RETRIES = timedelta(minutes=1)
_IS_REFUSED = re.compile(
    r"\b40[13] (?:Forbidden|Unauthorized)|AuthenticationFailed|\bDefaultAzureCredential\b"
    r"|\bPERMISSION_DENIED\b|\bUNAUTHENTICATED\b|\bOAuth2 access token\b"
)
_AZURE = {"BlobEndpoint": "blob_storage_authority", "AccountName": "account_name", "AccountKey": "account_key"}


class ArrowObjects:
    """The client of an object store that Arrow's file systems reach. It can be pickled, and works after a fork.

    Methods that send requests raise OSErrors that name the URI: FileNotFoundError, PermissionError with the source of
    the credentials, or a general one.
    """

    def __init__(self, scheme: str, connect: Callable[[], fs.FileSystem]) -> None:
        self._scheme = scheme
        self._connect = connect
        self._connection: tuple[int, fs.FileSystem] | None = None  # (process, file system)

    @classmethod
    def at(cls, uri: str) -> ArrowObjects:
        """Create the client for the store of a gs:// or az:// URI; nothing is looked up.

        Raises:
            UsageError: the URI has no bucket or has a user or a query, or the environment does not name the Azure
                account.
        """
        scheme, bucket = uri[:5], uri[5:].partition("/")[0]
        if not bucket or "?" in uri or "@" in uri:
            raise UsageError(f"{scheme}...: expected {scheme}BUCKET/PREFIX without user, host or query")
        if scheme == "gs://":
            return cls(scheme, partial(fs.GcsFileSystem, retry_time_limit=_GOOGLE_RETRIES))
        return cls(scheme, partial(fs.AzureFileSystem, **_read_azure_settings(uri)))

    def __reduce__(self) -> tuple[type[ArrowObjects], tuple[str, Callable[[], fs.FileSystem]]]:
        return ArrowObjects, (self._scheme, self._connect)

    def with_short_timeouts(self) -> ArrowObjects:
        """Return this client: these file systems have no time limits to set."""
        return self

    @contextmanager
    def _connect_to(self, uri: str) -> Iterator[tuple[fs.FileSystem, str]]:
        """Yield (the file system, the object's path), and convert OSErrors in the context to ones that name the URI.

        The first use in a process connects; errors of connecting are not converted. If the message matches _IS_REFUSED
        (credentials refused or not found), the error becomes a PermissionError.
        """
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
        """Yield the objects of a folder, sorted by name, after all were listed; nothing if there is no such folder.

        ``deep`` includes subfolders.
        """
        with self._connect_to(prefix) as (files, path):
            infos = files.get_file_info(fs.FileSelector(path, recursive=deep, allow_not_found=True))
        for item in sorted(infos, key=lambda item: item.path):
            if item.type == fs.FileType.File:
                yield ObjectInfo(f"{self._scheme}{item.path}", item.size)

    def compute_age(self, uri: str) -> timedelta:
        """Return the time since the object was written, by this machine's clock, which may be behind the store's."""
        with self._connect_to(uri) as (files, path):
            info = files.get_file_info(path)
            if info.type == fs.FileType.NotFound:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            written_at: datetime = info.mtime
            return datetime.now(UTC) - written_at

    def exists(self, uri: str) -> bool:
        """Return True if there is such an object; False for a folder."""
        with self._connect_to(uri) as (files, path):
            return bool(files.get_file_info(path).type == fs.FileType.File)

    def read(self, uri: str) -> bytes:
        """Read a whole object."""
        return self.read_slice(uri, 0).data

    def read_slice(self, uri: str, start: int, end: int | None = None) -> Slice:
        """Read bytes [start, end) of an object, cut at its end; a negative ``start`` counts from the end."""
        with self._connect_to(uri) as (files, path), files.open_input_file(path) as file:
            size = file.size()
            first, last, _ = slice(start, end).indices(size)
            return Slice(bytes(file.read_at(last - first, first)) if first < last else b"", size)

    def put(self, uri: str, data: bytes | pa.Buffer) -> None:
        """Write a whole object, replacing an existing one. A write that breaks off may leave a truncated object."""
        with self._connect_to(uri) as (files, path), files.open_output_stream(path) as stream:
            stream.write(data)

    def delete(self, uri: str) -> None:
        """Remove an object; do nothing if there is none."""
        if self.exists(uri):
            with self._connect_to(uri) as (files, path):
                files.delete_file(path)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Return an empty iterator: these stores drop incomplete uploads by themselves."""
        return iter(())

    def abort_upload(self, upload: Upload) -> None:
        """Do nothing: these stores have no pending uploads."""


def _describe_credentials(scheme: str) -> str:
    """Describe the source of a store's credentials for an error, without secrets."""
    if scheme == "gs://":
        path = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        return f"{path} (GOOGLE_APPLICATION_CREDENTIALS)" if path else "the login of gcloud or the machine's account"
    variables = ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_KEY")
    name = next((name for name in variables if os.environ.get(name)), None)
    return f"the environment ({name})" if name else "the machine's identity"


def _read_azure_settings(uri: str) -> dict[str, str]:
    """Return the arguments of AzureFileSystem that the environment gives.

    Values in AZURE_STORAGE_CONNECTION_STRING have precedence over AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY.

    Raises:
        UsageError: no variable names the account.
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
