"""The program that a raylet runs to start a worker, in place of Ray's own: it asks the fork server for one.

Only the standard library is imported here: this is a process more for every worker.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

_SOCKET = "GSTEP_FORK_SERVER"  # as in server.py, which imports more


def ask(place: str, program: list[str]) -> bool:
    """Ask the server at ``place`` to run ``program`` in this environment and folder; return whether it does.

    The program is a Python file and its arguments, and writes to this process's output.
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
            server.connect(place)
            socket.send_fds(server, [b"."], [1, 2])
            server.sendall(json.dumps(request).encode() + b"\n")
            return server.recv(1) == b"1"  # nothing where the server has ended, or cannot fork
    except OSError:
        return False


def main(arguments: list[str]) -> None:
    """Ask for a worker with the arguments of Ray's own program, and become that one where no worker is to be had."""
    worker = next(at for at, argument in enumerate(arguments) if argument.endswith(".py"))  # behind Python's flags
    context, rest = "{}", list[str]()
    for argument in arguments[worker:]:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            context = value
        elif name != "--language":
            rest.append(argument)
    if _is_plain(context) and ask(os.environ.get(_SOCKET, ""), rest):
        return
    own = str(Path(arguments[worker]).with_name("setup_worker.py"))
    os.execv(sys.executable, [sys.executable, own, *arguments])


def _is_plain(context: str) -> bool:
    """Return whether a worker is to have the environment of its raylet, and not one of its job or actor."""
    held = json.loads(context or "{}")
    python = held.pop("py_executable", sys.executable)
    return python == sys.executable and not any(held.values())


if __name__ == "__main__":
    main(sys.argv[1:])
