"""What ``jobs.verify`` changes where asked: ``--repair`` and ``--clean``.

A repair marks what is damaged for another attempt, and what is sound beside it stays:

- Files of the videos table that are damaged, or of another identity, leave it. Videos in token shards that nothing
  names then get a failed row.
- The table is merged, so that one file has one row of each video, and no earlier attempt comes back.
- Videos whose tokens or whose row cannot be trusted get a failed row, so that ``jobs.prune --retry-failed`` does them
  again; sound videos that lie in a token shard with damaged ones move to a new shard.

No file is changed in place: a new one is put, and then the other is deleted, of which ``repaired/`` has a copy. Where
that is interrupted both are there, and the next repair finds the same and ends it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.header import CacheHeader, fingerprint
from pipeline.cache.live import LiveVideos, select_ok
from pipeline.cache.merging import merge_fully
from pipeline.cache.schema import TOKENS, VIDEOS
from pipeline.cache.table import (
    VideosTable,
    build_table,
    parse_file_name,
    read_file,
    serialise_small,
    serialise_sorted,
    sort_by_key,
)
from pipeline.cache.token_shard import list_videos, parse_run_id
from pipeline.cache.writer import copy_videos
from pipeline.errors import RunFailed, printable
from pipeline.rows import VideoRow
from pipeline.storage.stores import FileInfo, Store
from pipeline.verify.checks import Place, check_token_shard, is_json
from pipeline.verify.report import KEPT_IN, Kind, Marked, Repaired, Report

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
    """Return the ids of the videos in a token shard.

    If it cannot be read, the list is empty, and the report gets a note.
    """
    try:
        return list_videos(store, name)
    except (OSError, ValueError, pa.ArrowException) as error:
        report.notes.append(f"{name} cannot be read, so its videos are unknown: {error}")
        return []


class Repair:
    """A repair of the problems in ``report``, in a cache to which no run writes."""

    def __init__(self, store: Store, header: CacheHeader, report: Report) -> None:
        self._store, self._header, self._report = store, header, report
        self._made_with = fingerprint(header["identity"])
        self._table = VideosTable(store, keep=64)
        self._result = Repaired(kept_in=KEPT_IN)

    def carry_out(self, live: pa.Table, bad: Collection[Place]) -> Repaired:
        """Repair the problems; ``live`` are the live rows with their places, ``bad`` rows that contradict themselves.

        Raises RunFailed where no video would be left, or where a file has another schema. Raises CorruptShard and
        OSError if the store does not give the bytes that it gave just before; another repair resumes there.
        """
        for problem in self._report.problems:
            if problem.kind in {Kind.SCHEMA, Kind.STRAY}:
                raise RunFailed(f"{self._store} has a file that is none of this cache: move {problem.shard} away first")
        present = live.filter(pc.not_equal(live["status"], "removed"))  # removed videos stay removed
        wrong = dict.fromkeys(set(bad).intersection(_places(present)), _CONTRADICTS)
        ok = select_ok(live)
        places = _places(ok)
        neighbours: dict[str, list[Place]] = defaultdict(list)
        shards = {problem.shard for problem in self._report.problems if problem.kind in _OF_TOKENS}
        for name, place in zip(ok["token_shard"].to_pylist(), places, strict=True):
            if name in shards and place not in wrong:
                neighbours[name].append(place)
        for name, of_shard in sorted(neighbours.items()):
            if (faults := self._find_wrong(name, of_shard)) is not None:
                wrong |= faults
                continue
            neighbours.pop(name)
            note = f"{name} was damaged at first and sound when it was read again: look at the disk"
            self._report.notes.append(note)
        self._refuse_total_loss(wrong.keys() & set(places), places)
        changes = {row["video_id"]: row for of_shard in neighbours.values() for row in self._move(of_shard, wrong)}
        for place, why in wrong.items():
            row = self._table.read_row(*place)
            changes[row["video_id"]] = _make_failed_row(row, why)
            self._result.marked.append(Marked(row["video_id"], row["uri"], row["attempts"], why))
        self._set_aside(set(live["video_id"].to_pylist()))
        if changes or bad:
            self._change(changes)
        return self._result

    def _find_wrong(self, name: str, places: Sequence[Place]) -> dict[Place, str] | None:
        """Check a damaged token shard again; return the fault of each bad row, or None if the shard is sound now.

        ``places`` are the rows of its videos.
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

    def _refuse_total_loss(self, wrong: Collection[Place], ok: Collection[Place]) -> None:
        """Raise RunFailed if all seems damaged, as when a folder is not mounted or the header is another cache's."""
        if len(wrong) == len(ok) and (wrong or self._report.has(Kind.FINGERPRINT)):
            raise RunFailed(
                f"{self._store}: none of its videos would stay: look whether {TOKENS}/ is mounted and cache.json is "
                "its own, restore what is missing, or make the cache again in another --out"
            )

    def _move(self, places: Sequence[Place], wrong: dict[Place, str]) -> list[VideoRow]:
        """Copy the sound videos of a damaged token shard to a new shard; return their new rows.

        The caller commits the rows. ``moved`` of the result counts them.
        """
        rows = [self._table.read_row(*place) for place in places if place not in wrong]
        rows.sort(key=lambda row: row["first_row_group"])
        self._result.moved += len(rows)
        return copy_videos(self._store, rows[0]["run_id"], rows) if rows else []

    def _set_aside(self, known_ids: Collection[str]) -> None:
        """Move damaged and foreign files of the table aside, and commit a failed row for each lost video.

        The files go to the folder of replaced files. Lost videos are found in the token shards that no row names.
        Videos of foreign files get no row.
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
                self._store.put(*serialise_small(f"{run}-repair", 0, table, self._made_with))
                self._result.marked += [Marked(video_id, "", 1, why) for video_id in sorted(lost_ids)]
        for name in sorted({p.shard for p in self._report.problems if p.kind in _OF_TABLE and p.shard is not None}):
            self._retire(name)

    def _change(self, changes: dict[str, VideoRow]) -> None:
        """Merge the table until each video has one row, and replace the rows of these videos: video_id -> new row.

        A file with a replaced row is written again; the old file moves to the folder of replaced files. The sources of
        the merge are deleted at once.
        """
        merge_fully(self._store, self._made_with)
        table = LiveVideos.open(self._store, self._made_with)
        shards = {place.file for video_id in changes if (place := table.find(video_id)) is not None}
        for name in sorted(shards):
            old_rows: list[VideoRow] = read_file(self._store, parse_file_name(name)).to_pylist()
            rows = sort_by_key(build_table([changes.get(row["video_id"], row) for row in old_rows]))
            level = max(1, parse_file_name(name).level)  # a small file came after the merge
            self._store.put(*serialise_sorted(level, rows, {}, self._made_with))
            self._retire(name)

    def _retire(self, name: str) -> None:
        """Move a file of the table to the folder of replaced files, which nobody reads."""
        self._store.put(f"{KEPT_IN}/{PurePosixPath(name).name}", self._store.read(name))
        self._store.delete(name)
        self._result.replaced.append(name)


def _places(rows: pa.Table) -> list[Place]:
    """Return the (file, row number) of each row."""
    return list(zip(rows["file"].to_pylist(), rows["row"].to_pylist(), strict=True))


def _make_failed_row(row: Mapping[str, Any], why: str) -> VideoRow:
    """Return a failed row for a video, without tokens, which a retry may replace; ``row`` has what is known of it."""
    copied = {name: row.get(name) for name in _COPIED_COLUMNS}
    if copied["manifest"] is not None and not is_json(copied["manifest"]):
        copied["manifest"] = None
    error = {"error_class": "io", "error_stage": "write", "error_message": printable(f"marked by a repair: {why}")}
    return cast(VideoRow, {**copied, "status": "failed", **error, "retryable": True})


def clean(
    store: Store, report: Report, keep: timedelta, now: datetime | None = None, commits: Collection[str] | None = None
) -> None:
    """Delete the orphans, leftovers and old uploads of ``report``; no run may be writing. Raises OSError.

    Files younger than ``keep`` stay, and uploads younger than an hour. All orphans stay if a file of the videos table
    may name them: a file that is unreadable or lost, or that is not among ``commits``, the files that were read (None:
    all). ``report`` gets the names of deleted files, and notes on files that stay.
    """
    files = _find_removable(store, report, commits)
    for file in [*report.leftovers, *files]:
        if store.age(file.name) >= keep:
            store.delete(file.name)
            report.removed.append(file.name)
    if young := sum(file.name not in report.removed for file in files):
        report.notes.append(
            f"{young} orphans younger than {keep.total_seconds() / 60:g} minutes stay: a run that was stopped may "
            "still commit them"
        )
    for upload in report.uploads:
        if (now or datetime.now(UTC)) - upload.started > UPLOAD_AGE:
            store.abort(upload)
            report.removed.append(f"the upload of {upload.uri} since {upload.started:%Y-%m-%d %H:%M}")


def _find_removable(store: Store, report: Report, commits: Collection[str] | None) -> list[FileInfo]:
    """Return all orphans, or none if a file of the videos table that was not read may still name them.

    In that case the report gets a note. ``commits`` are the files that were read; None means all.
    """
    if not report.orphans:
        return []
    unread = {Kind.COMMIT, Kind.LOST, Kind.SCHEMA, Kind.UNREADABLE, Kind.FINGERPRINT, Kind.STRAY}
    doubtful = any(p.kind in unread and (p.shard or "").startswith(VIDEOS) for p in report.problems)
    if doubtful or (commits is not None and not set(store.names(VIDEOS, ".parquet")) <= set(commits)):
        which = "is damaged, foreign or lost" if doubtful else "came meanwhile"
        report.notes.append(f"no token shard was removed: a videos file that {which} may name it")
        return []
    return list(report.orphans)
