"""The program that a raylet runs to start a worker, in place of Ray's own: it requests one of the fork server.

Only the standard library is imported here: every worker costs this extra process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

_SOCKET = "GSTEP_FORK_SERVER"  # as in server.py, which imports more


def request_worker(socket_path: str, program: list[str]) -> bool:
    """Request a fork that runs ``program`` in this environment and folder; return True if the server forked it.

    The program is a Python file and its arguments. Its output goes to this process's output. False without a server.
    """
    try:
        request = {
            "python": sys.executable,
            "program": program,
            "environment": dict(os.environ),
            "folder": str(Path.cwd()),
            "oom_score": Path("/proc/self/oom_score_adj").read_text(encoding="ascii"),
        }
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(socket_path)
            socket.send_fds(server, [b"."], [1, 2])
            server.sendall(json.dumps(request).encode() + b"\n")
            return server.recv(1) == b"1"  # nothing where the server has ended, or cannot fork
    except OSError:
        return False


def main(arguments: list[str]) -> None:
    """Start a Ray worker: by a fork of the prefork server, else by Ray's own program.

    Returns once the server has forked a worker, without waiting for its end. Without a fork, Ray's program replaces
    this process. A worker with a runtime environment of its own is never forked.

    Args:
        arguments: the arguments of Ray's setup program: Python's flags, then Ray's worker program and its options.
    """
    worker = next(at for at, argument in enumerate(arguments) if argument.endswith(".py"))  # behind Python's flags
    context, program = "{}", list[str]()
    for argument in arguments[worker:]:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            context = value
        elif name != "--language":
            program.append(argument)
    if _is_plain(context) and request_worker(os.environ.get(_SOCKET, ""), program):
        return
    setup_worker = str(Path(arguments[worker]).with_name("setup_worker.py"))
    os.execv(sys.executable, [sys.executable, setup_worker, *arguments])


def _is_plain(context: str) -> bool:
    """Return True if a worker's context asks for no environment of a job or an actor."""
    settings = json.loads(context or "{}")
    python = settings.pop("py_executable", sys.executable)
    return python == sys.executable and not any(settings.values())


if __name__ == "__main__":
    main(sys.argv[1:])
