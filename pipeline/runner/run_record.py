"""The record of a run, ``runs/<run_id>.json``: its provenance and progress, which nothing is compared with."""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import TypedDict

from pipeline.cache.schema import TOKENS
from pipeline.cache.token_shard import run_of, token_shard_id
from pipeline.errors import printable
from pipeline.rows import Json, JsonObject
from pipeline.storage.stores import Store

RUNS = "runs"
COMMITTED = "token_shards"  # key of a record: the ids of the token shards that the rows of the run name


class RunRecord(TypedDict, total=False):
    """The fields of a run's record that are read. Older and newer records may lack some; nothing depends on it.

    Attributes:
        versions: of packages, by name.
        config: the run's options, those at their default too.
        videos: how many it set out to do.
        error: what ended it, if something did.
    """

    run_id: str
    host: str
    pid: int
    versions: dict[str, str | None]
    config: JsonObject
    videos: int
    status: str
    started: str
    ended: str
    error: str | None


class RunFile:
    """The file of a run's record, written when the run starts and again when it ends, however it ends."""

    def __init__(self, store: Store, record: JsonObject) -> None:
        self._store = store
        self._record: dict[str, Json] = {**record, "started": now()}

    def __enter__(self) -> None:
        self.save(status="running")

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        status = "finished" if kind is None else "cancelled" if issubclass(kind, KeyboardInterrupt) else "failed"
        # An unreachable store must not hide the error that ended the run.
        with suppress(OSError) if kind is not None else nullcontext():
            self.save(status=status, ended=now(), error=None if value is None else printable(str(value)))

    def note(self, **news: Json) -> None:
        """Add facts that are written with the record's next save."""
        self._record |= news

    def save(self, **news: Json) -> None:
        """Write the record, with these facts added."""
        self.note(**news)
        self._store.put(f"{RUNS}/{self._record['run_id']}.json", json.dumps(self._record, indent=2).encode())


def read_record(store: Store, name: str) -> RunRecord:
    """Read the record in a file of a run; {} where it is missing or unreadable, since it is provenance only."""
    try:
        record = json.loads(store.read(name))
    except (OSError, ValueError):
        return {}
    usable = isinstance(record, dict) and isinstance(record.get("versions", {}), dict)
    found: RunRecord = record if usable else {}
    return found


def newest_record(store: Store) -> RunRecord | None:
    """Read the newest record that says its run's options; None where none does."""
    for name in reversed(store.names(RUNS, ".json")):  # a run_id begins with its time
        record = read_record(store, name)
        if isinstance(record.get("config"), dict):
            return record
    return None


def committed_by(store: Store, run_id: str) -> frozenset[str] | None:
    """Return the ids of the token shards that a run recorded as committed; None where its record cannot be read."""
    try:
        return frozenset(map(str, json.loads(store.read(f"{RUNS}/{run_id}.json")).get(COMMITTED, [])))
    except (OSError, ValueError, AttributeError):
        return None


def committed_shards(store: Store) -> list[str]:
    """List the token shards whose rows the records of runs say were committed. Raises OSError.

    Lists before rows are read, so that what is committed meanwhile does not pass for lost.
    """
    names = store.names(TOKENS, ".parquet")
    ids = {run_id: committed_by(store, run_id) or frozenset() for run_id in {run_of(name) for name in names}}
    return [name for name in names if token_shard_id(name) in ids[run_of(name)]]


def now() -> str:
    """Return the time as records hold it: ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
