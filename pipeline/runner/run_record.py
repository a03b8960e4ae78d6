"""The record of a run, ``runs/<run_id>.json``, and the outcome of a run: its counts, failures and exit code."""

from __future__ import annotations

import io
import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cache.schema import TOKENS
from pipeline.cache.token_shard import parse_run_id, parse_shard_id
from pipeline.console import CleanConsole
from pipeline.errors import BUGS, Fault, UsageError, make_printable
from pipeline.rows import Json, JsonObject
from pipeline.storage.stores import Store

RUNS = "runs"
COMMITTED_KEY = "token_shards"  # key of a record: the ids of the run's committed token shards
#: Seconds that all last writes of a run share when it ends early: schedulers send SIGKILL after half a minute.
LAST_WRITES_S = 15.0
NO_ANSWER = f"no answer within {LAST_WRITES_S:g} s"


class RunRecord(TypedDict, total=False):
    """The fields of a run's record that are read. Records of other versions may lack some; nothing depends on them.

    Attributes:
        decoding_rules: the version of the rules that make frames of files; missing before version 2.
        config: all options of the run, including defaults.
        videos: the number of videos to process.
        estimated: whether ``videos`` is an estimate, because not all archives are indexed yet.
        ended_by: the time limit that ended the run, if any.
        token_shards: the ids of the run's committed token shards.
        parity: how the model was shown to give the same answers from cached tokens; absent for families that need no
            such check.
    """

    run_id: str
    host: str
    pid: int
    versions: dict[str, str | None]
    decoding_rules: int
    config: JsonObject
    videos: int
    estimated: bool
    status: str
    started: str
    ended: str
    error: str | None
    ended_by: str
    token_shards: list[str]
    parity: JsonObject


class RunFile:
    """The file of a run's record, written on entering the ``with`` block ("running") and on leaving it."""

    def __init__(self, store: Store, record: JsonObject) -> None:
        self._store = store
        self._record: dict[str, Json] = {**record, "started": format_now()}

    def __enter__(self) -> RunFile:
        self.save(status="running")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        """Write how the run ended: "finished", "cancelled" or "failed", with the time and any error.

        If an error ended the run, a write that fails or takes too long (``write_last``) only adds a note to that error.

        Raises:
            OSError: the store failed at the end of a finished run.
        """
        status = name_ending(kind)
        if value is None:
            self.save(status=status, ended=format_now(), error=None)
        else:  # an unreachable store must not hide the error that ended the run
            save = partial(self.save, status=status, ended=format_now(), error=make_printable(str(value)))
            if why := write_last(value, save):
                value.add_note(f"the record of this run still says 'running': {why}")

    def note(self, **news: Json) -> None:
        """Add or replace fields of the record in memory; the next ``save`` writes them."""
        self._record |= news

    def save(self, **news: Json) -> None:
        """Add or replace fields of the record, and write it to the store."""
        self.note(**news)
        self._store.put(f"{RUNS}/{self._record['run_id']}.json", json.dumps(self._record, indent=2).encode())


def compute_seconds_left(ending: BaseException) -> float:
    """Return the seconds left for the last writes of ``ending``, at least 0.

    The first call for an error starts its clock of LAST_WRITES_S.
    """
    until: float = vars(ending).setdefault("last_writes_until", time.monotonic() + LAST_WRITES_S)
    return max(0.0, until - time.monotonic())


def write_last(ending: BaseException, write: Callable[[], object], spare_s: float = 0.0) -> str:
    """Call ``write`` in a thread as one of the last writes before ``ending`` leaves a run, and wait for it.

    All last writes for ``ending`` share LAST_WRITES_S seconds; ``spare_s`` of these are kept for later writes. A write
    that takes longer is left behind in its thread, and may still be done late. Nothing is raised.

    Returns:
        "" if the write succeeded, otherwise why it failed: its error or NO_ANSWER.
    """
    failures: list[str] = []

    def run() -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001 - it must not hide what ended the run
            failures.append(make_printable(str(error)) or type(error).__name__)

    thread = threading.Thread(target=run, name="last-write", daemon=True)
    left_s = max(0.0, compute_seconds_left(ending) - spare_s)
    thread.start()
    thread.join(left_s)
    return NO_ANSWER if thread.is_alive() else "".join(failures)


