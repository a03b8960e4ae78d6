"""One driver a cache: a lock that a killed driver does not leave behind.

In a folder it is flock, which the kernel frees when the process ends, however it ends. An object store has nothing like
it, nor have some file systems: there it is a lease, an object that is created exclusively and rewritten by a heartbeat
(``pipeline.storage.lease``).
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import TracebackType
from typing import Protocol, cast

import pyarrow as pa

from pipeline.errors import CacheLocked, UsageError
from pipeline.storage.folder_lease import MISSING, LeasedFolder
from pipeline.storage.lease import CacheLease, Holder, identify, lease_holder
from pipeline.storage.stores import LOCK, LocalStore, ObjectStore, Store


class Lock(Protocol):
    """Held inside a ``with`` block."""

    def __enter__(self) -> Lock:
        """Take the lock.

        Raises CacheLocked with the holder's host and pid where another run has it, UsageError or OSError where the
        store takes nothing.
        """

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def check(self) -> None:
        """Raises RunFailed where the lock was lost meanwhile: then nothing may be written any more."""

    def commit(self, name: str, data: bytes | pa.Buffer, needs: Collection[str] = ()) -> None:
        """Write a file that has the hash of its content in its name, as long as the lock is held.

        Where it was lost in that very moment, the file stays only if all of ``needs`` are there still.

        Raises RunFailed where the lock was lost, and OSError.
        """

    def put(self, name: str, data: bytes | pa.Buffer) -> None:
        """Write a file, over an earlier one too, as long as the lock is held.

        Raises RunFailed where it was lost, and OSError.
        """


def cache_lock(store: Store, run_id: str, notify: Callable[[str], None]) -> Lock:
    """The lock of the cache at ``store``; ``notify`` is told what a user must know while it is taken."""
    if isinstance(store, ObjectStore):
        return CacheLease(store, run_id, notify)
    assert isinstance(store, LocalStore)
    if _has_flock(store):
        return FileLock(store, run_id)
    notify(f"warning: the file system of {store} has no flock: the lock is a file that is rewritten every 10 s")
    return CacheLease(LeasedFolder(str(store)), run_id, notify)


def holder(store: Store) -> Holder | None:
    """Host, pid and run_id of the run that writes to the cache at this moment; None where none does."""
    if isinstance(store, ObjectStore):
        return lease_holder(store)
    assert isinstance(store, LocalStore)
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        descriptor = os.open(store.root / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return cast(Holder, dict(json.loads(os.read(descriptor, 4096) or b"{}")))
        except OSError as error:
            if error.errno not in MISSING:
                raise
            return lease_holder(LeasedFolder(str(store)))
        finally:
            os.close(descriptor)
    return None


def _has_flock(store: LocalStore) -> bool:
    """Whether the folder can be locked by the kernel; a folder that takes no file is for ``FileLock`` to refuse."""
    try:
        descriptor = os.open(store.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in MISSING
    finally:
        os.close(descriptor)
    return True


def _locked(descriptor: int) -> bool:
    """Take the lock; a few tries, because whoever only looks (``holder``) has it for an instant."""
    for _ in range(5):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
    return False


class FileLock:
    """Hold ``<cache>/.lock`` with flock."""

    def __init__(self, store: LocalStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._descriptor: int | None = None

    def __enter__(self) -> FileLock:
        try:
            descriptor = os.open(self._store.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"{self._store}: nothing can be written here: {error.strerror}") from error
        if not _locked(descriptor):
            other = os.read(descriptor, 4096).decode("utf-8", "replace")
            os.close(descriptor)
            raise CacheLocked(f"{self._store}: another run writes here: {other or 'unknown'}") from None
        # A machine that mounts the folder without flock has no other way.
        if (lease := lease_holder(LeasedFolder(str(self._store)))) is not None:
            os.close(descriptor)
            raise CacheLocked(f"{self._store}: another run writes here: {json.dumps(lease)}")
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(identify(self._run_id)).encode())
        except OSError as error:  # a full disk
            os.close(descriptor)
            raise UsageError(f"{self._store}: nothing can be written here: {error.strerror}") from error
        self._descriptor = descriptor
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def check(self) -> None:
        """The kernel takes it from nobody: a process that is stopped keeps it."""

    def commit(self, name: str, data: bytes | pa.Buffer, needs: Collection[str] = ()) -> None:
        """See ``Lock``."""
        self._store.put(name, data)

    def put(self, name: str, data: bytes | pa.Buffer) -> None:
        """See ``Lock``."""
        self._store.put(name, data)
