"""Store the files of a cache in a folder or below a prefix of an object store.

In a folder and on S3, a file appears whole and in one step, or not at all.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from pipeline.errors import UsageError
from pipeline.storage.arrow import SCHEMES, ArrowObjects
from pipeline.storage.random_access import LocalFile, RangedObject
from pipeline.storage.s3 import Objects, Slice, Upload, check_uri, is_s3

NOTE = ".running"  # suffix of the notes of runs; see pipeline.runner.claim
TEMPORARY = ".tmp-"  # prefix of the name of a file that is not complete yet
INDEXES = "sources"  # the folder of a cache with the indexes of archives, a file each
CARD = "README.md"  # of a cache, for Hugging Face datasets; a README.md of the user stays
_READERS = 16


@contextmanager
def request_threads(most: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of ``most`` threads for requests, and wait for all requests at the end.

    If the context ends with an exception such as Ctrl-C, pending requests are canceled and running ones not awaited.
    """
    pool = ThreadPoolExecutor(most)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


class FileInfo(NamedTuple):
    """A file of a store: its path relative to the root, and its size in bytes."""

    name: str
    size: int


def store_at(place: str | Path, objects: Objects | None = None) -> Store:
    """Return the store at a folder, ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.

    Nothing is created or looked up there. A folder may be given as ``file:///folder``.

    Args:
        objects: the client for ``s3://``; None creates one from the environment.

    Raises:
        UsageError: another scheme, a malformed address or an empty text; boto3 is not installed, or the environment
            does not name the Azure account.
    """
    text = str(place)
    if not text.strip():
        raise UsageError("the name of a cache or of results is empty: name a folder or s3://bucket/prefix")
    if is_s3(text):
        check_uri(text)
        return ObjectStore(text, (objects or Objects.from_environment()).make_store_client())
    if text.startswith(SCHEMES):
        return ObjectStore(text, ArrowObjects.at(text))
    if "://" in text and not text.startswith("file:///"):
        forms = " or ".join(f"{scheme}BUCKET/PREFIX" for scheme in ("s3://", *SCHEMES))
        raise UsageError(
            f"{text.partition('://')[0]}://...: a cache is a folder, {forms}"
        )  # the rest may contain a key
    return LocalStore(text.removeprefix("file://"))


def check_name(name: str) -> str:
    """Return ``name``, or raise FileNotFoundError if it leads out of the root; names come from untrusted files."""
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise FileNotFoundError(errno.ENOENT, "the name leads out of the cache", name)
    return name


# Two threads may open a root at once: without the lock the second would close the descriptor of the first.
_HOLDING = threading.Lock()