def name_ending(kind: type[BaseException] | None) -> str:
    """Return "finished" for None, "cancelled" for KeyboardInterrupt, and "failed" for any other exception class."""
    return "finished" if kind is None else "cancelled" if issubclass(kind, KeyboardInterrupt) else "failed"


def read_record(store: Store, name: str) -> RunRecord:
    """Return the record in the file ``name``; {} if it is missing, unreadable or malformed."""
    try:
        record = json.loads(store.read(name))
    except (OSError, ValueError, RecursionError):
        return {}
    is_usable = (
        isinstance(record, dict)
        and isinstance(record.get("versions", {}), dict)
        and isinstance(record.get(COMMITTED_KEY, []), list)
    )
    usable_record: RunRecord = record if is_usable else {}
    return usable_record


def find_newest_record(store: Store) -> RunRecord | None:
    """Return the newest record that contains its run's options (``config``); None if there is none."""
    for name in reversed(store.names(RUNS, ".json")):  # a run_id begins with its time
        record = read_record(store, name)
        if isinstance(record.get("config"), dict):
            return record
    return None


def read_committed(store: Store, run_id: str) -> frozenset[str] | None:
    """Return the ids of the token shards that a run recorded as committed; None without a readable record."""
    record = read_record(store, f"{RUNS}/{run_id}.json")
    return frozenset(map(str, record.get("token_shards", []))) if record else None


def list_committed_shards(store: Store) -> list[str]:
    """Return the names of the token shard files that the records of their runs list as committed.

    Call it before reading rows, so that shards committed meanwhile are not mistaken for lost.
    """
    names = store.names(TOKENS, ".parquet")
    ids = {run_id: read_committed(store, run_id) or frozenset() for run_id in {parse_run_id(name) for name in names}}
    return [name for name in names if parse_shard_id(name) in ids[parse_run_id(name)]]


def format_now() -> str:
    """Return the current time as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def make_run_id() -> str:
    """Return a new run id, which starts with the time in milliseconds, so that names sort by time."""
    now = datetime.now(UTC)
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03}Z-{secrets.token_hex(3)}"


def check_out_folder(store: Store) -> None:
    """Raise UsageError if ``--out`` is a relative path in a Ray job's working directory, which Ray deletes."""
    if store.folder is not None and not Path(str(store)).is_absolute():
        job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
        if job.get("runtime_env", {}).get("working_dir"):  # this process runs in an uploaded folder
            raise UsageError(
                f"--out {store}: in this Ray job a relative path lies in the cluster's copy of --working-dir, lost "
                "with it: name an absolute path that every node sees"
            )


