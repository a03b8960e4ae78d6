"""A process that a worker forks before it has threads, and that later becomes the server of its decode processes."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from pathlib import Path
from typing import NamedTuple


class _StandbyProcess(NamedTuple):
    """The process that waits, and the parent's socket to it."""

    pid: int
    requests: socket.socket


_standing_by: _StandbyProcess | None = None


def fork_standby() -> None:
    """Fork the process that waits until ``use_standby_server`` makes it the fork server; it ends with this process.

    Call this once, in a process that was itself forked and has no threads.
    """
    global _standing_by  # noqa: PLW0603 - a process has one, as it has one server
    parent_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        parent_socket.close()
        _wait_and_serve(child_socket)
    child_socket.close()
    _standing_by = _StandbyProcess(pid, parent_socket)


def _wait_and_serve(requests: socket.socket) -> None:
    """Wait for the two descriptors of a fork server, then run it; never return.

    The process exits when the parent's end of the socket closes before the descriptors arrive, and otherwise when the
    fork server ends.
    """
    try:
        _, descriptors, *_ = socket.recv_fds(requests, 1, 2)
        requests.close()
        if descriptors:
            _show_title(f"python -c from {forkserver.__name__} ahead".encode())
            vars(forkserver)["main"](*descriptors, [])
    finally:
        os._exit(0)


def _show_title(title: bytes) -> None:
    """Make ``ps`` show ``title`` for this process, and hide the environment that it inherited.

    Overwrites the memory that the kernel shows as this process's arguments and variables, but not ``os.environ``.
    """
    addresses = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[45:49]  # see proc(5)
    arguments, arguments_end, variables, variables_end = map(int, addresses)
    for start, end, text in ((arguments, arguments_end, title), (variables, variables_end, b"")):
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, min(len(text), end - start - 1))


@contextmanager
def use_standby_server() -> Iterator[None]:
    """Let the waiting process, if there is one, become the fork server that ``multiprocessing`` starts in this context.

    It serves once; other servers are started as usual, as is one whose waiting process was killed. ``multiprocessing``
    is patched inside the context, for all threads.
    """
    start = util.spawnv_passfds

    def hand_over_server(path: bytes, arguments: Sequence[str | bytes], descriptors: Sequence[int]) -> int:
        """Hand a fork server's descriptors to the waiting process and return its PID.

        Start a process as usual for other requests, and if no process waits or it was killed.
        """
        global _standing_by  # noqa: PLW0603
        stand_by_process = _standing_by
        if stand_by_process is None or forkserver.__name__ not in str(arguments[-1]) or len(descriptors) != 2:
            return start(path, arguments, descriptors)
        _standing_by = None
        with stand_by_process.requests, suppress(OSError):  # it was killed
            socket.send_fds(stand_by_process.requests, [b"."], descriptors)
            return stand_by_process.pid
        return start(path, arguments, descriptors)

    vars(util)["spawnv_passfds"] = hand_over_server
    try:
        yield
    finally:
        vars(util)["spawnv_passfds"] = start
