"""One writer a cache on a store without locks: leases, heartbeats, and what a killed run leaves behind."""

import errno
import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.errors import CacheLocked, RunFailed
from pipeline.storage import lease as lease_module
from pipeline.storage.lease import CacheLease
from pipeline.storage.lock import holder
from pipeline.storage.stores import LOCK, ObjectStore
from tests.pipeline.flaky import FlakyProxy
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


def silence(held: CacheLease) -> None:
    """As after a long stop of the process, before any thread had a turn."""
    held._ended.set()
    held._heart.join()
    held._ended.clear()
    held._alive_at = float("-inf")


def written(server, store, name: str) -> list[int]:
    """What each PUT of the object was answered with."""
    path = f"/{store.root.removeprefix('s3://')}/{name}"
    return [request.status for request in server.requests if (request.method, request.path) == ("PUT", path)]


@pytest.mark.parametrize("write", ["commit", "put"])
def test_nothing_is_sent_once_the_lease_was_lost(server, store, said, write):
    with CacheLease(store, "run", said.append) as held:
        getattr(held, write)("f/before", b"x")
        silence(held)
        with pytest.raises(RunFailed, match="could not be reached"):
            getattr(held, write)("f/after", b"x")
        assert (written(server, store, "f/before"), written(server, store, "f/after")) == ([200], [])
        held._alive_at = lease_module._clock()


def test_every_further_try_of_a_write_asks_for_the_lease_again(server, store, said, monkeypatch):
    with FlakyProxy(server) as proxy:
        fault = proxy.fail("PUT", "/f/busy", 503, 3)
        with CacheLease(ObjectStore(store.root, proxy.objects()), "run", said.append) as held:
            silence(held)
            monkeypatch.setattr(held, "_alive_at", lease_module._clock())
            look, looks = held.check, []

            def check() -> None:
                looks.append(len(fault.paths))
                monkeypatch.setattr(held, "_alive_at", float("-inf") if len(looks) == 3 else lease_module._clock())
                look()

            held._guarded = held._store.objects.guarded(check)
            with pytest.raises(RunFailed, match="could not be reached"):
                held.commit("f/busy", b"x")
            assert looks == [0, 1, 2] and not store.exists("f/busy")
            held._alive_at = lease_module._clock()


def test_a_commit_whose_lease_was_lost_while_it_was_sent_stays_if_what_it_needs_is_there(store, said, monkeypatch):
    with CacheLease(store, "run", said.append) as held:
        silence(held)
        held._guarded = store.objects  # the last look before it was sent was in time
        store.put("t/there", b"x")
        for name, needs in {"v/whole": ["t/there"], "v/broken": ["t/there", "t/gone"]}.items():
            with pytest.raises(RunFailed, match="the lock of the cache was lost"):
                held.commit(name, b"x", needs)
        assert (store.exists("v/whole"), store.exists("v/broken")) == (True, False)
        held._alive_at = lease_module._clock()


def test_a_commit_whose_reply_was_lost_is_there_once(server, store, said):
    with FlakyProxy(server) as proxy:
        fault = proxy.fail("PUT", "/f/lost", "lost")
        with CacheLease(ObjectStore(store.root, proxy.objects()), "run", said.append) as held:
            held.commit("f/lost", b"x")
        assert len(fault.paths) == 1 and store.read("f/lost") == b"x"


def test_a_file_that_another_run_wrote_meanwhile_is_not_replaced(store, said, monkeypatch):
    """After this one was stopped when the last look at its lease was over."""
    store.put("header", b"old")
    with CacheLease(store, "run", said.append) as held:
        held.put("header", b"mine")
        mark = store.objects.mark

        def meanwhile(uri: str) -> str | None:
            found = mark(uri)
            store.put("header", b"theirs")
            return found

        monkeypatch.setattr(store.objects, "mark", meanwhile)
        with pytest.raises(RunFailed, match="another run wrote header"):
            held.put("header", b"mine too")
    assert store.read("header") == b"theirs"


def test_a_late_beat_does_not_bring_a_lease_back(store, said, monkeypatch):
    """It was stopped after it had seen that the lease was its own; the next run removed that and has gone again."""
    held = lease(store, "run", said).__enter__()
    monkeypatch.setattr(lease_module, "_highest_number", lambda store: 1)
    store.delete(f"{LOCK}-000001")
    assert wait_until(lambda: held._lost, "the loss is noticed", 30) == "its object was deleted"
    with pytest.raises(RunFailed, match="the lock of the cache was lost"):
        held.check()
    held.__exit__(None, None, None)
    assert not store.exists(f"{LOCK}-000001")


def test_a_beat_whose_reply_was_lost_costs_nothing(server, store, said):
    with FlakyProxy(server) as proxy:
        with lease(ObjectStore(store.root, proxy.objects()), "run", said) as held:
            fault = proxy.fail("PUT", f"/{LOCK}-000001", "lost")
            wait_until(lambda: fault.paths, "a beat is lost")
            beat = json.loads(store.read(f"{LOCK}-000001"))["beat"]
            wait_until(lambda: json.loads(store.read(f"{LOCK}-000001"))["beat"] > beat, "the next one")
            held.check()
        assert holder(store) is None


def test_a_store_without_conditions_on_replacing_is_beaten_without(server, store, said, monkeypatch):
    put, refused = type(store.objects).put, []

    def picky(self, uri, data, *, exclusive=False, match=None):
        if match is not None:
            refused.append(uri)
            raise OSError(errno.EOPNOTSUPP, "NotImplemented", uri)
        return put(self, uri, data, exclusive=exclusive)

    monkeypatch.setattr(type(store.objects), "put", picky)
    store.put("header", b"old")
    with lease(store, "run", said) as held:
        wait_until(lambda: len(refused) > 1, "two beats", 30)
        held.put("header", b"new")
        held.check()
    assert store.read("header") == b"new" and holder(store) is None
