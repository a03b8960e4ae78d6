"""``jobs.verify --repair``: what is damaged is marked for another attempt, and what is sound beside it stays.

- Videos whose tokens or whose row cannot be trusted get a failed row, so that ``jobs.prune --retry-failed`` does them
  again.
- Sound videos that lie in a token shard with damaged ones move to a new shard.
- Files of the videos table that are damaged leave it. Videos in token shards that nothing names then get a failed row.

No file is changed in place: a new one is put, and then the other is deleted, of which ``repaired/`` has a copy. Where
that is interrupted both are there, and the next repair finds the same and ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import cast

import pyarrow as pa

from pipeline.cache.header import CacheHeader, fingerprint
from pipeline.cache.live_rows import TOKENS, VIDEOS, VideoRows, keyed, read_file
from pipeline.cache.schema import MADE_WITH, write_parquet
from pipeline.cache.table import file_named, in_key_order, small_name, sorted_bytes, sorted_name
from pipeline.cache.token_shard import TokenShard, videos_in
from pipeline.cache.writer import put_token_shard
from pipeline.errors import RunFailed, printable
from pipeline.rows import VideoRecord, VideoRow
from pipeline.storage.stores import Store
from pipeline.verify.judge import OF_TOKENS, Judge, Place, Verdict
from pipeline.verify.orphans import run_of
from pipeline.verify.report import Marked, Repaired, Report
from pipeline.verify.rows import is_json

KEPT_IN = "repaired"  # the folder of what was replaced
_KINDS = {*OF_TOKENS, "row", "commit", "lost"}
_KEPT = ("video_id", "run_id", "uri", "start_s", "end_s", "source_size", "source_hash", "attempts", "manifest")


def repairable(report: Report) -> bool:
    """Whether any of the problems is one that a repair knows."""
    return any(problem.kind in _KINDS for problem in report.problems)


class Repair:
    """One repair of the cache at ``store``, to which no run writes, of the problems in ``report``."""

    def __init__(self, store: Store, header: CacheHeader, report: Report) -> None:
        self._store, self._report = store, report
        self._made_with = fingerprint(header["identity"])
        self._full = VideoRows(store, keep=64)
        self._done = Repaired(kept_in=KEPT_IN)

    def carry_out(self, judge: Judge, rows: pa.Table) -> Repaired:
        """``rows`` are all that can be read, as ``judge`` has them.

        Raises RunFailed where nothing would be left, CorruptShard and OSError where the store does not give what it
        gave just before; another repair goes on from there.
        """
        verdict = judge.verdict(p.shard for p in self._report.problems if p.kind in OF_TOKENS and p.shard is not None)
        self._check(verdict)
        for name in verdict.spared:
            self._report.notes.append(f"{name} was damaged at first and sound when it was read again: look at the disk")
        moved = {place: row for name, places in verdict.moving.items() for place, row in self._move(name, places)}
        for name in sorted({commit for commit, _ in (*verdict.marked, *moved)}):
            self._rewrite(name, verdict, moved)
        self._replace_lost(rows)
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
        for row in rows:
            row["rewritten"] = (row["rewritten"] or 0) + 1
        self._done.moved += len(rows)
        yield from zip(places, rows, strict=True)

    def _rewrite(self, name: str, verdict: Verdict, moved: dict[Place, VideoRow]) -> None:
        """Replace a file of the table by one in which rows are failed, or name other token shards."""
        rows: list[VideoRow] = []
        for number, row in enumerate(read_file(self._store, file_named(name)).to_pylist()):
            place = (name, number)
            why = verdict.marked.get(place)
            rows.append(moved.get(place, row) if why is None else _failed(row, why))
            if why is not None and place in verdict.counted:
                self._done.marked.append(Marked(row["video_id"], row["uri"], row["attempts"], why))
        new, data = self._file_like(name, rows)
        self._keep(name)
        self._store.put(new, data)
        if new != name:
            self._store.delete(name)
        self._done.replaced.append(name)

    def _file_like(self, name: str, rows: Sequence[VideoRow]) -> tuple[str, bytes | pa.Buffer]:
        """(name, content) of a file of the same kind with other rows."""
        table = keyed(rows)
        file = file_named(name)
        if file.level:
            table = in_key_order(table)
            data, n_tail, tail_hash = sorted_bytes(table, {}, self._made_with, indexed="video_id")
            return sorted_name(VIDEOS, file.level, table, n_tail, tail_hash), data
        run, number = _numbered(name)
        return self._small(run, number, table)

    def _small(self, run: str, number: int, table: pa.Table) -> tuple[str, pa.Buffer]:
        data = write_parquet(table.replace_schema_metadata({MADE_WITH: self._made_with}))
        return small_name(VIDEOS, run, number, data), data

    def _keep(self, name: str) -> None:
        """Copy a file of the table to where nobody reads it."""
        self._store.put(f"{KEPT_IN}/{PurePosixPath(name).name}", self._store.read(name))

    def _replace_lost(self, rows: pa.Table) -> None:
        """Take damaged files out of the table, and give videos that have no row any more a failed one.

        These are found in the token shards that nothing names.
        """
        problems = [problem for problem in self._report.problems if problem.kind in {"commit", "lost"}]
        known = set(rows["video_id"].to_pylist())
        found: dict[str, str] = {}  # the run of each
        for file in self._report.orphans if problems else ():
            run = run_of(file.name)
            found |= {video_id: run for video_id in self._ids_of(file.name) if video_id not in known}
        why = f"its row in {VIDEOS}/ was damaged or lost"
        for run in sorted(set(found.values())):
            ids = sorted(video_id for video_id, its in found.items() if its == run)
            self._store.put(*self._small(f"{run}-repair", 0, keyed([_unknown(one, run, why) for one in ids])))
            self._done.marked += [Marked(video_id, "", 1, why) for video_id in ids]
        for name in sorted(p.shard for p in problems if p.kind == "commit" and p.shard is not None):
            self._keep(name)
            self._store.delete(name)
            self._done.replaced.append(name)

    def _ids_of(self, name: str) -> list[str]:
        """The videos in a token shard that nothing names."""
        try:
            return videos_in(self._store, name)
        except (OSError, pa.ArrowException) as error:
            self._report.notes.append(f"{name} cannot be read, so its videos are unknown: {error}")
            return []


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
    """Return (run, number) in the name of a small file."""
    run, _, number = PurePosixPath(name).stem.rpartition("-")[0].rpartition("-")
    return (run, int(number)) if run and number.isdecimal() else ("repair", 0)
