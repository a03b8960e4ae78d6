"""A run's claim on a store: a note with its host, process and start, which is renewed at intervals.

It makes a second run refuse to start by default, and makes deleting commands wait. The stored data does not depend on
it.
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
from datetime import timedelta
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TypedDict, cast

from pipeline.cache.schema import TOKENS, VIDEOS
from pipeline.errors import CacheLocked, UsageError
from pipeline.rows import JsonObject
from pipeline.runner.progress import Progress
from pipeline.runner.run_record import RUNS, format_now, write_last
from pipeline.storage.stores import INDEXES, NOTE, Store

HEARTBEAT_S = 10.0
MAX_MISSED_BEATS = 6  # after this many missed beats, a run counts as ended
_FOLDERS = (TOKENS, VIDEOS, RUNS, INDEXES, "answers", "repaired")  # folders of caches and of answers


class ClaimNote(TypedDict, total=False):
    """The content of a claim's note: the run that writes to a store.

    Attributes:
        namespace: an id of the driver's container, since process ids are unique only within it.
        started: the start time of the process in kernel ticks; None without /proc.
        since: the start of the run, by the clock of its host.
        seconds: the time from the start to the last beat.
        checked: whether the run has finished its check for other writers (skipped by ``join``).
        beat: the number of times that the note was written.
        progress: the counts of the run (``Progress``), once its workers run.
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


_OPEN: set[str] = set()  # the run ids of this process's open claims


class Claim:
    """A note in a store that this run writes to it; a thread renews it while the ``with`` block lasts."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        notify: Callable[[str], object],
        *,
        join: bool = False,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """Prepare the note; nothing is written before the ``with`` block.

        Args:
            notify: gets a line if entering has to wait for another run's sign of life.
            join: whether to write beside other runs without checking for them.
            heartbeat_s: the interval at which the note is renewed.
        """
        self._store = store
        self._beating = store.with_short_timeouts()
        self._notify = notify
        self._join = join
        self._heartbeat_s = heartbeat_s
        self._name = f"{RUNS}/{run_id}{NOTE}"
        self._me: ClaimNote = {
            "run_id": run_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "namespace": _read_namespace(),
            "started": _read_start_ticks(os.getpid()),
            "since": format_now(),
            "checked": False,
            "beat": 0,
        }
        self._began = time.monotonic()
        self._end_event = threading.Event()
        self._heart = threading.Thread(target=self._live, name="claim", daemon=True)

    def __enter__(self) -> Claim:
        """Write the note, check for other runs unless ``join``, and start the thread that renews the note.

        The check waits for a sign of life of a run that may be alive, up to MAX_MISSED_BEATS intervals per note, and
        deletes the notes of runs that have ended. If it fails, this run's note is deleted.

        Raises:
            CacheLocked: another run writes to the store, and ``join`` is False.
            UsageError: nothing can be written to the store, or one of its folders is a symbolic link.
        """
        refuse_links(self._store)
        _OPEN.add(self._me["run_id"])
        try:
            self._beat(self._store)
        except OSError as error:
            _OPEN.discard(self._me["run_id"])
            raise UsageError(f"{self._store}: nothing can be written here: {error.strerror or error}") from error
        try:
            if not self._join:
                for name, holder in _iter_notes(self._store):
                    self._refuse(name, holder)
            self._me["checked"] = True
            self._beat(self._store)
        except BaseException as error:
            self._release_before(error)
            raise
        self._heart.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop the thread, waiting up to one interval for its last beat, and delete the note.

        An OSError is not raised: the note goes stale, and an ``error`` that leaves the block gets a note that says so.
        """
        self._end_event.set()
        if error is not None:
            self._release_before(error)
            return
        with suppress(OSError):  # the note goes stale instead
            self._leave()

    def set_progress(self, progress: Progress) -> None:
        """Set the counts that the next beat writes into the note."""
        self._me["progress"] = asdict(progress)

    def _release_before(self, error: BaseException) -> None:
        """Delete this run's note as a last write before ``error`` leaves; a failure is only noted on ``error``."""
        if why := write_last(error, self._leave):
            stale_s = MAX_MISSED_BEATS * self._heartbeat_s
            error.add_note(
                f"the note of this run was not deleted: {why}. A run that starts on another machine within "
                f"{stale_s:g} s waits that long at most"
            )

    def _leave(self) -> None:
        """Wait up to one interval for the last beat, then delete this run's note."""
        _OPEN.discard(self._me["run_id"])
        if self._heart.ident is not None:
            self._heart.join(self._heartbeat_s)
        self._store.delete(self._name)

    def _beat(self, store: Store) -> None:
        """Write this run's note again, with the next beat number and the seconds so far."""
        self._me["beat"] += 1
        self._me["seconds"] = time.monotonic() - self._began
        store.put(self._name, json.dumps(self._me).encode())

    def _live(self) -> None:
        """Renew the note at intervals until the claim ends, ignoring OSErrors. Runs in a thread."""
        while not self._end_event.wait(self._heartbeat_s):
            with suppress(OSError):
                self._beat(self._beating)

    def _refuse(self, name: str, holder: ClaimNote) -> None:
        """Raise CacheLocked if the run of a note is alive; if it has ended, delete the note, ignoring an OSError.

        This may wait for a beat of the other run. This run's own note passes, as does a run that has not finished its
        check and has a larger id: of two runs that start at once, only the one with the smaller id continues.
        """
        if holder.get("run_id") == self._me["run_id"]:
            return
        # Both runs have just started and see each other's notes: the run with the smaller id continues.
        if not holder.get("checked") and holder.get("run_id", "") > self._me["run_id"]:
            return
        if _is_running_here(holder) is not False and self._is_alive(name, holder):
            raise CacheLocked(
                f"{self._store}: another run writes here: {describe_holder(holder)}; --join allows concurrent runs"
            )
        with suppress(OSError):
            self._store.delete(name)

    def _is_alive(self, name: str, holder: ClaimNote) -> bool:
        """Return True if another run is alive: its process runs here and its note is fresh, or a new beat arrives.

        A note is fresh if it is less than MAX_MISSED_BEATS intervals older than this run's own, which is renewed
        meanwhile. The wait for a beat ends when the note is no longer fresh or is gone, but if the process runs here,
        after MAX_MISSED_BEATS intervals from now. ``notify`` is called once.
        """
        limit = timedelta(seconds=MAX_MISSED_BEATS * self._heartbeat_s)
        has_notified = False
        # A running process with an old note may have been suspended, or a clock has jumped: its next beat decides.
        runs_here = _is_running_here(holder)
        until = time.monotonic() + limit.total_seconds()
        while (silent := _find_age(self._store, name, self._name)) is not None and (runs_here or silent < limit):
            if runs_here and silent < limit:
                return True
            if not has_notified and (has_notified := True):
                wait = (limit if runs_here else min(limit, limit - silent)).total_seconds()
                self._notify(
                    f"{self._store} has a note of {describe_holder(holder)}; waiting {wait:.0f} s for a sign of life"
                )
            if time.monotonic() > until:
                return False
            time.sleep(min(1.0, self._heartbeat_s / 4))
            with suppress(OSError):
                self._beat(self._beating)
            note = _read_note(self._store, name)
            if note is None:
                return False
            if note.get("beat") != holder.get("beat"):
                return True
        return False


