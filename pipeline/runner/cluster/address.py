"""Access to a Ray cluster: its address, and the token that it requires."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import ray
from ray._private.utils import get_ray_address_file, read_ray_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # what ray.init() uses; Ray's stubs lack it
from ray.job_config import JobConfig

from pipeline.errors import RunFailed, make_printable
from pipeline.runner.cluster.session_folder import find_ray_folder

_REACH_S = 10.0
_TRIES = 3  # attempts to reach a cluster; Ray waits 40 s for each answer, since it may be busy
_ALONE = "RAY_ADDRESS=local uses this machine alone"
_TOKEN = (
    "set RAY_AUTH_MODE=token, and give the cluster's token in RAY_AUTH_TOKEN, in ~/.ray/auth_token, or in a file named "
    "by RAY_AUTH_TOKEN_PATH"
)


def find_address() -> str | None:
    """Return the address of the cluster that ``ray.init()`` would join; None if Ray starts its own cluster.

    It is RAY_ADDRESS, or the address of a cluster that ``ray start`` left on this machine. An address that another user
    (not root) left is not joined, since joining a cluster runs its code here; it is ignored if nothing listens there.

    Raises:
        RunFailed: RAY_ADDRESS is the address of a job server, nothing listens at the address, or another user left it.
    """
    environment_address = os.environ.get("RAY_ADDRESS", "")
    address = environment_address or read_ray_address()
    if address is None or address == "local":
        return None
    if address.startswith(("http://", "https://")):
        raise RunFailed(
            f"RAY_ADDRESS is {address}, the address of a job server: put ray job submit --working-dir . -- before the "
            "command, or name the cluster itself, HOST:6379"
        )
    file = None if environment_address else Path(get_ray_address_file(None))
    if file is not None and file.stat().st_uid not in {0, os.geteuid()}:  # every user may write to its folder
        try:
            _check_listens(address, file)
        except RunFailed:
            return None
        raise RunFailed(
            f"another user left the address of a Ray cluster in {file}, and that cluster could run its code here: "
            f"RAY_ADDRESS={address} joins it, {_ALONE}"
        )
    _check_listens(address, file)
    return address


def _check_listens(address: str, file: Path | None) -> None:
    """Raise RunFailed if nothing listens at HOST:PORT; an address without a port, such as "auto", passes.

    Args:
        file: the file in which ``ray start`` left the address; None if it is from RAY_ADDRESS.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return  # a word like "auto" is not an address
    host = host.strip("[]")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        whence = "RAY_ADDRESS"
        remedy = "start its head"
        if file is not None:
            whence = f"which ray start wrote to {file}"
            if _is_this_machine(host):  # its head is dead: the file alone makes every later run fail
                remedy = f"its head has ended without ray stop: delete {file}, or start a head"
        raise RunFailed(
            f"no Ray cluster answers at {address} ({whence}): {error.strerror or error}; {remedy}, or {_ALONE}"
        ) from error


def _is_this_machine(host: str) -> bool:
    """Return True if ``host`` is an address of this machine, to which alone a socket can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as local_socket:
            local_socket.bind(address)
    except OSError:
        return False
    return True


def check_answers(address: str) -> None:
    """Raise RunFailed if the cluster at ``address`` does not answer in three tries, or requires a missing token.

    An address of Ray Client or without a port is not checked, nor is a cluster found on this machine if this user has a
    token.
    """
    mode = os.environ.get("RAY_AUTH_MODE")
    is_discovered = not os.environ.get("RAY_ADDRESS")
    if "://" in address or ":" not in address or (mode is None and is_discovered and _has_token()):
        return  # the port of Ray Client speaks another protocol; a cluster found here gets the token from Ray itself
    if mode == "token" and not _has_token():
        raise RunFailed(_describe_missing_token(address))  # Ray ends this process if it is asked without a token
    for tries_left in reversed(range(_TRIES)):
        try:
            GcsClient(address=address)
            return
        except ray.exceptions.RayError as error:
            if not tries_left or isinstance(error, ray.exceptions.AuthenticationError):
                raise RunFailed(describe_startup_failure(error, address)) from error


def set_cluster_token() -> None:
    """Set RAY_AUTH_TOKEN in this process's environment to a new token for the cluster that it starts next.

    Nothing is set if the user has a token or RAY_AUTH_MODE is "disabled". Ray would write a token to ~/.ray/auth_token,
    where every later ``ray start`` requires it.
    """
    if os.environ.get("RAY_AUTH_MODE") != "disabled" and not _has_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _has_token() -> bool:
    """Return True if Ray would find a token in its environment variables or in ~/.ray/auth_token."""
    configured_token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(configured_token) or (Path.home() / ".ray" / "auth_token").exists()


def _describe_missing_token(address: str) -> str:
    """Return the error message for a cluster that requires a token which is missing."""
    return f"the Ray cluster at {address} asks for a token that was not given: {_TOKEN}; or {_ALONE}"


def describe_startup_failure(error: Exception | None, address: str | None) -> str:
    """Return one line that says why Ray did not start or could not be joined, with advice.

    Args:
        error: the error; None if Ray ended this process without an exception.
        address: the cluster that was to be joined; None if Ray was to be started here.
    """
    if error is None:
        description = "Ray's native code ended this process, as it does if the raylet of this node does not answer"
    else:
        description = make_printable(f"{type(error).__name__}: {error}")
    if isinstance(error, ray.exceptions.AuthenticationError):
        return _describe_missing_token(address or "this machine")
    if address is not None:
        check = "check the address (HOST:6379), that cluster and its token"
        return f"Ray cannot be joined at {address}: {description}; {check}, or {_ALONE}"
    return (
        f"Ray cannot be started on this machine: {description}; if the machine is busy, try again "
        f"later; else look at Ray's logs ({find_ray_folder()}/session_latest/logs), at the free space there and in "
        "/dev/shm and the free memory, or name a short path with RAY_TMPDIR"
    )


@contextmanager
def make_package_importable() -> Iterator[JobConfig | None]:
    """Provide the job configuration with which Ray is joined so that its workers can import this package.

    Joining puts the current folder first on the path of the workers, where a user's ``pipeline.py`` would hide this
    package. So this package's parent folder is the current folder inside the context, unless the original folder is on
    the driver's path before the last entry. If it is the last entry, it is last on the workers' path too.

    Yields:
        The ``job_config`` for ``ray.init()``; None for Ray's default.
    """
    current_folder = str(Path.cwd())
    if {"", current_folder} & set(sys.path[:-1]):
        yield None
        return
    with chdir(Path(__file__).parents[3]):
        yield JobConfig(_py_driver_sys_path=[current_folder]) if sys.path[-1] == current_folder else None
