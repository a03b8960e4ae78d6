"""The note of a run that writes to a place: who, where, since when, last seen by the store's own clock.

What is stored is right without it: the tables are sets (``pipeline.cache.table``). It is there so that a second run of
the same work is refused by default, and so that what deletes files waits for those that write.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TypedDict, cast

from pipeline.errors import CacheLocked, UsageError
from pipeline.rows import JsonObject
from pipeline.runner.last_writes import write_last
from pipeline.runner.progress import Progress
from pipeline.runner.run_record import RUNS
from pipeline.storage.stores import NOTE, Store

HEARTBEAT_S = 10.0
MISSED = 6  # missed renewals of its note after which a run counts as gone


class Holder(TypedDict, total=False):
    """The content of a claim's note: which run writes to a place.

    Attributes:
        run_id, host, pid: of the run's driver.
        namespace: tells the processes of one container from those of another.
        started: when the process was started, in ticks of the kernel.
        since: when the run began, by the clock of its host.
        seconds: since then, up to the last sign of life: clocks of hosts differ.
        checked: whether it has looked for others, and found none.
        beat: goes up with every sign of life.
        progress: the numbers of the run (``Progress``), once its workers are at work.
    """

    run_id: str
    host: str
    pid: int
    namespace: str
    started: str | None
    since: str
    seconds: float
    checked: bool
    beat: int
    progress: JsonObject


_OPEN: set[str] = set()  # the run ids of this process's claims


class Claim:
    """A note in ``store`` that this run writes to it, for as long as the ``with`` block lasts.

    Entering raises CacheLocked where another run does so, unless ``join``; UsageError where nothing can be written.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        notify: Callable[[str], object],
        *,
        join: bool = False,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._store, self._beating = store, store.impatient()
        self._notify, self._join, self._heartbeat_s = notify, join, heartbeat_s
        self._name = f"{RUNS}/{run_id}{NOTE}"
        self._me: Holder = {
            "run_id": run_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "namespace": _namespace(),
            "started": _started(os.getpid()),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "checked": False,
            "beat": 0,
        }
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._live, name="claim", daemon=True)

    def __enter__(self) -> Claim:
        _OPEN.add(self._me["run_id"])
        try:
            self._beat(self._store)
        except OSError as error:
            _OPEN.discard(self._me["run_id"])
            raise UsageError(f"{self._store}: nothing can be written here: {error.strerror or error}") from error
        try:
            if not self._join:
                for name, other in _notes(self._store):
                    self._refuse(name, other)
            self._me["checked"] = True
            self._beat(self._store)
        except BaseException as error:
            self._leave_at(error)
            raise
        self._heart.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if error is not None:
            self._leave_at(error)
            return
        with suppress(OSError):  # it goes stale instead
            self._leave()

    def tell(self, progress: Progress) -> None:
        """Put the run's numbers into its note when that is next written."""
        self._me["progress"] = asdict(progress)

    def _leave_at(self, error: BaseException) -> None:
        """Delete this run's note before an error leaves it."""
        if why := write_last(error, self._leave):
            stale_s = MISSED * self._heartbeat_s
            error.add_note(f"the note of this run was not deleted, and holds no other up in {stale_s:g} s: {why}")

    def _leave(self) -> None:
        """Delete this run's note, once no sign of life can come behind that. Raises OSError."""
        _OPEN.discard(self._me["run_id"])
        if self._heart.ident is not None:
            self._heart.join(self._heartbeat_s)
        self._store.delete(self._name)

    def _beat(self, store: Store) -> None:
        """Write this run's note again, with a higher count."""
        self._me["beat"] += 1
        self._me["seconds"] = time.monotonic() - self._began
        store.put(self._name, json.dumps(self._me).encode())

    def _live(self) -> None:
        """Write the note anew at intervals until the claim ends; runs in a thread."""
        while not self._ended.wait(self._heartbeat_s):
            with suppress(OSError):
                self._beat(self._beating)

    def _refuse(self, name: str, other: Holder) -> None:
        """Raise CacheLocked if the run ``other`` is still at work; ignore its note otherwise."""
        if other.get("run_id") == self._me["run_id"]:
            return
        # Both have just come and see each other: one of them goes on.
        if not other.get("checked") and other.get("run_id", "") > self._me["run_id"]:
            return
        if not _ended_here(other) and self._is_alive(name, other):
            raise CacheLocked(f"{self._store}: another run writes here: {who(other)}; --join writes beside it")
        with suppress(OSError):
            self._store.delete(name)

    def _is_alive(self, name: str, other: Holder) -> bool:
        """Return whether the other run renews its note within the time after which a note counts as abandoned."""
        limit, told = timedelta(seconds=MISSED * self._heartbeat_s), False
        # With an old note a process that is there may have been stopped, or a clock has jumped: whether it beats tells.
        here, until = _is_here(other), time.monotonic() + limit.total_seconds()
        while (silent := _note_age(self._store, name, self._name)) is not None and (here or silent < limit):
            if here and silent < limit:
                return True
            if time.monotonic() > until:
                return False
            if not told and (told := True):
                wait = (limit if here else min(limit, limit - silent)).total_seconds()
                self._notify(f"{self._store} has a note of {who(other)}; waiting {wait:.0f} s for a sign of life")
            time.sleep(min(1.0, self._heartbeat_s / 4))
            with suppress(OSError):
                self._beat(self._beating)
            now = _read(self._store, name)
            if now is None:
                return False
            if now.get("beat") != other.get("beat"):
                return True
        return False


