"""Access of a driver to a Ray cluster: which one it joins, whether it answers, the token, the workers' imports."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import ray
from ray._private.utils import read_ray_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # what ray.init() asks; its stubs leave it out
from ray.job_config import JobConfig

from pipeline.errors import RunFailed, printable

_REACH_S = 10.0
_TRIES = 3  # attempts to reach a cluster; Ray waits 40 s for each answer, which a busy one may need
_ALONE = "RAY_ADDRESS=local uses this machine alone"
_TOKEN = (
    "set RAY_AUTH_MODE=token, and give the cluster's token in RAY_AUTH_TOKEN, in ~/.ray/auth_token, or in a file named "
    "by RAY_AUTH_TOKEN_PATH"
)


def address_to_join() -> str | None:
    """Return the address of the cluster that ``ray.init()`` would join: RAY_ADDRESS, or one started by ``ray start``.

    Returns None where Ray starts a cluster of its own. Raises RunFailed for the address of a job server, and where
    nothing listens.
    """
    given = os.environ.get("RAY_ADDRESS", "")
    address = given or read_ray_address()
    if address is None or address == "local":
        return None
    if address.startswith(("http://", "https://")):
        raise RunFailed(
            f"RAY_ADDRESS is {address}, the address of a job server: put ray job submit --working-dir . -- before the "
            "command, or name the cluster itself, HOST:6379"
        )
    _check_listens(address, "RAY_ADDRESS" if given else "which ray start left in ray_current_cluster")
    return address


def _check_listens(address: str, whence: str) -> None:
    """Raise RunFailed, naming where the address came from, if nothing listens there."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return  # a word like "auto" is no address
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise RunFailed(
            f"no Ray cluster answers at {address} ({whence}): {error.strerror or error}; start its head, or {_ALONE}"
        ) from error


def check_answers(address: str) -> None:
    """Check that the cluster at ``address`` answers; Ray itself would ask twenty times and say only that it failed.

    Raises RunFailed where the cluster does not answer, or asks for a token that is not there.
    """
    mode, found = os.environ.get("RAY_AUTH_MODE"), not os.environ.get("RAY_ADDRESS")
    if "://" in address or ":" not in address or (mode is None and found and _has_token()):
        return  # the port of Ray Client speaks another protocol; a cluster found here gets the token from Ray itself
    if mode == "token" and not _has_token():
        raise RunFailed(_token_missing(address))  # Ray ends this process if it is asked without a token
    for tries_left in reversed(range(_TRIES)):
        try:
            GcsClient(address=address)
            return
        except ray.exceptions.RayError as error:
            if not tries_left or isinstance(error, ray.exceptions.AuthenticationError):
                raise RunFailed(startup_failure(error, address)) from error


def set_cluster_token() -> None:
    """Give the cluster that ``ray.init()`` starts next a token in this process's environment.

    Ray would write one to ~/.ray/auth_token, where every later ``ray start`` finds it and asks for it. A token that the
    user has set is kept.
    """
    if os.environ.get("RAY_AUTH_MODE") != "disabled" and not _has_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _has_token() -> bool:
    """Return whether Ray finds a token of the cluster."""
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(named) or (Path.home() / ".ray" / "auth_token").exists()


def _token_missing(address: str) -> str:
    """Format the error message for a cluster that asks for a token."""
    return f"the Ray cluster at {address} asks for a token that was not given: {_TOKEN}; or {_ALONE}"


def startup_failure(error: Exception, address: str | None) -> str:
    """Return a one-line reason why Ray did not start or could not be joined, with what may help."""
    what = printable(f"{type(error).__name__}: {error}")
    if isinstance(error, ray.exceptions.AuthenticationError):
        return _token_missing(address or "this machine")
    if address is not None:
        check = "check the address (HOST:6379), that cluster and its token"
        return f"Ray cannot be joined at {address}: {what}; {check}, or {_ALONE}"
    return (
        f"Ray cannot be started on this machine: {what}; where the machine is busy, try again when it is less so; else "
        "look at Ray's logs (RAY_TMPDIR, else /tmp/ray, in session_latest/logs), at the room in /tmp, /dev/shm and "
        "memory, and name a short path with RAY_TMPDIR if that is it"
    )


@contextmanager
def workers_import_this() -> Iterator[JobConfig | None]:
    """Join Ray from a folder that does not hide this package from the workers, with the configuration that is yielded.

    Joining puts the current folder first on the path of the workers, where a user's ``pipeline.py`` would hide this
    package. A driver that does not import from there first itself (a console script) joins from the folder of this
    package instead; where the current folder is last on its own path, it is behind this package on the workers'.
    """
    here = str(Path.cwd())
    if {"", here} & set(sys.path[:-1]):
        yield None
        return
    with chdir(Path(__file__).parents[2]):
        yield JobConfig(_py_driver_sys_path=[here]) if sys.path[-1] == here else None
