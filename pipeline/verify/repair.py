"""The changes that ``jobs.verify`` makes on request: ``--repair`` and ``--clean``.

No file is changed in place: the new file is written, the old one is copied to ``repaired/``, and then the old one is
deleted. After a kill both files exist, and the next repair completes the work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.header import CacheHeader, compute_fingerprint
from pipeline.cache.live import LiveVideos, select_ok
from pipeline.cache.merging import merge_table_fully
from pipeline.cache.schema import TOKENS, VIDEOS
from pipeline.cache.table import (
    VideosTable,
    build_table,
    parse_file_name,
    read_file,
    serialize_small,
    serialize_sorted,
    sort_by_key,
)
from pipeline.cache.token_shard import parse_run_id, read_shard_video_ids
from pipeline.cache.writer import copy_videos
from pipeline.errors import RunFailed, make_printable
from pipeline.rows import VideoRow
from pipeline.storage.stores import FileInfo, Store
from pipeline.verify.checks import RowKey, check_token_shard, is_json
from pipeline.verify.report import KEPT_IN, Kind, MarkedVideo, RepairResult, Report

UPLOAD_AGE = timedelta(hours=1)  # a younger upload may still be running
_WHOLE = frozenset({Kind.MISSING, Kind.FOOTER})  # problems that damage all videos of a token shard
_OF_TOKENS = frozenset({*_WHOLE, Kind.DAMAGED, Kind.ROWS, Kind.CHECKSUM, Kind.TOKENS})
_OF_TABLE = frozenset({Kind.COMMIT, Kind.FINGERPRINT})  # problems whose file leaves the table
#: Problems that a repair can mend.
REPAIRABLE = frozenset({*_OF_TOKENS, *_OF_TABLE, Kind.ROW, Kind.LOST})
_COPIED_COLUMNS = (
    "video_id",
    "run_id",
    "uri",
    "start_s",
    "end_s",
    "source_size",
    "source_hash",
    "attempts",
    "manifest",
)
_CONTRADICTS = "its row contradicts itself"


def list_shard_ids(store: Store, name: str, report: Report) -> list[str]:
    """Return the ids of the videos in a token shard; [] and a note in the report if it cannot be read."""
    try:
        return read_shard_video_ids(store, name)
    except (OSError, ValueError, pa.ArrowException) as error:
        report.notes.append(f"{name} cannot be read, so its videos are unknown: {error}")
        return []


class Repair:
    """A repair of the problems in a report. No other run may be writing to the cache."""

    def __init__(self, store: Store, header: CacheHeader, report: Report) -> None:
        self._store = store
        self._header = header
        self._report = report
        self._made_with = compute_fingerprint(header["identity"])
        self._table = VideosTable(store, keep=64)
        self._result = RepairResult(kept_in=KEPT_IN)

    def repair_problems(self, live: pa.Table, bad: Collection[RowKey]) -> RepairResult:
        """Repair the problems of the report, and return what was done.

        Damaged token shards are read once more first; one that is sound now only gets a note. Videos whose tokens or
        row cannot be trusted get a failed row, so that ``jobs.prune --retry-failed`` encodes them again; sound videos
        in a token shard with damaged ones move to a new shard.

        Args:
            live: the live rows, with ``file`` and ``row``.
            bad: the locations of rows that contradict themselves.

        Raises:
            RunFailed: a file has another schema or is a stray, or no video would stay. Nothing is changed then.
            CorruptShard, OSError: the store no longer gives the bytes that it gave before. Repeat the repair to resume.
        """
        for problem in self._report.problems:
            if problem.kind in {Kind.SCHEMA, Kind.STRAY}:
                raise RunFailed(
                    f"{self._store} has a file that is not part of this cache: move {problem.shard} away first"
                )
        present = live.filter(pc.not_equal(live["status"], "removed"))  # removed videos stay removed
        wrong = dict.fromkeys(set(bad).intersection(_list_row_keys(present)), _CONTRADICTS)
        ok = select_ok(live)
        places = _list_row_keys(ok)
        neighbours: dict[str, list[RowKey]] = defaultdict(list)
        shards = {problem.shard for problem in self._report.problems if problem.kind in _OF_TOKENS}
        for name, place in zip(ok["token_shard"].to_pylist(), places, strict=True):
            if name in shards and place not in wrong:
                neighbours[name].append(place)
        for name, of_shard in sorted(neighbours.items()):
            if (faults := self._find_wrong(name, of_shard)) is not None:
                wrong |= faults
                continue
            neighbours.pop(name)
            note = f"{name} was damaged at first and sound when it was read again: check the disk"
            self._report.notes.append(note)
        self._refuse_total_loss(wrong.keys() & set(places), places)
        changes = {
            row["video_id"]: row for of_shard in neighbours.values() for row in self._move_sound_videos(of_shard, wrong)
        }
        for place, why in wrong.items():
            row = self._table.read_row(*place)
            changes[row["video_id"]] = _make_failed_row(row, why)
            self._result.marked.append(MarkedVideo(row["video_id"], row["uri"], row["attempts"], why))
        self._set_aside(set(live["video_id"].to_pylist()))
        if changes or bad:
            self._change(changes)
        return self._result

    def _find_wrong(self, name: str, places: Sequence[RowKey]) -> dict[RowKey, str] | None:
        """Check a damaged token shard again; return the fault of each bad row, or None if the shard is sound now.

        A missing shard or a damaged footer is the fault of all rows. A problem that concerns no single video gives no
        fault.

        Args:
            places: the locations of the ok rows that name the shard.
        """
        rows = {place: self._table.read_row(*place) for place in places}
        problems = check_token_shard(self._store, name, [(p[0], row) for p, row in rows.items()], self._header).problems
        problems = [problem for problem in problems if problem.kind in _OF_TOKENS]
        if not problems:
            return None
        if fatal := next((problem for problem in problems if problem.kind in _WHOLE), None):
            return dict.fromkeys(places, fatal.what)
        wrong = {problem.video_id: problem.what for problem in reversed(problems)}
        return {place: wrong[row["video_id"]] for place, row in rows.items() if row["video_id"] in wrong}

    def _refuse_total_loss(self, wrong: Collection[RowKey], ok: Collection[RowKey]) -> None:
        """Raise RunFailed if every ok video is wrong, as when a folder is not mounted or the header is another cache's.

        A cache without ok videos passes unless a table file has another identity.
        """
        if len(wrong) == len(ok) and (wrong or self._report.has(Kind.FINGERPRINT)):
            raise RunFailed(
                f"{self._store}: no video would stay: check that {TOKENS}/ is mounted and cache.json belongs to this "
                "cache, restore what is missing, or make the cache again in another --out"
            )

    def _move_sound_videos(self, places: Sequence[RowKey], wrong: dict[RowKey, str]) -> list[VideoRow]:
        """Copy the sound videos of a damaged token shard to a new shard; return their new rows, not yet committed.

        Adds their number to ``moved`` of the result. Without sound videos, no shard is written and [] is returned.
        """
        rows = [self._table.read_row(*place) for place in places if place not in wrong]
        rows.sort(key=lambda row: row["first_row_group"])
        self._result.moved += len(rows)
        return copy_videos(self._store, rows[0]["run_id"], rows) if rows else []

    def _set_aside(self, known_ids: Collection[str]) -> None:
        """Commit a failed row for each lost video, and move damaged and foreign files of the table to ``repaired/``.

        Lost videos are those of orphaned token shards whose ids are not among ``known_ids``. They are searched for only
        if a table file is damaged or lost.
        """
        by_run: dict[str, set[str]] = defaultdict(set)
        for file in self._report.orphans if self._report.has(Kind.COMMIT, Kind.LOST) else ():
            ids = list_shard_ids(self._store, file.name, self._report)
            by_run[parse_run_id(file.name)] |= set(ids).difference(known_ids)
        why = f"its row in {VIDEOS}/ was damaged or lost"
        for run, lost_ids in sorted(by_run.items()):
            if lost_ids:
                known = {"run_id": run, "uri": "", "attempts": 1}
                table = build_table([_make_failed_row({"video_id": name, **known}, why) for name in sorted(lost_ids)])
                self._store.put(*serialize_small(f"{run}-repair", 0, table, self._made_with))
                self._result.marked += [MarkedVideo(video_id, "", 1, why) for video_id in sorted(lost_ids)]
        for name in sorted({p.shard for p in self._report.problems if p.kind in _OF_TABLE and p.shard is not None}):
            self._move_to_repaired(name)

    def _change(self, changes: dict[str, VideoRow]) -> None:
        """Merge the table until each video has one row, and replace rows: video_id -> new row.

        Each file with a replaced row is written again, and the old file moves to ``repaired/``. The source files of the
        merge are deleted at once.
        """
        merge_table_fully(self._store, self._made_with)
        table = LiveVideos.open(self._store, self._made_with)
        shards = {place.file for video_id in changes if (place := table.find(video_id)) is not None}
        for name in sorted(shards):
            old_rows: list[VideoRow] = read_file(self._store, parse_file_name(name)).to_pylist()
            rows = sort_by_key(build_table([changes.get(row["video_id"], row) for row in old_rows]))
            level = max(1, parse_file_name(name).level)  # a small file came after the merge
            self._store.put(*serialize_sorted(level, rows, {}, self._made_with))
            self._move_to_repaired(name)

    def _move_to_repaired(self, name: str) -> None:
        """Move a file of the table to ``repaired/``, which no reader opens, and add it to the result."""
        self._store.put(f"{KEPT_IN}/{PurePosixPath(name).name}", self._store.read(name))
        self._store.delete(name)
        self._result.replaced.append(name)


def _list_row_keys(rows: pa.Table) -> list[RowKey]:
    """Return the (file, row number) of each row, in order."""
    return list(zip(rows["file"].to_pylist(), rows["row"].to_pylist(), strict=True))


def _make_failed_row(row: Mapping[str, Any], why: str) -> VideoRow:
    """Return a failed, retryable row without tokens for a video, whose message begins with "marked by a repair".

    Source and attempts are copied from ``row``, as far as it has them; a ``manifest`` that is not JSON is dropped.
    """
    copied = {name: row.get(name) for name in _COPIED_COLUMNS}
    if copied["manifest"] is not None and not is_json(copied["manifest"]):
        copied["manifest"] = None
    error = {"error_class": "io", "error_stage": "write", "error_message": make_printable(f"marked by a repair: {why}")}
    return cast(VideoRow, {**copied, "status": "failed", **error, "retryable": True})


def delete_leftovers(
    store: Store, report: Report, keep: timedelta, now: datetime | None = None, commits: Collection[str] | None = None
) -> None:
    """Delete the orphans, leftovers and old pending uploads in ``report``. No run may be writing.

    Files younger than ``keep`` stay, and uploads younger than an hour. All orphans stay if a file of the videos table
    that was not read may name them. The report gets the names of deleted files, and notes on orphans that stay.

    Args:
        now: the current time, for the age of uploads; None for the clock of this machine.
        commits: the names of the table files that were read; None if all were.
    """
    files = _find_removable(store, report, commits)
    for file in [*report.leftovers, *files]:
        if store.compute_age(file.name) >= keep:
            store.delete(file.name)
            report.removed.append(file.name)
    if young := sum(file.name not in report.removed for file in files):
        report.notes.append(
            f"{young} orphans younger than {keep.total_seconds() / 60:g} minutes stay: a run that was stopped may "
            "still commit them"
        )
    for upload in report.uploads:
        if (now or datetime.now(UTC)) - upload.started > UPLOAD_AGE:
            store.abort_upload(upload)
            report.removed.append(f"the upload of {upload.uri} since {upload.started:%Y-%m-%d %H:%M}")


def _find_removable(store: Store, report: Report, commits: Collection[str] | None) -> list[FileInfo]:
    """Return all orphans; [] and a note in the report if a table file that was not read may still name one.

    Such a file is damaged, unreadable, foreign, stray or lost by the report, or is in the folder but not among
    ``commits``.
    """
    if not report.orphans:
        return []
    unread = {Kind.COMMIT, Kind.LOST, Kind.SCHEMA, Kind.UNREADABLE, Kind.FINGERPRINT, Kind.STRAY}
    doubtful = any(p.kind in unread and (p.shard or "").startswith(VIDEOS) for p in report.problems)
    if doubtful or (commits is not None and not set(store.names(VIDEOS, ".parquet")) <= set(commits)):
        which = "is damaged, foreign or lost" if doubtful else "was added meanwhile"
        report.notes.append(f"no token shard was removed: a videos file that {which} may name it")
        return []
    return list(report.orphans)
