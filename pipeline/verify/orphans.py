"""Files of a cache that no live row needs: those that were left behind, and the removal of what nothing names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath

from pipeline.cache.index.files import INDEX
from pipeline.cache.live_rows import TOKENS, VIDEOS
from pipeline.execution.run_record import RUNS
from pipeline.storage.lease import CacheLease
from pipeline.storage.lock import Lock
from pipeline.storage.stores import FileInfo, ObjectStore, Store
from pipeline.verify.report import Report

_TEMPORARY = ".tmp-"  # how LocalStore.put calls a file until it is whole
UPLOAD_AGE = timedelta(hours=1)  # a younger one may still be under way
# In an object store a driver that was stopped may go on after another one took its lease, and commit what it wrote;
# in a folder it keeps the lock.
ORPHAN_AGE = timedelta(days=1)


def list_files(store: Store) -> dict[str, list[FileInfo]]:
    """List the files of each folder of the cache, "" being its root.

    Taken before the videos shards are read, so that what a run commits meanwhile does not pass for an orphan.
    """
    return {folder: store.listed(folder) for folder in ("", TOKENS, VIDEOS, RUNS, INDEX)}


def sort_files(files: dict[str, list[FileInfo]], named: Collection[str], live: Collection[str], report: Report) -> None:
    """Note in ``report`` which files are orphans, leftovers and superseded.

    Args:
        named: the token shards that any videos row names.
        live: those that a live row names.
    """
    for found in files.values():
        report.leftovers += [file for file in found if PurePosixPath(file.name).name.startswith(_TEMPORARY)]
    shards = [file for file in files[TOKENS] if file.name.endswith(".parquet") and file not in report.leftovers]
    report.orphans += [file for file in shards if file.name not in named]
    report.superseded += [file for file in shards if file.name in named and file.name not in live]


def list_uploads(store: Store, report: Report) -> None:
    """Note the multipart uploads below the prefix that were never completed: nobody sees them, and they are billed."""
    if isinstance(store, ObjectStore):
        try:
            report.uploads += store.objects.uploads(f"{store.root}/")
        except OSError as error:  # a right of its own, and not every store can
            report.notes.append(f"pending uploads cannot be listed: {error.strerror or error}")


def lost_commits(commits: Collection[str], orphans: Collection[FileInfo]) -> Iterator[tuple[str, int, list[str]]]:
    """(run, number, orphans of that run) of each videos shard that must have been there.

    A run numbers its commits without a gap; where there is one, and token shards of that run which nothing names, the
    commit was not removed for good. The last ones of a run cannot be missed in this way.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in commits:
        run, _, number = PurePosixPath(name).stem.rpartition("-")[0].rpartition("-")
        if number.isdecimal():
            numbers[run].add(int(number))
    for run, found in sorted(numbers.items()):
        mine = [file.name for file in orphans if file.name.startswith(f"{TOKENS}/{run}-")]
        for missing in sorted(set(range(max(found))) - found) if mine else ():
            yield run, missing, mine


def clean(
    store: Store, report: Report, lock: Lock, now: datetime | None = None, commits: Collection[str] | None = None
) -> None:
    """Remove the orphans, leftovers and old uploads of ``report``; the cache's ``lock`` is held.

    Raises RunFailed where it was lost, and OSError.

    Where a commit is unreadable or lost, or not among ``commits``, the ones that were read (None: all), token shards
    that it may name stay; so do those in an object store that are younger than ORPHAN_AGE.
    """
    for file in [*report.leftovers, *_unneeded(store, report, lock, commits)]:
        lock.check()
        store.delete(file.name)
        report.removed.append(file.name)
    for upload in report.uploads:
        if isinstance(store, ObjectStore) and (now or datetime.now(UTC)) - upload.started > UPLOAD_AGE:
            lock.check()
            store.objects.abort(upload)
            report.removed.append(f"the upload of {upload.uri} since {upload.started:%Y-%m-%d %H:%M}")


def _unneeded(store: Store, report: Report, lock: Lock, commits: Collection[str] | None) -> list[FileInfo]:
    """The orphans that no commit can name, not even one that is still to come."""
    if not report.orphans:
        return []
    unread = {"commit", "lost", "schema", "unreadable"}
    doubtful = any(p.kind in unread and (p.shard or "").startswith(f"{VIDEOS}/") for p in report.problems)
    if doubtful or (commits is not None and not set(store.names(VIDEOS, ".parquet")) <= set(commits)):
        which = "is damaged or lost" if doubtful else "came meanwhile"
        report.notes.append(f"no token shard was removed: a videos shard that {which} may name it")
        return []
    old = [file for file in report.orphans if _age(store, file, lock) >= ORPHAN_AGE]
    if young := len(report.orphans) - len(old):
        report.notes.append(f"{young} orphans younger than a day stay: a driver that was stopped may still commit them")
    return old


def _age(store: Store, file: FileInfo, lock: Lock) -> timedelta:
    """How long ago it was written; where nobody can be late, it is old enough at once."""
    return store.age(file.name) if isinstance(lock, CacheLease) else ORPHAN_AGE