class LocalStore:
    """Files below a local folder, named by POSIX paths relative to it. It can be pickled; ``str`` is the root as given.

    A process that has written there keeps the folder open: if the folder is replaced by another, nothing is written to
    the new folder or deleted from it. Methods that take the name of a file raise FileNotFoundError if it leads out of
    the root; the folders that ``names`` and ``list_files`` take are not checked.
    """

    def __init__(self, root: Path | str) -> None:
        self._label = str(root)
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - workers have other working folders; links are kept
        self._open_folder: _OpenFolder | None = None
        self._makes_root = True

    def __getstate__(self) -> dict[str, Any]:
        # If a node lacks the mount, a worker must not create the folder on the node's local disk.
        return {**self.__dict__, "_makes_root": False}

    @property
    def folder(self) -> Path:
        """The root, since reads cost no request; None for stores that are not local."""
        return self.root

    def _path(self, name: str) -> Path:
        """Return the absolute path of a file; raise FileNotFoundError if ``name`` leads out of the root."""
        return self.root / check_name(name)

    def _descriptor(self) -> int:
        """Return the file descriptor of the root, which the first call opens.

        Raises:
            FileNotFoundError: the root does not exist, or was deleted or replaced since the first call.
        """
        with _HOLDING:
            if self._open_folder is None:
                self._open_folder = _OpenFolder(self.root)
        fault = "was deleted"
        with suppress(FileNotFoundError):
            first, second = os.fstat(self._open_folder.descriptor), self.root.stat()
            times = [(status.st_mtime_ns, status.st_ctime_ns) for status in (first, second)]
            if os.path.samestat(first, second) or times[0] == times[1]:  # some user-space file systems change inodes
                return self._open_folder.descriptor
            fault = "was moved away, and replaced by another folder"
        raise FileNotFoundError(errno.ENOENT, f"the folder {fault} since this run first wrote to it", str(self.root))

    def _read_status(self, name: str) -> os.stat_result:
        """Return the status of a file; below the open descriptor of the root if this process has written."""
        folder = self._open_folder
        return self._path(name).stat() if folder is None else os.stat(check_name(name), dir_fd=folder.descriptor)

    def make(self) -> None:
        """Create the root and its parents if they do not exist; raise UsageError if that fails."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self}: the folder cannot be made: {error.strerror}") from error

    def has_other_files(self) -> bool:
        """Return True if the root is a file, or has files besides notes of runs, indexes, CARD and unfinished files."""
        root = self.root
        paths = (path for path in root.rglob("*") if not path.name.startswith(TEMPORARY))
        files = (path.relative_to(root) for path in paths if path.is_file())
        return root.is_file() or any(path.suffix != NOTE and path.parts[0] not in {INDEXES, CARD} for path in files)

    def with_short_timeouts(self) -> LocalStore:
        """Return this store; other stores return one with short timeouts."""
        return self

    def put(self, name: str, data: bytes | pa.Buffer) -> None:
        """Write a file in one atomic step, replacing a file of that name: afterwards it is complete, or unchanged.

        Missing folders are created, and so is the root, unless this store has written before or was unpickled. The file
        and its folder are synced to disk; a file system that cannot sync folders is accepted.

        Raises:
            OSError: the write failed, the root was deleted or replaced, or (ELOOP) a folder below the root is a
                symbolic link.
        """
        if self._makes_root and self._open_folder is None:
            self.root.mkdir(parents=True, exist_ok=True)
        root = self._descriptor()
        path = PurePosixPath(check_name(name))
        temporary = str(path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}"))
        mode = _make_folders(path, root)
        try:
            with open(temporary, "xb", opener=partial(os.open, mode=0o666, dir_fd=root)) as file:
                _set_shared_mode(temporary, root, mode & 0o666)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=root, dst_dir_fd=root)
        except OSError as error:  # "No space left on device" alone would not say where
            raise OSError(error.errno, error.strerror, str(self.root / name)) from error
        finally:
            with suppress(FileNotFoundError):  # the file already has its final name
                os.unlink(temporary, dir_fd=root)
        folder_descriptor = os.open(path.parent, os.O_RDONLY, dir_fd=root)
        try:
            os.fsync(folder_descriptor)  # so that the rename survives a power cut
        except OSError as error:
            # SMB, 9p and some FUSE mounts cannot sync a folder. The file itself is already synced and renamed.
            if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}:
                raise
        finally:
            os.close(folder_descriptor)

    def link(self, name: str, file: Path) -> bool:
        """Create a hard link ``name`` to a finished file; return False if the file systems do not allow that.

        Missing folders below the root are created, but not the root.

        Raises:
            OSError: any other failure, such as FileExistsError if ``name`` exists, or a symbolic link as a folder
                (ELOOP).
        """
        root = self._descriptor()
        path = PurePosixPath(check_name(name))
        _make_folders(path, root)
        try:
            os.link(file, name, dst_dir_fd=root)
        except OSError as error:  # another file system, a file system without links, or a file of another user
            if error.errno not in {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}:
                raise
            return False
        return True

    def read(self, name: str) -> bytes:
        """Read a whole file. A folder raises IsADirectoryError; a pipe or device raises FileNotFoundError."""
        with self._open_regular(name) as file:
            return file.read()

    def _open_regular(self, name: str) -> BinaryIO:
        """Open a regular file for reading, without waiting at a pipe: names come from untrusted files.

        Raises:
            IsADirectoryError: ``name`` is a folder.
            FileNotFoundError: there is no such file, or it is a pipe or device.
        """
        descriptor = os.open(self._path(name), os.O_RDONLY | os.O_NONBLOCK)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENOENT
            raise OSError(number, os.strerror(number), str(self.root / name))
        return os.fdopen(descriptor, "rb")

    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the content of each file, in the order of ``names``; each is read when it is reached."""
        return map(self.read, names)

    def read_slice(self, name: str, start: int, end: int | None = None) -> Slice:
        """Read bytes [start, end) of a file, cut at its end; a negative ``start`` counts from the end."""
        with self._open_regular(name) as file:
            size = os.fstat(file.fileno()).st_size
            first, last, _ = slice(start, end).indices(size)
            return Slice(os.pread(file.fileno(), max(0, last - first), first), size)

    def open(self, name: str) -> LocalFile:
        """Map a file into memory for random access; raise FileNotFoundError unless it is a regular file."""
        if not self.exists(name):  # a folder, or a pipe that would wait for a writer: names come from untrusted files
            raise FileNotFoundError(errno.ENOENT, "no such file", str(self.root / name))
        return LocalFile(pa.memory_map(str(self._path(name)), "r"))

    def names(self, folder: str, suffix: str) -> list[str]:
        """List the files of a folder whose names end in ``suffix``, as sorted paths FOLDER/NAME; [] without the folder.

        Files whose base names begin with a dot, such as unfinished ones, are left out.
        """
        try:
            with os.scandir(self.root / folder) as entries:
                return sorted(
                    f"{folder}/{entry.name}"
                    for entry in entries
                    if entry.name.endswith(suffix) and not entry.name.startswith(".") and entry.is_file()
                )
        except (FileNotFoundError, NotADirectoryError):
            return []

    def list_files(self, folder: str) -> list[FileInfo]:
        """List all files of a folder ("" is the root), but not of subfolders, sorted by name, with unfinished ones.

        The list is empty if there is no such folder.
        """
        root = self.root / folder
        files = []
        for path in root.iterdir() if root.is_dir() else ():
            with suppress(FileNotFoundError):  # a concurrent writer has renamed the file since it was listed
                if path.is_file():
                    files.append(FileInfo(path.relative_to(self.root).as_posix(), path.stat().st_size))
        return sorted(files)

    def exists(self, name: str) -> bool:
        """Return True if ``name`` is a regular file; False for a folder, and for a name that is too long.

        Other failures, such as a lack of permission, raise OSError.
        """
        check_name(name)
        try:
            return stat.S_ISREG(self._read_status(name).st_mode)
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}:
                raise
            return False

    def compute_age(self, name: str) -> timedelta:
        """Return the time since a file was written, by this machine's clock."""
        return datetime.now(UTC) - datetime.fromtimestamp(self._read_status(name).st_mtime, UTC)

    def delete(self, name: str) -> None:
        """Remove a file; do nothing if there is none, or if the root is missing, or was replaced since the first write.

        Raises:
            OSError: the file cannot be removed, or (ELOOP) a folder below the root is a symbolic link.
        """
        path = PurePosixPath(check_name(name))
        with suppress(FileNotFoundError):
            root = self._descriptor()
            for folder in path.parents[:-1]:
                _refuse_link(folder, root)
            os.unlink(name, dir_fd=root)

    def uploads(self) -> Iterator[Upload]:
        """Return an iterator over pending uploads, of which a folder has none."""
        return iter(())

    def abort_upload(self, upload: Upload) -> None:
        """Raise AssertionError: a folder has no pending upload."""
        raise AssertionError(f"a folder has no {upload}")

    def __str__(self) -> str:
        return self._label


