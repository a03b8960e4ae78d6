"""What a raylet of the tests runs instead of Ray's own ``default_worker.py``: it asks the warm server for a worker.

Only the standard library is imported here: this is a process more for every worker.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

SOCKET = "GSTEP_WARM_WORKERS"  # the variable that tells raylets where the server listens


def ask(arguments: list[str]) -> None:
    """Ask for a worker with the arguments that Ray gives it, in this process's environment and folder."""
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SOCKET])
        socket.send_fds(server, [b"."], [1, 2])
        server.sendall(json.dumps(request).encode() + b"\n")
        server.recv(1)  # until the worker is there


if __name__ == "__main__":
    ask(sys.argv[1:])
