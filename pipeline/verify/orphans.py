"""Files of a cache that no live row needs: those that were left behind, and the removal of what nothing names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath

from pipeline.cache.live_rows import TOKENS, VIDEOS
from pipeline.cache.writer import run_of, token_shard_id
from pipeline.execution.run_record import RUNS, committed_by
from pipeline.storage.stores import FileInfo, Store
from pipeline.verify.report import Kind, Report

_TEMPORARY = ".tmp-"  # LocalStore.put's prefix for a file that is not complete yet
UPLOAD_AGE = timedelta(hours=1)  # a younger upload may still be running


def list_files(store: Store) -> dict[str, list[FileInfo]]:
    """List the files of each folder of the cache by folder, "" being the root.

    Call it before the videos shards are read, so that what a run commits meanwhile does not pass for an orphan.
    """
    return {folder: store.listed(folder) for folder in ("", TOKENS, VIDEOS, RUNS)}


def sort_files(files: dict[str, list[FileInfo]], named: Collection[str], live: Collection[str], report: Report) -> None:
    """Add to the report the files that no live row needs: leftovers, orphans and superseded token shards.

    Leftovers are temporary files of writers; orphans, token shards that no videos row names. Superseded ones are named
    only by rows that a later attempt replaced.

    Args:
        files: the cache's files, by folder.
        named: the token shards that any videos row names.
        live: those that a live row names.
    """
    for found in files.values():
        report.leftovers += [file for file in found if PurePosixPath(file.name).name.startswith(_TEMPORARY)]
    shards = [file for file in files[TOKENS] if file.name.endswith(".parquet") and file not in report.leftovers]
    report.orphans += [file for file in shards if file.name not in named]
    report.superseded += [file for file in shards if file.name in named and file.name not in live]


def list_uploads(store: Store, report: Report) -> None:
    """Add the pending multipart uploads below the prefix to the report: nobody sees them, and they are billed."""
    try:
        report.uploads += store.uploads()
    except OSError as error:  # listing uploads needs a permission of its own, and not every store supports it
        report.notes.append(f"pending uploads cannot be listed: {error.strerror or error}")


def committed_orphans(store: Store, orphans: Collection[FileInfo], *, without_record: bool) -> Iterator[str]:
    """Yield the orphans that a run's record says it had committed: their rows were replaced, or are lost.

    With ``without_record`` also those of runs whose record is gone, of which nobody can tell.
    """
    by_run: dict[str, list[str]] = defaultdict(list)
    for file in orphans:
        by_run[run_of(file.name)].append(file.name)
    for run, names in sorted(by_run.items()):
        committed = committed_by(store, run)
        if committed is None:
            yield from names if without_record else ()
        else:
            yield from (name for name in names if token_shard_id(name) in committed)


def clean(
    store: Store, report: Report, keep: timedelta, now: datetime | None = None, commits: Collection[str] | None = None
) -> None:
    """Delete the orphans, leftovers and old uploads of ``report``; no run may be writing. Raises OSError.

    Where a file of the videos table is unreadable or lost, or not among ``commits``, the ones that were read (None:
    all), token shards that it may name stay; so does what is younger than ``keep``.
    """
    unneeded = _unneeded(store, report, commits)
    for file in [*report.leftovers, *unneeded]:
        if store.age(file.name) >= keep:
            store.delete(file.name)
            report.removed.append(file.name)
    if young := sum(file.name not in report.removed for file in unneeded):
        report.notes.append(
            f"{young} orphans younger than {keep.total_seconds() / 60:g} minutes stay: a run that was stopped may "
            "still commit them"
        )
    for upload in report.uploads:
        if (now or datetime.now(UTC)) - upload.started > UPLOAD_AGE:
            store.abort(upload)
            report.removed.append(f"the upload of {upload.uri} since {upload.started:%Y-%m-%d %H:%M}")


def _unneeded(store: Store, report: Report, commits: Collection[str] | None) -> list[FileInfo]:
    """Return the orphans that no file of the videos table can name."""
    if not report.orphans:
        return []
    unread = {Kind.COMMIT, Kind.LOST, Kind.SCHEMA, Kind.UNREADABLE, Kind.FINGERPRINT}
    doubtful = any(p.kind in unread and (p.shard or "").startswith(VIDEOS) for p in report.problems)
    if doubtful or (commits is not None and not set(store.names(VIDEOS, ".parquet")) <= set(commits)):
        which = "is damaged, foreign or lost" if doubtful else "came meanwhile"
        report.notes.append(f"no token shard was removed: a videos file that {which} may name it")
        return []
    return list(report.orphans)