def holder(store: Store) -> Holder | None:
    """Return the note of the first run that seems to write to ``store``, one of this process too; None without any.

    The run's process is alive on this machine, or its note is younger than MISSED heartbeats. Raises OSError.
    """
    for name, other in _notes(store):
        if not _ended_here(other):
            with suppress(FileNotFoundError):
                if _is_here(other) or store.age(name) < timedelta(seconds=MISSED * HEARTBEAT_S):
                    return other
    return None


def who(other: Holder) -> str:
    """Describe a run by host and process, for messages."""
    return json.dumps({name: other.get(name) for name in ("host", "pid", "run_id", "since")})


def _notes(store: Store) -> Iterator[tuple[str, Holder]]:
    """Yield the name and content of every claim's note."""
    for name in store.names(RUNS, NOTE):
        found = _read(store, name)
        if found is not None:
            yield name, found


def _read(store: Store, name: str) -> Holder | None:
    """Read a note; None where it is gone."""
    try:
        held = json.loads(store.read(name))
    except FileNotFoundError:
        return None
    except ValueError:
        held = None
    return cast(Holder, held) if isinstance(held, dict) else {"run_id": PurePosixPath(name).stem}


def _note_age(store: Store, name: str, own: str) -> timedelta | None:
    """Return the age of a note relative to this run's own newest note, by the store's clock.

    None if the note is gone.
    """
    try:
        return store.age(name) - store.age(own)
    except FileNotFoundError:
        return None


def _of_this_container(other: Holder) -> bool:
    """Return whether a run's driver is on this host and in this container."""
    here = (socket.gethostname(), _namespace())
    return bool(here[1]) and (other.get("host"), other.get("namespace")) == here


def _is_here(other: Holder) -> bool:
    """Return whether a run is a process of this container that runs."""
    return _of_this_container(other) and not _ended_here(other)


def _ended_here(other: Holder) -> bool:
    """Return whether a run is a process of this container that has ended, or a claim of this process that has."""
    if not _of_this_container(other):
        return False
    if other["pid"] == os.getpid():
        return other["run_id"] not in _OPEN
    return _started(int(other["pid"])) != other.get("started")


def _namespace() -> str:
    """Return an id of this process's container (its PID namespace), "" where the system has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Return a process's start time in kernel ticks; None where it does not run (or there is no /proc)."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if facts[0] in "ZX" else facts[19]  # nobody has asked for a zombie's exit status yet