def _make_folders(path: PurePosixPath, root: int) -> int:
    """Create the missing folders between the open root and a file, with the mode of the root, which is returned.

    The root itself is never created.

    Raises:
        OSError: (ELOOP) a folder is a symbolic link, or a folder cannot be created.
    """
    mode = stat.S_IMODE(os.fstat(root).st_mode)
    for folder in reversed(path.parents[:-1]):  # not the root: if it is gone, all its rows are gone
        try:
            os.mkdir(folder, dir_fd=root)
        except FileExistsError:
            _refuse_link(folder, root)
        else:
            _set_shared_mode(folder, root, mode)
    return mode


def _refuse_link(folder: PurePosixPath, root: int) -> None:
    """Raise OSError (ELOOP) if a folder below the open root is a symbolic link; FileNotFoundError if it is missing."""
    if stat.S_ISLNK(os.stat(folder, dir_fd=root, follow_symlinks=False).st_mode):
        message = "this folder is a symbolic link, so files elsewhere would change; put the folder itself here"
        raise OSError(errno.ELOOP, message, str(folder))


def _set_shared_mode(name: PurePath | str, root: int, mode: int) -> None:
    """Set the mode of a new file or folder, so that users with other umasks can share the store; ignore failures."""
    with suppress(OSError):  # a file system without modes
        os.chmod(name, mode, dir_fd=root)


