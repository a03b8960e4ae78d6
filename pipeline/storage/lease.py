"""The lock of a cache in an object store: an object that is created exclusively and rewritten by a heartbeat.

A lease has a number, and its object's name ends in it; the highest number holds. A run that finds a lease whose heart
has stopped takes the next number, which only one run can create, so that two of them never take over together; the
earlier holder finds a higher number than its own and stops. No clock of one machine is compared with that of another:
a holder trusts its lease for a while from before its last beat was sent, and whoever waits for a sign waits longer than
that, from when the last beat was seen.

A holder may be stopped at any point (SIGSTOP, a laptop that sleeps) and go on when another one has the lease. So it
looks at its lease again before each try of a write is sent, and after it: what was written while the lease held needs
no more. A beat is written over the holder's own last beat alone, a commit over nothing.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypedDict, cast

import pyarrow as pa

from pipeline.errors import CacheLocked, RunFailed
from pipeline.storage.s3 import ObjectInfo
from pipeline.storage.stores import LOCK

HEARTBEAT_S = 10.0
MISSED = 6  # beats until a lease counts as lost; one more until others take it
_TRIES = 4  # of an exclusive write that finds another one of the same object under way


class Holder(TypedDict, total=False):
    """Who writes to a cache, as its lock says.

    Attributes:
        host, pid, run_id: of the run's driver.
        namespace: tells the processes of one container from those of another.
        started: when the process was started, in ticks of the kernel.
        beat: goes up with every heartbeat.
        time: of the last one, by the clock of its host.
        released: it ended as it should.
    """

    host: str
    pid: int
    run_id: str
    namespace: str
    started: str | None
    beat: int
    time: str
    released: bool


class LeaseObjects(Protocol):
    """What a lease asks for, as ``pipeline.storage.s3.Objects`` has it."""

    def guarded(self, guard: Callable[[], object]) -> Self: ...
    def list(self, prefix: str) -> Iterator[ObjectInfo]: ...
    def mark(self, uri: str) -> str | None: ...
    def put(
        self, uri: str, data: bytes | pa.Buffer, *, exclusive: bool = False, match: str | None = None
    ) -> str | None: ...


class LeaseStore(Protocol):
    """A store that a lease can hold: ``pipeline.storage.stores.ObjectStore``, or a ``LeasedFolder``."""

    @property
    def root(self) -> str | Path: ...
    @property
    def objects(self) -> LeaseObjects: ...
    def impatient(self) -> LeaseStore:
        """The same for what is worth nothing when it comes late."""

    def read(self, name: str) -> bytes: ...
    def exists(self, name: str) -> bool: ...
    def delete(self, name: str) -> None: ...


class CacheLease:
    """Hold the cache; a thread keeps the lease alive. Writing is allowed only while ``check`` does not raise."""

    def __init__(
        self, store: LeaseStore, run_id: str, notify: Callable[[str], None], heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self._store = store  # to take the lock: a store that is busy for a moment refuses nobody
        self._beating = store.impatient()
        self._guarded = store.objects.guarded(self.check)
        self._mark: str | None = None  # of the last beat; None where it is not known
        self._me: Holder = {**identify(run_id), "namespace": _namespace(), "started": _started(os.getpid())}
        self._notify = notify
        self._heartbeat_s = heartbeat_s
        self._number = self._beats = 0
        self._alive_at = 0.0
        self._lost = ""
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> CacheLease:
        held = _highest(self._store)
        if held and not held[1].get("released"):
            self._wait_for_death(*held)
        self._number = held[0] + 1 if held else 1
        self._alive_at = _clock()
        self._create()
        if held:
            with suppress(OSError):  # some roles may not delete; the highest number counts anyway
                self._store.delete(_name(held[0]))
        self._heart.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._heart.join(self._heartbeat_s)
        if not self._lost:
            with suppress(OSError):  # it goes stale instead; what ended the run is what counts
                self._renew(released=True)

    def check(self) -> None:
        """See ``pipeline.storage.lock.Lock``."""
        silent = _clock() - self._alive_at
        if self._lost or silent > MISSED * self._heartbeat_s:
            why = self._lost or f"the store could not be reached for {silent:.0f} s"
            raise RunFailed(f"{self._store}: the lock of the cache was lost: {why}; run the same command again")

    def commit(self, name: str, data: bytes | pa.Buffer, needs: Collection[str] = ()) -> None:
        """See ``pipeline.storage.lock.Lock``. One PUT, as long as the lease holds."""
        self._create_file(name, data)
        try:
            self.check()
        except RunFailed:
            # Whoever has the lease by now may have counted on these rows already, or removed what they name.
            with suppress(OSError):
                if not all(map(self._store.exists, needs)):
                    self._store.delete(name)
            raise

    def _create_file(self, name: str, data: bytes | pa.Buffer) -> None:
        uri = f"{self._store.root}/{name}"
        for attempt in range(_TRIES):
            try:
                self._guarded.put(uri, data, exclusive=True)
            except FileExistsError:
                if self._store.exists(name):
                    return  # the first try, whose reply got lost: the name tells the content
                if attempt == _TRIES - 1:
                    raise
                time.sleep(1)
            else:
                return

    def put(self, name: str, data: bytes | pa.Buffer) -> None:
        """See ``pipeline.storage.lock.Lock``. One PUT for a new file; over an earlier one a HEAD and a PUT more."""
        uri = f"{self._store.root}/{name}"
        try:
            try:
                self._guarded.put(uri, data, exclusive=True)
            except FileExistsError:
                mark = self._store.objects.mark(uri)
                self.check()  # what has this mark was there while the lease was ours
                self._replace(uri, data, mark)
        except (FileExistsError, FileNotFoundError):
            if self._store.read(name) != bytes(data):  # else it is the first try, whose reply got lost
                self._lost = self._lost or f"another run wrote {name}"
        self.check()

    def _replace(self, uri: str, data: bytes | pa.Buffer, mark: str | None) -> None:
        try:
            self._guarded.put(uri, data, match=mark)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            self._guarded.put(uri, data)

    def _wait_for_death(self, number: int, content: Holder) -> None:
        """Return when the lease proves to be left behind. Raises CacheLocked when it proves alive."""
        if _ended_here(content):
            return
        wait = (MISSED + 1) * self._heartbeat_s
        self._notify(f"the lock of {self._store} is held by {_who(content)}; waiting {wait:.0f} s for a sign of life")
        if self._beats_within(wait, number, content):
            raise CacheLocked(f"{self._store}: another run writes here: {_who(content)}")

    def _beats_within(self, seconds: float, number: int, content: Holder) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._heartbeat_s / 4))
            now = _highest(self._store)
            if now is None or now[0] != number:
                return now is not None
            if now[1] != content:
                return not now[1].get("released")
        return False

    def _create(self) -> None:
        try:
            self._mark = self._write(self._store, exclusive=True)
        except FileExistsError:
            # A reply that got lost is retried, and then finds the object of the first try.
            content = _read(self._store, self._number)
            if content.get("run_id") != self._me["run_id"]:
                raise CacheLocked(f"{self._store}: another run writes here: {_who(content)}") from None
        try:
            self._mark = self._write(self._store, exclusive=True)
            self._notify(f"warning: {self._store} ignores conditional writes: two runs at once cannot be told apart")
        except FileExistsError:
            pass
        highest = _highest(self._store)  # others may have come and gone since the number was chosen
        if highest is not None and highest[0] > self._number:
            with suppress(OSError):
                self._store.delete(_name(self._number))
            raise CacheLocked(f"{self._store}: another run writes here: {_who(highest[1])}")

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_s):
            sent_at = _clock()
            try:
                if _highest_number(self._beating) != self._number:
                    highest = _highest(self._beating)
                    self._lost = f"{_who(highest[1])} took it over" if highest else "its object was deleted"
                    return
                self._renew()
                if self._lost:
                    return
                self._alive_at = sent_at
            except OSError:
                continue  # ``check`` counts the silence

    def _renew(self, *, released: bool = False) -> None:
        """Write the next beat over the last one; where that is not there any more, the lease is lost."""
        try:
            self._mark = self._write(self._beating, match=self._mark, released=released)
            return
        except FileNotFoundError:
            self._lost = "its object was deleted"
            return
        except FileExistsError:
            content = _read(self._beating, self._number)
            if content.get("run_id") != self._me["run_id"]:
                self._lost = f"{_who(content)} took it over"
                return
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
        # An own beat whose reply got lost, or a store without such conditions.
        self._mark = None
        self._write(self._beating, released=released)

    def _write(
        self, store: LeaseStore, *, exclusive: bool = False, match: str | None = None, released: bool = False
    ) -> str | None:
        self._beats += 1
        content: Holder = {**self._me, "beat": self._beats, "time": _now()}
        if released:
            content["released"] = True
        data = json.dumps(content).encode()
        return store.objects.put(f"{store.root}/{_name(self._number)}", data, exclusive=exclusive, match=match)


def lease_holder(store: LeaseStore) -> Holder | None:
    """Who holds the cache by the last sign of life; here the clocks of two machines are compared, for display only."""
    held = _highest(store)
    if held is None or "time" not in held[1] or held[1].get("released") or _ended_here(held[1]):
        return None
    age = datetime.now(UTC) - datetime.fromisoformat(held[1]["time"])
    return held[1] if age.total_seconds() < MISSED * HEARTBEAT_S else None


def identify(run_id: str) -> Holder:
    """Describe this process as a lock names it."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "run_id": run_id}


