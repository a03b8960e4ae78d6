"""The head of the run's Ray cluster: whether it answers, and the error that ends a run without it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import ray

from pipeline.errors import RunFailed

# Ray's native code ends this process without a message once the head has been away for this long (a setting of Ray).
_RAY_LIMIT_VARIABLE, _RAY_LIMIT_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0
_PATIENCE_SHARE = 1 / 3  # of that limit: the rest is for the last writes
_OWN_PATIENCE_S = 4.0  # the head of a Ray that this process has started is not restarted
_LOOK_S, _ANSWER_S = 2.0, 3.0


class HeadLost(RunFailed):
    """The head of the Ray cluster no longer answers. Calls to it block until Ray ends this process."""


class Head:
    """The head of the cluster that this process has joined. Without a cluster it counts as answering."""

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        """Remember the head's address. ``say`` gets a line when a joined cluster's head stops or resumes answering."""
        node = ray._private.worker._global_node
        self._address = None if node is None else str(node.gcs_address)
        limit_s = float(os.environ.get(_RAY_LIMIT_VARIABLE) or _RAY_LIMIT_S)
        self._is_own = node is not None and node.is_head()
        self._patience_s = _OWN_PATIENCE_S if self._is_own else _PATIENCE_SHARE * limit_s
        self._say = say
        self._clock = clock
        self._looked_at = clock()
        self._lost_at: float | None = None

    def look(self) -> None:
        """Check every _LOOK_S seconds that the head answers, and raise HeadLost if it has been away for too long.

        That is a third of Ray's own limit, or _OWN_PATIENCE_S if this process has started the head.
        """
        if self._clock() - self._looked_at >= _LOOK_S:
            self.answers()
        if self._lost_at is not None and self._clock() - self._lost_at >= self._patience_s:
            raise HeadLost(self.describe_loss())

    def answers(self) -> bool:
        """Return True if the head accepts a connection now, or if there is no cluster; record and report changes.

        Check it before calling Ray, since a call to a lost head would block.
        """
        if self._address is None:
            return True
        self._looked_at = self._clock()
        if _accepts_connection(self._address):
            if self._lost_at is not None:
                self._say(f"note: the head of the Ray cluster at {self._address} answers again")
            self._lost_at = None
        elif self._lost_at is None:
            self._lost_at = self._looked_at
            if not self._is_own:
                self._say(
                    f"note: the head of the Ray cluster at {self._address} does not answer. The run ends in "
                    f"{self._patience_s:.0f} s unless it restarts"
                )
        return self._lost_at is None

    def describe_loss(self) -> str:
        """Return the error message for a lost head, with its remedy, in one line."""
        if self._is_own:
            return (
                f"the head process of Ray on this machine ({self._address}) has ended, for lack of memory perhaps. "
                "Rerun the same command to resume"
            )
        return (
            f"the head of the Ray cluster at {self._address} does not answer: it has ended, or its machine or the "
            "network is lost. Start a head, and rerun the same command to resume"
        )


def _accepts_connection(address: str) -> bool:
    """Return True if HOST:PORT accepts a connection within _ANSWER_S seconds."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True
