"""The record of a run, ``runs/<run_id>.json``: its provenance and progress, which nothing is compared with."""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from pipeline.cache.live_rows import TOKENS
from pipeline.cache.writer import run_of, token_shard_id
from pipeline.errors import printable
from pipeline.storage.stores import Store

RUNS = "runs"
COMMITTED = "token_shards"  # key of a record: the ids of the token shards that the rows of the run name
#: A JSON object. Records of older and newer runs may have other keys, and nothing depends on them.
RunRecord = dict[str, Any]


class RunFile:
    """The file of a run's record, written when the run starts and again when it ends, however it ends."""

    def __init__(self, store: Store, record: RunRecord) -> None:
        self._store = store
        self._record = record | {"started": now()}

    def __enter__(self) -> None:
        self.save(status="running")

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        status = "finished" if kind is None else "cancelled" if issubclass(kind, KeyboardInterrupt) else "failed"
        # An unreachable store must not hide the error that ended the run.
        with suppress(OSError) if kind is not None else nullcontext():
            self.save(status=status, ended=now(), error=None if value is None else printable(str(value)))

    def note(self, **news: object) -> None:
        """Add facts that are written with the record's next save."""
        self._record |= news

    def save(self, **news: object) -> None:
        """Write the record, with these facts added."""
        self.note(**news)
        self._store.put(f"{RUNS}/{self._record['run_id']}.json", json.dumps(self._record, indent=2).encode())


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
