"""What a lease asks of a store, in a folder: for file systems without flock (some Lustre and FUSE mounts)."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from pipeline.storage.s3 import ObjectInfo
from pipeline.storage.stores import LocalStore, fsync_folder

#: What flock fails with where there is no such thing, and link.
MISSING = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK})
_NO_LINKS = MISSING | {errno.EPERM, errno.EMLINK}


class LeasedFolder(LocalStore):
    """A folder, with the requests of an object store beside its own."""

    @property
    def objects(self) -> FolderObjects:
        return FolderObjects()

    def impatient(self) -> LeasedFolder:
        """The same: a file system answers in its own time."""
        return self


class FolderObjects:
    """Files by their paths, as ``pipeline.storage.s3.Objects`` has objects by their URIs.

    An exclusive write is one step for the file system, which gives a path to one of two writers. A conditional one is
    not: between the look and the write another one may come. A lease looks again after each write.
    """

    def __init__(self, guard: Callable[[], object] | None = None) -> None:
        self._guard = guard

    def guarded(self, guard: Callable[[], object]) -> FolderObjects:
        """The same files, each of which is written only if ``guard`` does not raise."""
        return FolderObjects(guard)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """The finished files whose paths begin with ``prefix``."""
        start = Path(prefix)
        for path in sorted(start.parent.iterdir()):
            if path.name.startswith(start.name):
                with suppress(FileNotFoundError):
                    yield ObjectInfo(str(path), path.stat().st_size)

    def mark(self, uri: str) -> str | None:
        """Tells the file's present content from any other."""
        return hashlib.sha256(Path(uri).read_bytes()).hexdigest()

    def put(
        self, uri: str, data: bytes | pa.Buffer, *, exclusive: bool = False, match: str | None = None
    ) -> str | None:
        """See ``Objects.put``."""
        path, content = Path(uri), bytes(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        if match is not None and self.mark(uri) != match:
            raise FileExistsError(errno.EEXIST, "another one was written meanwhile", uri)
        temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if self._guard is not None:
                self._guard()
            if exclusive:
                _claim(temporary, path)
            else:
                temporary.replace(path)
        except OSError as error:  # "No space left on device" alone would not say where
            raise OSError(error.errno, error.strerror, uri) from error
        finally:
            temporary.unlink(missing_ok=True)
        fsync_folder(path.parent)
        return hashlib.sha256(content).hexdigest()


def _claim(temporary: Path, path: Path) -> None:
    """Give the file this path, if none has it. Raises FileExistsError."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        temporary.replace(path)
