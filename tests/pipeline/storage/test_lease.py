"""One writer a cache on a store without locks: leases, heartbeats, and what a killed run leaves behind."""

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.errors import CacheLocked, RunFailed
from pipeline.storage.lease import CacheLease
from pipeline.storage.lock import holder
from pipeline.storage.stores import LOCK, ObjectStore
from tests.pipeline.s3 import S3Server
from tests.waiting import wait_until

BEAT = 0.5  # a lease outlives six: on a busy machine a thread may have no turn for a second


@pytest.fixture(scope="module")
def server():
    with S3Server() as server:
        yield server


@pytest.fixture
def store(server, request) -> ObjectStore:
    return ObjectStore(f"s3://{server.bucket}/{request.node.name}", server.objects())


@pytest.fixture
def said() -> list[str]:
    return []


def lease(store, run_id, said) -> CacheLease:
    return CacheLease(store, run_id, said.append, heartbeat_s=BEAT)


def foreign(store, beat: int, number: int = 1) -> None:
    """A lease of a run on another machine."""
    content = {"host": "elsewhere", "pid": 1, "run_id": "other", "namespace": "n", "beat": beat}
    store.put(f"{LOCK}-{number:06d}", json.dumps(content).encode())


def test_the_second_is_refused_with_the_first_named(store, said):
    with lease(store, "first", said) as held:
        held.check()
        assert holder(store)["run_id"] == "first"
        with pytest.raises(CacheLocked, match=r'"pid": .*"run_id": "first"'):
            lease(store, "second", said).__enter__()
    assert holder(store) is None
    with lease(store, "third", said):
        assert holder(store)["run_id"] == "third"
    assert len(said) == 1 and "sign of life" in said[0]  # the second waited, the third did not


def test_a_killed_run_on_this_machine_blocks_nobody(store, said, server):
    code = (
        "import sys, os, signal; from pipeline.storage.lease import CacheLease;"
        "from pipeline.storage.stores import ObjectStore;"
        "from pipeline.storage.s3 import Objects;"
        f"CacheLease(ObjectStore({store.root!r}, Objects.from_environment()), 'killed', print).__enter__();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = server.environment() | {"PYTHONPATH": ":".join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", code], check=False, env=environment)
    assert killed.returncode == -signal.SIGKILL
    assert store.exists(f"{LOCK}-000001")
    assert holder(store) is None
    with lease(store, "next", said) as held:
        held.check()
    assert said == []


def test_a_silent_lease_of_another_machine_is_taken_over(store, said):
    foreign(store, beat=7)
    with lease(store, "next", said) as held:
        held.check()
        assert not store.exists(f"{LOCK}-000001")
    assert len(said) == 1 and "elsewhere" in said[0]


def test_a_beating_lease_of_another_machine_is_respected(store, said):
    ended = threading.Event()

    def beat() -> None:
        for number in range(1000):
            foreign(store, number)
            if ended.wait(BEAT / 2):
                return

    foreign(store, -1)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(CacheLocked, match="elsewhere"):
            lease(store, "next", said).__enter__()
    finally:
        ended.set()
        thread.join()


def test_of_many_heirs_one_inherits(store, said):
    foreign(store, beat=7)
    heirs = [lease(store, f"heir{i}", said) for i in range(6)]

    def enter(heir: CacheLease) -> CacheLease | None:
        try:
            return heir.__enter__()
        except CacheLocked:
            return None

    with ThreadPoolExecutor(len(heirs)) as pool:
        winners = [heir for heir in pool.map(enter, heirs) if heir]
    assert len(winners) == 1
    winners[0].check()
    winners[0].__exit__(None, None, None)


def test_who_was_taken_for_dead_writes_no_more(store, said):
    with lease(store, "slow", said) as held:
        foreign(store, beat=1, number=2)
        with pytest.raises(RunFailed, match="elsewhere"):
            wait_until(held.check, "the loss is noticed", 30)
    assert json.loads(store.read(f"{LOCK}-000002"))["run_id"] == "other"


def test_a_store_that_stays_away_ends_the_lease(server, said):
    with S3Server() as short:
        store = ObjectStore(f"s3://{short.bucket}/c", short.objects())
        held = lease(store, "run", said).__enter__()
    with pytest.raises(RunFailed, match="could not be reached"):
        wait_until(held.check, "the loss is noticed", 60)


def test_a_number_that_was_freed_meanwhile_is_not_taken_twice(store, said, monkeypatch):
    """Between the listing and the creation another run came and went, and a third one holds by now."""
    late = lease(store, "late", said)
    create = late._create

    def meanwhile() -> None:
        foreign(store, beat=1, number=2)
        create()

    monkeypatch.setattr(late, "_create", meanwhile)
    with pytest.raises(CacheLocked, match="elsewhere"):
        late.__enter__()
    assert not store.exists(f"{LOCK}-000001")


def test_a_role_that_may_not_delete_can_still_hold(server, store, said):
    with lease(store, "first", said):
        pass
    server.fail_below("DELETE", store.root.partition(server.bucket + "/")[2], 403)
    with lease(store, "second", said) as held:
        held.check()


def test_an_unreadable_lease_is_nobodys(store):
    store.put(f"{LOCK}-000001", b"")
    assert holder(store) is None


def test_an_ending_without_the_store_hides_nothing(said):
    with S3Server() as short:
        store = ObjectStore(f"s3://{short.bucket}/c", short.objects())
        held = lease(store, "run", said)
        held.__enter__()
    with pytest.raises(KeyboardInterrupt):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as stop:
            held.__exit__(KeyboardInterrupt, stop, None)
            raise
