"""The folder for the Ray sessions that this user's commands start: private, and cleared of ended sessions.

Ray's default, ``/tmp/ray``, is writable for every user, who then reaches the sockets of a session and its workers.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

from ray._private.utils import get_ray_address_file

from pipeline.runner.cluster.disks import MIN_FREE_BYTES

_KEPT_SESSIONS = 3  # the number of ended sessions whose logs are kept
_LOCK = "gstep.lock"  # a file in a session; only sessions that have it are deleted, not those of ``ray start``
_MAX_SOCKET_BYTES = 107  # the limit for the path of a Unix socket
_SOCKET = "/session_2026-01-01_00-00-00_000000_{}/sockets/plasma_store"  # with the process id: Ray's longest path
_LOCKED_S = 60.0  # a younger lock file may not be locked yet
_locks: list[int] = []  # descriptors that hold the locks of this process's sessions


def find_ray_folder() -> Path:
    """Return the path of the folder for Ray sessions; nothing is created.

    The base folder is RAY_TMPDIR, otherwise TMPDIR, otherwise /tmp. If only this user can enter it, the result is its
    subfolder ``ray``. Otherwise it is ``ray-UID/ray``, a private folder around one that Ray opens to every user. If
    that path in TMPDIR is too long for sockets, it is in /tmp instead.
    """
    default = Path(get_ray_address_file(None)).parent
    with suppress(OSError):  # it does not exist yet
        if _belongs_to_user(base := default.parent.stat()) and not stat.S_IMODE(base.st_mode) & 0o077:
            return default
    own_name = f"ray-{os.geteuid()}"
    folder = default.with_name(own_name) / default.name
    return Path("/tmp", own_name, default.name) if _is_too_long(folder) and "RAY_TMPDIR" not in os.environ else folder


def _is_too_long(folder: Path) -> bool:
    """Return True if the socket paths of a session in ``folder`` would be longer than Unix allows."""
    return len(os.fsencode(folder)) + len(_SOCKET.format(os.getpid())) > _MAX_SOCKET_BYTES


def make_ray_folder() -> Path:
    """Create the private folder for Ray sessions if needed, delete what ended sessions left in it, and return it.

    Raises:
        OSError: the path is too long for sockets, the disk is full, ``ray-UID`` is a link or belongs to another user
            (PermissionError), or the folder cannot be created.
    """
    folder = find_ray_folder()
    if _is_too_long(folder):
        message = "the path is too long for Ray's sockets: name a shorter folder by RAY_TMPDIR"
        raise OSError(errno.ENAMETOOLONG, message, str(folder))
    if folder.parent.name == f"ray-{os.geteuid()}":
        _make_private(folder.parent)
    folder.mkdir(parents=True, exist_ok=True)
    _delete_ended_sessions(folder)
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < MIN_FREE_BYTES:  # Ray would wait for its processes for a minute
        raise OSError(
            errno.ENOSPC, "the disk is full: free space on it, or name another one by RAY_TMPDIR", str(folder)
        )
    return folder


def _make_private(folder: Path) -> None:
    """Create a folder with mode 0700, or set this mode if the folder exists.

    Raises:
        PermissionError: it is a link or a file, or belongs to another user.
    """
    with suppress(FileExistsError):
        folder.mkdir(0o700, parents=True)
    info = folder.lstat()
    if not (stat.S_ISDIR(info.st_mode) and _belongs_to_user(info)):
        raise PermissionError(
            f"{folder} is a link or belongs to another user: remove it, or name another folder by RAY_TMPDIR"
        )
    folder.chmod(0o700)


def lock_session(folder: str) -> None:
    """Lock a session's folder while this process runs, so that other commands keep it. OSErrors are ignored."""
    with suppress(OSError):  # a full disk: the session is never deleted
        _locks.append(os.open(f"{folder}/{_LOCK}", os.O_RDWR | os.O_CREAT, 0o600))
        fcntl.flock(_locks[-1], fcntl.LOCK_SH)


def _belongs_to_user(info: os.stat_result) -> bool:
    return info.st_uid == os.geteuid()


def _delete_ended_sessions(folder: Path) -> None:
    """Delete the spilled objects of ended sessions, and ended sessions that are not among the newest _KEPT_SESSIONS.

    Running sessions count among the newest. Sessions that are locked, younger than _LOCKED_S, or without a lock file
    are kept. OSErrors are ignored.
    """
    for number, lock in enumerate(sorted(folder.glob(f"session_2*/{_LOCK}"), reverse=True)):
        session = lock.parent
        with suppress(OSError):
            if time.time() - lock.stat().st_mtime < _LOCKED_S:
                continue
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while a process uses the session
                useless = [session] if number >= _KEPT_SESSIONS else list(session.glob("ray_spilled_objects*"))
                for path in useless:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
