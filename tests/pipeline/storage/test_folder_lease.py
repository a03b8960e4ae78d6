"""A folder whose file system has no flock: a lock that works all the same, and says so."""

import errno
import fcntl
import os
import signal

import pytest

from pipeline.errors import CacheLocked, RunFailed
from pipeline.storage import lease
from pipeline.storage.folder_lease import FolderObjects, LeasedFolder
from pipeline.storage.lease import CacheLease
from pipeline.storage.lock import cache_lock, holder
from pipeline.storage.stores import LocalStore


@pytest.fixture
def store(tmp_path, monkeypatch) -> LocalStore:
    def missing(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.3)
    return LocalStore(tmp_path)


def quick(store: LocalStore, run_id: str) -> CacheLease:
    return CacheLease(LeasedFolder(store.root), run_id, print, heartbeat_s=0.3)


def test_the_lock_is_a_lease_and_says_so(store):
    said: list[str] = []
    assert holder(store) is None and not store.taken()
    with cache_lock(store, "first", said.append) as lock:
        assert isinstance(lock, CacheLease) and "has no flock" in said[0]
        assert not store.taken()  # the lock's own files make no cache
        held = holder(store)
        assert held is not None and (held["run_id"], held["pid"]) == ("first", os.getpid())
        lock.commit("videos/first-000000-ab.parquet", b"rows")
        lock.commit("videos/first-000000-ab.parquet", b"rows")  # again, as after a reply that was lost
        lock.put("cache.json", b"one")
        lock.put("cache.json", b"two")
    assert holder(store) is None
    assert (store.read("videos/first-000000-ab.parquet"), store.read("cache.json")) == (b"rows", b"two")
    assert not list(store.root.rglob(".tmp-*"))


def test_one_writer_a_cache(store):
    with quick(store, "first"), pytest.raises(CacheLocked, match='"run_id": "first"'):
        quick(store, "second").__enter__()
    with quick(store, "third"):
        pass


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_driver_that_is_gone_or_stopped_loses_it_and_commits_nothing_more(store, tmp_path, sent):
    """One that is stopped goes on when another one has the lease."""
    taken, done = tmp_path / "taken", tmp_path / "done"
    pid = os.fork()
    if pid == 0:
        with quick(store, "first") as lock:
            taken.touch()
            os.kill(os.getpid(), sent)
            with pytest.raises(RunFailed, match="was lost"):
                lock.commit("videos/late.parquet", b"rows")
            done.touch()
            os._exit(0)
    os.waitpid(pid, os.WUNTRACED if sent == signal.SIGSTOP else 0)
    assert taken.exists()
    with quick(store, "second") as lock:
        lock.commit("videos/second.parquet", b"rows")
        if sent == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
            os.waitpid(pid, 0)
            assert done.exists()
        lock.check()
    assert store.names("videos", ".parquet") == ["videos/second.parquet"]


@pytest.mark.parametrize("links", [True, False])
def test_an_exclusive_write_is_given_to_one(tmp_path, monkeypatch, links):
    def missing(source, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", missing)
    objects, uri = FolderObjects(), str(tmp_path / "a" / "x")
    mark = objects.put(uri, b"one", exclusive=True)
    with pytest.raises(FileExistsError):
        objects.put(uri, b"two", exclusive=True)
    assert objects.mark(uri) == mark
    with pytest.raises(FileExistsError):
        objects.put(uri, b"two", match="another")
    with pytest.raises(FileNotFoundError):
        objects.put(uri + "y", b"two", match=mark)
    assert objects.put(uri, b"three", match=mark) != mark
    assert [(found.uri, found.size) for found in objects.list(uri)] == [(uri, 5)]
    with pytest.raises(ZeroDivisionError):
        objects.guarded(lambda: 1 / 0).put(uri, b"four")
    assert (tmp_path / "a" / "x").read_bytes() == b"three" and len(list((tmp_path / "a").iterdir())) == 1


def test_what_is_listed_are_finished_files_alone(tmp_path):
    objects = FolderObjects()
    objects.put(str(tmp_path / ".lock-000001"), b"x")
    (tmp_path / ".tmp-.lock-000002-ab").write_bytes(b"x")
    assert [found.uri for found in objects.list(str(tmp_path / ".lock-"))] == [str(tmp_path / ".lock-000001")]
