"""One driver a cache: a lock that a killed driver does not leave behind."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType

from pipeline.errors import CacheLocked

LOCK = ".lock"


class CacheLock:
    """Hold ``<cache>/.lock`` with flock, which the kernel frees when the process ends, however it ends.

    Raises CacheLocked with the holder's host and pid where another run has it.
    """

    def __init__(self, cache: Path, run_id: str) -> None:
        self._path = cache / LOCK
        self._run_id = run_id
        self._descriptor: int | None = None

    def __enter__(self) -> CacheLock:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 4096).decode("utf-8", "replace")
            os.close(descriptor)
            raise CacheLocked(f"{self._path.parent}: another run writes to this cache: {holder or 'unknown'}") from None
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(self._who()).encode())
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def _who(self) -> dict[str, object]:
        return {"host": socket.gethostname(), "pid": os.getpid(), "run_id": self._run_id}