def _ended_here(content: Holder) -> bool:
    """Whether it is a process of this machine, and of this container, that has ended."""
    if not _namespace() or (content.get("host"), content.get("namespace")) != (socket.gethostname(), _namespace()):
        return False
    return _started(int(content["pid"])) != content.get("started")


def _namespace() -> str:
    """Tells the processes of one container from those of another; "" where there is no such thing."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When the process was started, in ticks of the kernel; None where it does not run (or there is no /proc)."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if facts[0] in "ZX" else facts[19]  # nobody has asked for a zombie's exit status yet


def _clock() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _who(content: Holder) -> str:
    return json.dumps({name: content.get(name) for name in ("host", "pid", "run_id")})


def _name(number: int) -> str:
    return f"{LOCK}-{number:06d}"


def _highest(store: LeaseStore) -> tuple[int, Holder] | None:
    """Number and content of the lease that counts."""
    highest = _highest_number(store)
    return None if highest is None else (highest, _read(store, highest))


def _highest_number(store: LeaseStore) -> int | None:
    prefix = f"{store.root}/{LOCK}-"
    endings = (found.uri.removeprefix(prefix) for found in store.objects.list(prefix))
    return max((int(ending) for ending in endings if ending.isdecimal()), default=None)


def _read(store: LeaseStore, number: int) -> Holder:
    try:
        return cast(Holder, dict(json.loads(store.read(_name(number)))))
    except (FileNotFoundError, ValueError):
        return {}  # replaced this moment


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
