"""Ports of this machine for the servers that tests start."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

# Above the ports that Ray gives its workers, and below those that Linux gives whoever asks for any port: other tests do
# so again and again before a server listens on the port that it was told.
_PORTS = range(20000, 32768)


def free_ports(count: int) -> list[int]:
    """Find distinct ports that nothing listens on now."""
    found = set[int]()
    while len(found) < count:
        port = secrets.choice(_PORTS)
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            found.add(port)
    return [*found]