_RUN_FIELDS = frozenset({"n_missing", "n_waiting", "n_new", "n_new_failed", "wall_s", "log"})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run, or the summary of a cache or of answers: counts of items, and failures by class.

    Attributes:
        n_ok: items (videos or questions) with a result.
        failures: error class -> number of items.
        examples: error class -> (id, message) of one such item.
        n_missing: items without a row.
        n_outside: failures by infrastructure errors, such as a mount, a store, a bug, or a GPU full of other work.
        n_waiting: items that ``--limit`` or ``--max-hours`` left for another run; they are in no other count.
        n_new: items that this run processed.
        n_new_failed: failed items among ``n_new``; a failed redo keeps the earlier result.
        wall_s: seconds; None for a summary.
        out: the location of the results; "" for a summary.
        log: the crash log; "" if no worker crashed.
        failed: id -> error class of the failed items; for videos only if a caller from Python requests it.
    """

    n_ok: int
    failures: dict[str, int]
    examples: dict[str, tuple[str, str]]
    n_missing: int
    n_outside: int = 0
    n_waiting: int = 0
    n_new: int = 0
    n_new_failed: int = 0
    wall_s: float | None = None
    out: str = ""
    log: str = ""
    failed: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def n_failed(self) -> int:
        """The number of failed items."""
        return sum(self.failures.values())

    def exit_code(self, failure_limit: int, infrastructure_limit: int | None = None) -> int:
        """Return 0 if every item has a row, one is ok, none failed by a bug, and failures are within limits; else 1.

        Args:
            failure_limit: the maximum number of failed items, both in total and in this run.
            infrastructure_limit: the maximum number of infrastructure errors; None for no limit.
        """
        bad = (
            self.n_missing
            or not self.n_ok
            or BUGS & self.failures.keys()
            or max(self.n_failed, self.n_new_failed) > failure_limit
            or (infrastructure_limit is not None and self.n_outside > infrastructure_limit)
        )
        return 1 if bad else 0

    def iter_troubles(self, item: str, n_items: int) -> Iterator[str]:
        """Yield texts for the troubles of a run of ``n_items`` items: failed items, missing rows, no result at all.

        Without failures, the failed redos of this run are named instead. An exceeded infrastructure limit is not named.
        """
        if self.failures:
            example, message = next(iter(self.examples.values()))
            classes = ", ".join(f"{count} {name}" for name, count in self.failures.items())
            yield f"{self.n_failed} of {n_items} {item}s failed ({classes}), e.g. {example}: {message}"
        elif self.n_new_failed:
            yield f"{self.n_new_failed} {item}s failed in this run, which keep earlier results"
        if self.n_missing:
            yield f"{self.n_missing} of {n_items} {item}s have no row"
        if not self.n_ok:
            yield f"no {item} has a result"

    def as_record(self) -> JsonObject:
        """Return the counts, failures and examples as a JSON-serializable dict, without ``out`` and ``failed``."""
        fields = {name: value for name, value in vars(self).items() if name not in ("out", "failed")}
        return {**fields, "n_failed": self.n_failed}

    def standing(self) -> JsonObject:
        """Return the fields of ``as_record`` without those about this run."""
        return {name: value for name, value in self.as_record().items() if name not in _RUN_FIELDS}

    def pace(self, item: str) -> str:
        """Return a sentence with the number of this run's items, the failures, time, rate, and crash log if any.

        If the run processed no items, it says that every item has a row, or that none was done.
        """
        if not self.n_new and self.n_waiting:
            return f"no {item} was done before the run ended"
        if not self.n_new:
            return f"nothing to do: every {item} has a row already"
        failed = f" ({self.n_new_failed} failed)" if self.n_new_failed else ""
        rate = self.n_new / self.wall_s if self.wall_s else 0.0
        log = f"; the last lines of crashed workers are in {self.log}" if self.log else ""
        return f"{self.n_new} {item}s{failed} in {self.wall_s or 0.0:.1f} s, {rate:.2f} {item}s/s{log}"

    def make_failures_table(self, item: str, faults: Mapping[Any, Fault]) -> Table:
        """Return a Rich table of the failures by class, with an example and, if ``faults`` has it, a remedy of each."""
        table = Table(title=f"failed {item}s (--retry-failed tries them again)", title_justify="left", show_edge=False)
        for name in ("class", f"{item}s", "example", "remedy"):
            table.add_column(name, overflow="fold", justify="right" if name == f"{item}s" else "left")
        for name, count in self.failures.items():
            example, message = self.examples[name]
            remedy = faults[name].remedy if name in faults else ""
            table.add_row(Text(name), str(count), Text(f"{example}: {message}"), Text(remedy))
        return table


def as_text(renderable: RenderableType) -> str:
    """Render a Rich object as plain text of at most 120 columns, without trailing spaces."""
    console = CleanConsole(file=io.StringIO(), width=120, force_jupyter=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))


def count_failures(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[dict[str, int], dict[str, tuple[str, str]]]:
    """Return the ``failures`` (most common class first) and ``examples`` (first row of each class) of an Outcome."""
    failures = dict(Counter(row["error_class"] for row in rows).most_common())
    return failures, {row["error_class"]: (row[key], row["error_message"]) for row in reversed(rows)}