class _OpenFolder:
    """An open file descriptor of a folder, closed with this object; it is pickled as None."""

    def __init__(self, folder: Path) -> None:
        self.descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self.descriptor).atexit = False  # the end of the process closes it anyway

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # another process opens the folder itself


class ObjectStore:
    """A store with the methods of LocalStore below a prefix of an object store."""

    def __init__(self, root: str, objects: Objects | ArrowObjects) -> None:
        self.root = root.rstrip("/")
        self.objects = objects

    @property
    def folder(self) -> None:
        return None

    def with_short_timeouts(self) -> ObjectStore:
        return ObjectStore(self.root, self.objects.with_short_timeouts())

    def _uri(self, name: str) -> str:
        """Return the URI of a file, whose name must stay below the root."""
        return f"{self.root}/{check_name(name)}"

    def make(self) -> None:
        """Do nothing: prefixes need not be created."""

    def has_other_files(self) -> bool:
        """Return True if there are objects besides notes of runs, indexes and CARD; listing ends at the first."""
        infos = self.objects.list(f"{self.root}/", deep=True)
        names = (info.uri.removeprefix(f"{self.root}/") for info in infos)
        return any(not name.endswith(NOTE) and name.partition("/")[0] not in {INDEXES, CARD} for name in names)

    def put(self, name: str, data: bytes | pa.Buffer) -> None:
        self.objects.put(self._uri(name), data)

    def read(self, name: str) -> bytes:
        return self.objects.read(self._uri(name))

    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        with request_threads(_READERS) as pool:  # many small files cost latency, so they are read in parallel
            for start in range(0, len(names), 8 * _READERS):
                yield from pool.map(self.read, names[start : start + 8 * _READERS])

    def read_slice(self, name: str, start: int, end: int | None = None) -> Slice:
        return self.objects.read_slice(self._uri(name), start, end)

    def open(self, name: str) -> RangedObject:
        return RangedObject(self.objects, self._uri(name))

    def names(self, folder: str, suffix: str) -> list[str]:
        names = [file.name for file in self.list_files(folder) if file.name.endswith(suffix)]
        return [
            name for name in names if not PurePosixPath(name).name.startswith(".")
        ]  # for example "._x", copied from a Mac

    def list_files(self, folder: str) -> list[FileInfo]:
        infos = self.objects.list(f"{self.root}/{folder}/" if folder else f"{self.root}/")
        return [FileInfo(item.uri.removeprefix(f"{self.root}/"), item.size) for item in infos]

    def exists(self, name: str) -> bool:
        return self.objects.exists(self._uri(name))

    def compute_age(self, name: str) -> timedelta:
        return self.objects.compute_age(self._uri(name))

    def delete(self, name: str) -> None:
        self.objects.delete(self._uri(name))

    def uploads(self) -> Iterator[Upload]:
        return self.objects.uploads(f"{self.root}/")

    def abort_upload(self, upload: Upload) -> None:
        self.objects.abort_upload(upload)

    def __str__(self) -> str:
        return self.root


#: The stores of caches; both have the same methods.
Store = LocalStore | ObjectStore
