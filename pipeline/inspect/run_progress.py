"""How far the newest run of a cache has come, counted from its videos table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from pipeline.cache.ledger import Ledger
from pipeline.errors import CorruptShard
from pipeline.execution.claim import Holder, holder
from pipeline.execution.monitoring.load import Progress
from pipeline.execution.run_record import RUNS, RunRecord, now
from pipeline.storage.stores import Store


@dataclass(frozen=True)
class RunProgress:
    """The progress of a cache's latest run, counted from its videos table.

    Attributes:
        run_id: it names runs/<run_id>.json.
        status: starting, finished, failed, cancelled, running, or "gone": it was running, and is not any more.
        host: where its driver runs or ran.
        pid: of the driver.
        n_videos: what it set out to do.
        n_done: videos with a row by it.
        n_failed: those of them that failed.
        seconds: since it started, or what it took.
        error: what ended it, if something did.
        now: the numbers of its workers in its note, where it is running.
    """

    run_id: str
    status: str
    host: str
    pid: int
    n_videos: int
    n_done: int
    n_failed: int
    seconds: float
    error: str | None
    now: Progress | None = None

    def describe(self) -> str:
        """Describe the run's progress in one line."""
        done = f"{self.n_done} of {self.n_videos} videos, {self.n_failed} failed"
        rate = self.n_done / max(self.seconds, 1.0)
        where = f"{self.run_id} on {self.host} (pid {self.pid})"
        if self.status == "running":
            left = f"{(self.n_videos - self.n_done) / rate:.0f} s left" if self.n_done else "no estimate yet"
            return f"{where} running for {self.seconds:.0f} s: {done}, {rate:.2f} videos/s, {left}"
        if self.status == "starting":
            return f"{where} is starting"
        if self.status == "gone":
            return f"{where} ended without a final record: {done}; the same command goes on from there"
        why = f": {self.error}" if self.error else ""
        return f"{where} {self.status} after {self.seconds:.0f} s: {done}{why}"


def latest_run(store: Store, ledger: Ledger) -> RunProgress | None:
    """Return the progress of the run that is writing to the cache, else of the newest; None without any run."""
    names, now_at_work = store.names(RUNS, ".json"), holder(store)
    if now_at_work:
        own = f"{RUNS}/{now_at_work['run_id']}.json"
        if own not in names:
            return _starting(now_at_work)
        names = [own]
    for name in reversed(names):  # a run_id begins with its time
        try:
            record = json.loads(store.read(name))
            if "videos" in record or "status" not in record:  # jobs.remove and its like leave records of no progress
                return _progress(ledger, record, now_at_work)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptShard(f"{store}/{name}: it is no record of a run; remove it") from error
    return None


def _starting(note: Holder) -> RunProgress:
    """Return the progress of a run that has made its note and no record yet."""
    where, counts = (note["run_id"], "starting", note["host"], note["pid"]), (0, 0, 0)
    return RunProgress(*where, *counts, seconds=0.0, error=None)


def _progress(ledger: Ledger, record: RunRecord, now_at_work: Holder | None) -> RunProgress:
    """Return the progress of a run from its record."""
    n_done, n_failed = ledger.of_run(record["run_id"])
    status = record["status"]
    if status == "running" and not now_at_work:
        status = "gone"
    until = datetime.fromisoformat(record.get("ended") or now())
    return RunProgress(
        run_id=record["run_id"],
        status=status,
        host=record["host"],
        pid=record["pid"],
        n_videos=record["videos"],
        n_done=n_done,
        n_failed=n_failed,
        seconds=(until - datetime.fromisoformat(record["started"])).total_seconds(),
        error=record.get("error"),
        now=_progress_in(now_at_work) if now_at_work else None,
    )


def _progress_in(note: Holder) -> Progress | None:
    """Return the numbers in a run's note; None where it has none, or those of another version of this program."""
    try:
        return Progress(**note["progress"])  # type: ignore[arg-type]  # what it lacks or has too many raises
    except (KeyError, TypeError):
        return None
