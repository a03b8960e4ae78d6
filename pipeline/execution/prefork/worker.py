"""The program that Ray runs in place of Python to start a worker: it asks the fork server for one.

Only the standard library is imported here: this is a process more for every worker.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path


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


if __name__ == "__main__" and not ask(sys.argv[1], sys.argv[2:]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])  # as Ray itself would have started it
