"""One writer a cache in a folder: a lock that the kernel frees, and that names who has it."""

import os
import resource
import signal

import pytest

from pipeline.errors import CacheLocked, UsageError
from pipeline.storage.lock import FileLock
from pipeline.storage.stores import LOCK, LocalStore


def test_one_writer_a_cache(tmp_path):
    with FileLock(LocalStore(tmp_path), "first"), pytest.raises(CacheLocked, match='"run_id": "first"'):
        FileLock(LocalStore(tmp_path), "second").__enter__()
    with FileLock(LocalStore(tmp_path), "third"):
        pass


def test_a_driver_that_is_stopped_keeps_its_lock(tmp_path):
    """It may go on at any point, so that nobody else may write meanwhile; the refusal says which process it is."""
    pid = os.fork()
    if pid == 0:
        FileLock(LocalStore(tmp_path), "stopped").__enter__()
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        with pytest.raises(CacheLocked, match=f'"pid": {pid}, "run_id": "stopped"'):
            FileLock(LocalStore(tmp_path), "second").__enter__()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with FileLock(LocalStore(tmp_path), "third"):
        pass


def test_a_lock_on_a_full_disk_names_the_place_and_is_not_kept(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(UsageError, match=f"{tmp_path}: nothing can be written here: File too large"):
            FileLock(LocalStore(tmp_path), "first").__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with FileLock(LocalStore(tmp_path), "second"):
        pass


def test_a_place_that_takes_no_file_is_refused(tmp_path):
    (tmp_path / LOCK).mkdir()  # for whoever may write anywhere, a folder in its place does what a read-only one does
    with pytest.raises(UsageError, match="nothing can be written here"):
        FileLock(LocalStore(tmp_path), "run").__enter__()
