"""A server on this machine, in a process of its own, for as long as it is measured."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen

from pipeline.errors import RunFailed


@contextmanager
def served(module: str, *arguments: str, ready: str, patience_s: float) -> Iterator[str]:
    """Start ``python -m module`` on a free port; yield its address once the path ``ready`` answers, and end it.

    ``arguments`` go before the port. Raises RunFailed with what it printed where it ends or takes longer than
    ``patience_s`` seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + patience_s
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", module, *arguments, str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while not _answers(f"{address}{ready}"):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RunFailed(f"{module} did not become ready: {log.read()[-2000:]}")
                time.sleep(0.1)
            yield address
        finally:
            server.terminate()
            server.wait()


def _answers(address: str) -> bool:
    """Return whether a server answers there, and not with an error."""
    try:
        with urlopen(address, timeout=5):
            return True
    except OSError:  # it does not listen yet, or loads its model
        return False
