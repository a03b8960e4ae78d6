"""The progress of a cache's latest run, read from the cache alone."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.cache.header import HEADER, compute_fingerprint
from pipeline.cache.live import Ledger
from pipeline.cache.reader import TokenCache
from pipeline.console import clean_line
from pipeline.errors import CorruptShard, NotACache
from pipeline.runner.claim import ClaimNote, describe_holder, find_holder
from pipeline.runner.progress import Progress
from pipeline.runner.run_record import RUNS, RunRecord, format_now
from pipeline.storage.stores import Store

# Seconds between two looks at a folder, and at an object store, where a look costs requests.
_LOCAL_S, _STORE_S = 2.0, 10.0
_RECENT_S = 60.0  # seconds over which the rate is measured


@dataclass(frozen=True)
class RunProgress:
    """The progress of a cache's latest run, counted from its videos table.

    Attributes:
        status: "starting", "running", "finished", "failed", "cancelled", or "gone" if the run ended without a final
            record.
        host, pid: the host and process id of the run's driver.
        n_videos: the number of videos to process; too low or too high if ``estimated``.
        estimated: True while not all archives are indexed yet.
        n_done: the number of live rows that the run wrote.
        n_failed: the number of failed rows among them.
        seconds: wall seconds since the run started, or the total of an ended run.
        error: the error or the limit of hours that ended the run; None without one.
        now: the latest numbers of its workers; None unless the run is active and has reported them.
    """

    run_id: str
    status: str
    host: str
    pid: int
    n_videos: int = 0
    estimated: bool = False
    n_done: int = 0
    n_failed: int = 0
    seconds: float = 0.0
    error: str | None = None
    now: Progress | None = None

    def estimate_left_s(self, rate: float) -> float | None:
        """Estimate the remaining seconds; None if the rate is 0, or more videos are done than estimated."""
        return (self.n_videos - self.n_done) / rate if rate > 0 and self.n_done <= self.n_videos else None

    def describe(self) -> str:
        """Describe the run in one line: id, host, status and counts, with the error of an ended run.

        While it runs, also the average rate since its start and the time left.
        """
        about = "about " if self.estimated else ""
        counts = f"{self.n_done} of {about}{self.n_videos} videos, {self.n_failed} failed"
        rate = self.n_done / max(self.seconds, 1.0)
        where = f"{self.run_id} on {self.host} (pid {self.pid})"
        if self.status == "running":
            left_s = self.estimate_left_s(rate)
            time_left = "no estimate yet" if left_s is None else f"{left_s:.0f} s left"
            return f"{where} running for {self.seconds:.0f} s: {counts}, {rate:.2f} videos/s, {time_left}"
        if self.status == "starting":
            return f"{where} is starting"
        if self.status == "gone":
            return f"{where} ended without a final record: {counts}. Rerun its command to resume"
        why = f": {self.error}" if self.error else ""
        return f"{where} {self.status} after {self.seconds:.0f} s: {counts}{why}"


def find_latest_run(store: Store, ledger: Ledger) -> RunProgress | None:
    """Return the progress of the run that is writing to the cache, otherwise of the newest run; None without one.

    A writing run without a record yet is "starting". Commands that record no progress, such as jobs.remove, are
    skipped; while one of them is writing, the result is None.

    Raises:
        CorruptShard: the record of the run is damaged.
    """
    names = store.names(RUNS, ".json")
    note = find_holder(store)
    if note:
        record_name = f"{RUNS}/{note['run_id']}.json"
        if record_name not in names:
            return RunProgress(note["run_id"], "starting", note.get("host", "?"), note.get("pid", 0))  # if damaged
        names = [record_name]
    for name in reversed(names):  # a run_id begins with its time
        try:
            record = json.loads(store.read(name))
            if "videos" in record or "status" not in record:  # jobs.remove and similar commands record no progress
                return _make_run_progress(ledger, record, note)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptShard(f"{store}/{name}: not a record of a run; remove it") from error
    return None


def _make_run_progress(ledger: Ledger, record: RunRecord, note: ClaimNote | None) -> RunProgress:
    """Make the progress of a run from its rows, its record, and its note while it writes.

    A damaged record raises KeyError, TypeError or ValueError.

    Args:
        note: the note of the writing run; None if no run is writing, which turns the status "running" into "gone".
    """
    n_done, n_failed = ledger.count_run_rows(record["run_id"])
    status = "gone" if record["status"] == "running" and not note else record["status"]
    until = datetime.fromisoformat(record.get("ended") or format_now())
    if status == "running" and note and "seconds" in note:  # by the clock of the run's host
        until = datetime.fromisoformat(note["since"]) + timedelta(seconds=note["seconds"])
    seconds = (until - datetime.fromisoformat(record["started"])).total_seconds()
    try:
        workers = Progress(**note["progress"]) if note else None  # type: ignore[arg-type]  # a missing number raises TypeError
    except (KeyError, TypeError):
        workers = None  # the note has no numbers, or those of another version of this program
    return RunProgress(
        run_id=record["run_id"],
        status=status,
        host=record["host"],
        pid=record["pid"],
        n_videos=record["videos"],
        estimated=record.get("estimated", False),
        n_done=n_done,
        n_failed=n_failed,
        seconds=max(0.0, seconds),
        error=record.get("error") or record.get("ended_by"),
        now=workers,
    )


def wait_for_cache(store: Store, say: Callable[[str], object], every_s: float = _LOCAL_S) -> None:
    """Wait until a run that was just started has begun its cache.

    Returns at once if there is a cache, or any other file. There is no time limit until a run appears.

    ``say`` receives a line once if the call waits.

    Raises:
        NotACache: the run ended without a cache.
    """
    last_note = None
    is_announced = False
    while not (store.exists(HEADER) or store.has_other_files()):
        note = find_holder(store)
        if last_note is not None and note is None and not store.exists(HEADER):
            raise NotACache(
                f"{store}: {describe_holder(last_note)} ended before it began the cache; its own log says why"
            )
        if not is_announced:
            say(f"no cache at {store} yet. Waiting for a run to begin one; Ctrl-C ends that")
        last_note, is_announced = note or last_note, True
        time.sleep(every_s)


def watch(cache: TokenCache, console: Console, every_s: float | None = None) -> RunProgress | None:
    """Show the run that writes to a cache, otherwise its newest run, until it ends; return its last state.

    On a terminal the display is updated in place; elsewhere each look prints a line. Returns None without a run.

    Args:
        every_s: seconds between looks; None for 2 s for a folder on a terminal, 10 s for a store or a log.

    Raises:
        CorruptShard: a record or a file of the table is damaged.
    """
    run = None
    is_terminal = console.is_terminal
    every_s = every_s or (_LOCAL_S if is_terminal and cache.store.folder is not None else _STORE_S)
    with Live(console=console, auto_refresh=False) if is_terminal else nullcontext() as live:
        for run, rate in iter_run_progress(cache.store, compute_fingerprint(cache.identity), every_s):
            if live is not None:
                live.update(_render(run, rate), refresh=True)
                continue
            words = [run.describe()]
            if run.status == "running":
                words += [f"{rate:.2f} videos/s recently", "" if run.now is None else run.now.load]
            console.print(", ".join(filter(None, words)), highlight=False, markup=False, soft_wrap=True)
    return run


def iter_run_progress(store: Store, made_with: str, every_s: float) -> Iterator[tuple[RunProgress, float]]:
    """Yield (latest run, videos per second) every ``every_s`` seconds until the run has ended.

    The rate is that of the last minute; at the first look it is the average since the run's start. Nothing is yielded
    without a run.
    """
    ledger = Ledger(store, made_with)
    recent = deque[tuple[float, int]]()
    while (run := find_latest_run(store, ledger.refresh())) is not None:
        at = time.monotonic()
        recent.append((at, run.n_done))
        while at - recent[0][0] > _RECENT_S and len(recent) > 2:
            recent.popleft()
        since, before = recent[0]
        yield run, (run.n_done - before) / (at - since) if at > since else run.n_done / max(run.seconds, 1.0)
        if run.status not in ("starting", "running"):
            return
        time.sleep(every_s)


def _render(run: RunProgress, rate: float) -> RenderableType:
    """Render a run: progress bar, time left at ``rate`` videos per second, load of stages."""
    lines: list[RenderableType] = [Text(clean_line(run.describe()))]
    if run.status == "running":
        left_s = run.estimate_left_s(rate)
        time_left = "" if left_s is None else f", {left_s:.0f} s left"
        lines += [
            ProgressBar(max(1, run.n_videos), run.n_done, width=60),
            Text(f"{rate:.2f} videos/s recently{time_left}"),
        ]
    if run.status == "running" and run.now is not None:
        table = Table("stage", "to do", "busy", "", show_edge=False)
        for stage, waiting in run.now.waiting.items():
            busy = f"{run.now.busy[stage]:.0%}" if stage in run.now.busy else "-"
            table.add_row(Text(stage), str(waiting), busy, "the bottleneck" if stage == run.now.bottleneck else "")
        lines.append(table)
        if run.now.bottleneck not in {"", *run.now.waiting}:
            lines.append(Text(f"bottleneck: {run.now.bottleneck}"))
    return Group(*lines)