def refuse_links(store: Store) -> None:
    """Raise UsageError if a folder of the store that commands write to and delete from is a symbolic link.

    The root itself may be a link. Object stores pass.
    """
    root = store.folder
    folder = next((folder for folder in _FOLDERS if root is not None and (root / folder).is_symlink()), None)
    if folder is not None:
        raise UsageError(
            f"{store}/{folder} is a symbolic link, so files elsewhere would be written and deleted: put the folder "
            "itself there, or link the whole place"
        )


def find_holder(store: Store) -> ClaimNote | None:
    """Return the note of the first run that seems to write to ``store``, or None. Runs of this process count.

    A run counts if its process is alive in this container, or if that cannot be checked and its note is younger than
    MAX_MISSED_BEATS default intervals. Nothing is waited for or deleted.
    """
    for name, holder in _iter_notes(store):
        runs_here = _is_running_here(holder)
        if runs_here is not False:
            with suppress(FileNotFoundError):
                if runs_here or store.compute_age(name) < timedelta(seconds=MAX_MISSED_BEATS * HEARTBEAT_S):
                    return holder
    return None


def describe_holder(holder: ClaimNote) -> str:
    """Return the host, process id, run id and start of a run as JSON text."""
    return json.dumps({name: holder.get(name) for name in ("host", "pid", "run_id", "since")})


def _iter_notes(store: Store) -> Iterator[tuple[str, ClaimNote]]:
    """Yield the name and content of each claim's note in a store, including the caller's own."""
    for name in store.names(RUNS, NOTE):
        note = _read_note(store, name)
        if note is not None:
            yield name, note


def _read_note(store: Store, name: str) -> ClaimNote | None:
    """Return the content of a note; None if it was deleted. A damaged note gives only the ``run_id`` from its name."""
    try:
        content = json.loads(store.read(name))
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    return cast(ClaimNote, content) if isinstance(content, dict) else {"run_id": PurePosixPath(name).stem}


def _find_age(store: Store, name: str, own_name: str) -> timedelta | None:
    """Return how much older a note is than this run's own, by the store's clock; None if one is gone."""
    try:
        return store.compute_age(name) - store.compute_age(own_name)
    except FileNotFoundError:
        return None


def _is_running_here(holder: ClaimNote) -> bool | None:
    """Return whether a run's driver is a running process of this container; None for another one, or without /proc.

    A run of this process counts as running until its claim has ended. A process with the same id and another start time
    is not the driver.
    """
    namespace = _read_namespace()
    if not namespace or (holder.get("host"), holder.get("namespace")) != (socket.gethostname(), namespace):
        return None
    if holder["pid"] == os.getpid():
        return holder["run_id"] in _OPEN
    return _read_start_ticks(int(holder["pid"])) == holder.get("started")


def _read_namespace() -> str:
    """Return an id of this process's container: the boot and the PID namespace; "" without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _read_start_ticks(pid: int) -> str | None:
    """Return a process's start time in kernel ticks; None if it has ended, is a zombie, or there is no /proc."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if facts[0] in "ZX" else facts[19]  # a zombie has ended, but its exit status was not read
