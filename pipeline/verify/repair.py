"""``jobs.verify --repair``: what is damaged is marked for another attempt, and what is sound beside it stays.

- Videos whose tokens or whose row cannot be trusted get a failed row, so that ``jobs.prune --retry-failed`` does them
  again.
- Sound videos that lie in a token shard with damaged ones move to a new shard.
- In place of a videos shard that is damaged or lost come failed rows of the videos in the token shards of its run that
  nothing names.
- The index is made anew.

No shard is changed in place. A new videos shard takes the number of the one that it replaces, which is copied to
``repaired/`` first: nothing is lost, and another repair ends what was interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import cast

import pyarrow as pa

from pipeline.cache.header import CacheHeader, fingerprint
from pipeline.cache.index.compaction import compact
from pipeline.cache.index.files import ROOT
from pipeline.cache.live_rows import TOKENS, VIDEOS, VideoRows, read_videos_shard, shard_name
from pipeline.cache.schema import MADE_WITH, VIDEO_SCHEMA, open_parquet, write_parquet
from pipeline.cache.token_shard import TokenShard
from pipeline.cache.writer import put_token_shard
from pipeline.errors import RunFailed, printable
from pipeline.rows import VideoRecord, VideoRow
from pipeline.storage.lock import Lock
from pipeline.storage.stores import Store
from pipeline.verify.judge import OF_TOKENS, Judge, Place, Verdict
from pipeline.verify.report import Marked, Repaired, Report
from pipeline.verify.rows import is_json

KEPT_IN = "repaired"  # the folder of what was replaced
_PENDING = f"{KEPT_IN}/pending.json"  # [old, new] of the videos shard that is being replaced
_KINDS = {*OF_TOKENS, "row", "commit", "lost", "index"}
_KEPT = ("video_id", "run_id", "uri", "start_s", "end_s", "source_size", "source_hash", "attempts", "manifest")


def repairable(report: Report) -> bool:
    """Whether any of the problems is one that a repair knows."""
    return any(problem.kind in _KINDS for problem in report.problems)


def finish_interrupted(store: Store, lock: Lock) -> None:
    """End the replacement of a videos shard in which a repair was interrupted."""
    if not store.exists(_PENDING):
        return
    old, new = json.loads(store.read(_PENDING))
    lock.check()
    if store.exists(new):
        store.delete(old)
    store.delete(_PENDING)


class Repair:
    """One repair of the cache at ``store``, whose ``lock`` is held, of the problems in ``report``."""

    def __init__(self, store: Store, lock: Lock, header: CacheHeader, report: Report) -> None:
        self._store, self._lock, self._report = store, lock, report
        self._made_with = fingerprint(header["identity"])
        self._full = VideoRows(store, keep=64)
        self._done = Repaired(kept_in=KEPT_IN)

    def carry_out(self, judge: Judge, rows: pa.Table) -> Repaired:
        """``rows`` are all that can be read, as ``judge`` has them.

        Raises RunFailed where the lock is lost or nothing would be left, CorruptShard and OSError where the store does
        not give what it gave just before; another repair goes on from there.
        """
        verdict = judge.verdict(p.shard for p in self._report.problems if p.kind in OF_TOKENS and p.shard is not None)
        self._check(verdict)
        for name in verdict.spared:
            self._report.notes.append(f"{name} was damaged at first and sound when it was read again: look at the disk")
        moved = {place: row for name, places in verdict.moving.items() for place, row in self._move(name, places)}
        indexed = self._store.exists(ROOT)
        if indexed:  # it would name shards that are gone
            self._lock.check()
            self._store.delete(ROOT)
        for name in sorted({commit for commit, _ in (*verdict.marked, *moved)}):
            self._rewrite(name, verdict, moved)
        self._replace_lost(rows)
        if indexed:
            self._done.indexed = compact(self._store, self._lock, rebuild=True).shards
        return self._done

    def _check(self, verdict: Verdict) -> None:
        """A folder that is not mounted, or a header of another cache, must not pass for damage of all videos."""
        if verdict.counted and not verdict.left:
            raise RunFailed(
                f"{self._store}: none of its videos would stay: look whether {TOKENS}/ is mounted and cache.json is "
                "its own, restore what is missing, or make the cache anew in another --out"
            )
        if foreign := next((p for p in self._report.problems if p.kind in {"fingerprint", "schema"}), None):
            raise RunFailed(f"{self._store} holds what was not made with its settings: move {foreign.shard} away first")

    def _move(self, name: str, places: Sequence[Place]) -> Iterator[tuple[Place, VideoRow]]:
        """Write the videos of a token shard that are sound to a new one; yields their rows as they are then."""
        rows = [self._full(*place) for place in places]
        if not rows:
            return
        shard = TokenShard(self._store, name, rows[0]["footer_hash"])
        tables = [shard.read_checked(row) for row in rows]
        put_token_shard(self._store, rows[0]["run_id"], cast(list[VideoRecord], rows), tables)
        self._done.moved += len(rows)
        yield from zip(places, rows, strict=True)

    def _rewrite(self, name: str, verdict: Verdict, moved: dict[Place, VideoRow]) -> None:
        """Replace a videos shard by one in which rows are failed, or name other token shards."""
        rows: list[VideoRow] = []
        for number, row in enumerate(self._full.of(name)):
            place = (name, number)
            why = verdict.marked.get(place)
            rows.append(moved.get(place, row) if why is None else _failed(row, why))
            if why is not None and place in verdict.counted:
                self._done.marked.append(Marked(row["video_id"], row["uri"], row["attempts"], why))
        metadata = read_videos_shard(self._store, name, ["video_id"]).schema.metadata or {}
        self._replace(name, rows, metadata.get(MADE_WITH.encode(), b"").decode() or None)

    def _replace(self, name: str, rows: Sequence[VideoRow], made_with: str | None) -> None:
        """Put ``rows`` at the number of a videos shard, of which a copy is kept. Readers see the one or the other."""
        run, number = _numbered(name)
        table = pa.Table.from_pylist(list(rows), schema=VIDEO_SCHEMA)
        data = write_parquet(table if made_with is None else table.replace_schema_metadata({MADE_WITH: made_with}))
        new = shard_name(VIDEOS, run, number, data)
        self._keep(name)
        self._store.put(_PENDING, json.dumps([name, new]).encode())
        self._lock.commit(new, data, {row["token_shard"] for row in rows if row.get("token_shard")})
        self._lock.check()
        self._store.delete(name)
        self._store.delete(_PENDING)
        self._done.replaced.append(name)

    def _keep(self, name: str) -> None:
        """Copy a videos shard, if it is there, to where nobody reads it."""
        self._lock.check()
        if self._store.exists(name):
            self._store.put(f"{KEPT_IN}/{PurePosixPath(name).name}", self._store.read(name))

    def _replace_lost(self, rows: pa.Table) -> None:
        """Give the videos of commits that are damaged or lost failed rows, as far as their token shards are there."""
        lost = sorted(p.shard for p in self._report.problems if p.kind in {"commit", "lost"} and p.shard is not None)
        known = set(rows["video_id"].to_pylist()) if lost else set()
        for name in lost:
            run, number = _numbered(name)
            if number < 0:  # no run called it that: nothing goes to its place
                self._keep(name)
                self._store.delete(name)
                self._done.replaced.append(name)
                continue
            ids = sorted(set(self._ids_of(run)) - known)
            known |= set(ids)
            why = f"its row in {name} was damaged or lost"
            self._replace(name, [_unknown(video_id, run, why) for video_id in ids], self._made_with)
            self._done.marked += [Marked(video_id, "", 1, why) for video_id in ids]

    def _ids_of(self, run: str) -> Iterator[str]:
        """The videos in the token shards of a run that nothing names."""
        for name in (file.name for file in self._report.orphans if file.name.startswith(f"{TOKENS}/{run}-")):
            data = pa.BufferReader(self._store.read(name))
            try:
                yield from open_parquet(data).read(columns=["video_id"]).column(0).unique().to_pylist()
            except (OSError, pa.ArrowException) as error:
                self._report.notes.append(f"{name} cannot be read, so its videos are unknown: {error}")


def _failed(row: VideoRow, why: str) -> VideoRow:
    """A row without tokens that another attempt may replace."""
    kept = {name: value for name, value in row.items() if name in _KEPT}
    if kept["manifest"] is not None and not is_json(row["manifest"]):
        kept["manifest"] = None
    error = {"error_class": "io", "error_stage": "write", "error_message": printable(f"marked by a repair: {why}")}
    return cast(VideoRow, {**kept, "status": "failed", **error, "retryable": True})


def _unknown(video_id: str, run: str, why: str) -> VideoRow:
    """The same for a video of which no more is known than its id."""
    known = {**dict.fromkeys(_KEPT), "video_id": video_id, "run_id": run, "uri": "", "attempts": 1}
    return _failed(cast(VideoRow, known), why)


def _numbered(name: str) -> tuple[str, int]:
    """Return (run, number) in the name of a videos shard; -1 where it has none.

    The name is with the hash of its content, or (of one that is lost) without.
    """
    stem = PurePosixPath(name).stem if name.endswith(".parquet") else f"{PurePosixPath(name).name}-"
    run, _, number = stem.rpartition("-")[0].rpartition("-")
    return (run, int(number)) if run and number.isdecimal() else (stem, -1)
