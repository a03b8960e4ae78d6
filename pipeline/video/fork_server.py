"""A process that a worker forks while it has no threads yet, and that becomes the server of its decode processes.

It has imported what they use. A server that ``multiprocessing`` starts anew takes a second of a core for that.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from pathlib import Path
from typing import NamedTuple


class _StandBy(NamedTuple):
    """The process that waits, and the socket at which it does."""

    pid: int
    requests: socket.socket


_standing_by: _StandBy | None = None


def stand_by() -> None:
    """Start the process that waits until ``fork_ahead`` makes it the fork server; it ends with this process.

    Called once in a process that is itself forked and has no threads.
    """
    global _standing_by  # noqa: PLW0603 - there is one in a process, as there is one server
    parent_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        parent_socket.close()
        _wait(child_socket)
    child_socket.close()
    _standing_by = _StandBy(pid, parent_socket)


def _wait(requests: socket.socket) -> None:
    """Wait for the two descriptors of a server, then serve; end this process without them. It never returns."""
    try:
        _, descriptors, *_ = socket.recv_fds(requests, 1, 2)
        requests.close()
        if descriptors:
            _show(f"python -c from {forkserver.__name__} ahead".encode())
            vars(forkserver)["main"](*descriptors, [])
    finally:
        os._exit(0)


def _show(title: bytes) -> None:
    """Let ``ps`` show a title, and no variable of the process that this one is forked from.

    Overwrites the memory of this process's arguments and variables. Variables that it uses itself, without credentials,
    are elsewhere in memory by now.
    """
    addresses = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[45:49]  # see proc(5)
    arguments, arguments_end, variables, variables_end = map(int, addresses)
    for start, end, text in ((arguments, arguments_end, title), (variables, variables_end, b"")):
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, min(len(text), end - start - 1))


@contextmanager
def fork_ahead() -> Iterator[None]:
    """Let the process that stands by, if there is one, be the server that ``multiprocessing`` starts in this context.

    It serves once: a later server is started as usual.
    """
    start = util.spawnv_passfds

    def spawn(path: bytes, arguments: Sequence[str | bytes], descriptors: Sequence[int]) -> int:
        """Hand the request to the server that stands by, if it is one for a fork server; else start a process."""
        global _standing_by  # noqa: PLW0603
        waits = _standing_by
        if waits is None or forkserver.__name__ not in str(arguments[-1]) or len(descriptors) != 2:
            return start(path, arguments, descriptors)
        _standing_by = None
        with waits.requests, suppress(OSError):  # it was killed
            socket.send_fds(waits.requests, [b"."], descriptors)
            return waits.pid
        return start(path, arguments, descriptors)

    vars(util)["spawnv_passfds"] = spawn
    try:
        yield
    finally:
        vars(util)["spawnv_passfds"] = start
