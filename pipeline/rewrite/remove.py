"""``jobs.remove`` on a cache: remove videos for good.

A removal first commits a row with status "removed", which outranks every other row of its video: from then on readers
refuse the video, and no run encodes it again. Only then are rows, tokens and traces of the video deleted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.bounds import read_bounded
from pipeline.cache.header import compute_fingerprint, read_header
from pipeline.cache.live import (
    RULE_COLUMNS,
    LiveVideos,
    list_nameable_ids,
    make_membership_mask,
    select_ok,
    select_removed,
)
from pipeline.cache.merging import merge_table_files
from pipeline.cache.reader import map_in_order
from pipeline.cache.schema import TOKENS, VIDEOS
from pipeline.cache.table import (
    VideosTable,
    add_row_locations,
    is_table_name,
    list_table_files,
    make_empty_location_table,
    read_file,
)
from pipeline.cache.token_shard import has_shard_form, is_shard_name, read_footer_ids
from pipeline.cache.writer import commit_records, move_videos
from pipeline.errors import CorruptShard, list_first_names, make_printable
from pipeline.inputs.indexes import remove_members
from pipeline.rows import VideoRecord
from pipeline.runner.removal import Removal, claim_for_removal, delete_unfinished, forget_in_runs
from pipeline.runner.run_record import RUNS, make_run_id
from pipeline.storage.stores import INDEXES, Store
from pipeline.verify.report import KEPT_IN

_COLUMNS = ("video_id", *RULE_COLUMNS, "token_shard", "first_row_group", "model_extra", "uri")
_FOLDERS = ("", TOKENS, VIDEOS, RUNS, INDEXES, KEPT_IN)
# Key in a removed row's model_extra: the shards that held the video, for a later run of the removal.
_SHARDS_KEY = "token_shards"
_MAGIC = b"PAR1"


@dataclass
class CacheRemoval(Removal):
    """The result of a removal from a cache.

    Attributes:
        moved: the number of other videos whose tokens were copied to new shards.
        unread: damaged token shards of other videos, which may hold tokens of the removed videos too.
        strays: files in the table's folders that are not files of the cache, such as copies, and may hold the videos.
    """

    moved: int = 0
    unread: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield lines for the terminal: the counts, notes on unknown ids, and the warnings."""
        yield f"{self.videos:,} videos removed for good, {self.moved:,} others moved to new token shards"
        yield f"{len(self.deleted):,} files deleted; {self.run_id} in runs/ says why"
        yield from super().lines()
        yield from self.iter_warnings()

    def iter_warnings(self) -> Iterator[str]:
        """Yield a note if there are unread shards, and a warning per stray file."""
        if self.unread:
            yield (
                f"note: {len(self.unread):,} damaged token shards of other videos, e.g. {self.unread[0]}, may hold "
                "tokens of the videos: run jobs.verify CACHE --repair, then this command again"
            )
        for name in self.strays:
            yield f"warning: {name} is not a file of this cache, and may hold the videos: delete it if it does"


def remove_videos(
    store: Store, ids: Sequence[str], reason: str, say: Callable[[str], object], keep: timedelta
) -> CacheRemoval:
    """Remove videos from a cache for good; ids that the cache does not know are barred from it too.

    Repeat the call to resume an interrupted removal.

    Args:
        reason: stored in the "removed" rows and in the run's record.
        say: receives a line if the call waits.
        keep: how long to wait before token shards that held the videos are deleted, so that readers can finish. Files
            that a merge of the videos table replaced are deleted only if the merge is at least this old.

    Raises:
        NotACache: ``store`` has no valid header.
        CacheLocked: another run is writing to the cache.
        UsageError: nothing can be written there, or a folder of the cache is a symbolic link.
        CorruptShard: a token shard with videos to move, or a file of the table, is damaged.
    """
    identity = compute_fingerprint(read_header(store)["identity"])
    result = CacheRemoval(make_run_id(), len(ids))
    with claim_for_removal(store, result, reason, say):
        _VideosRemover(store, identity, result, frozenset(ids)).run(reason, say, keep)
    return result


def erase_removed(store: Store, identity: str, run_id: str, say: Callable[[str], object]) -> CacheRemoval:
    """Erase rows and tokens of all videos that have a "removed" row.

    The "removed" rows stay. Files are deleted without waiting for readers, who find moved videos by themselves. Does
    nothing if the cache has no removed videos.

    Args:
        run_id: the id of the caller's run, which holds the cache's claim.
        say: receives a line about deleted files, and warnings about files that may still hold the videos.

    Raises:
        CorruptShard: a token shard with videos to move, or a file of the table, is damaged.
    """
    removed_rows = select_removed(LiveVideos.read(store, identity, ("video_id", "status"))[1])
    ids = frozenset(removed_rows["video_id"].to_pylist())
    result = CacheRemoval(run_id, len(ids))
    if ids:
        _VideosRemover(store, identity, result, ids).run("removed from another cache", say, timedelta(0))
        if n_deleted := len(result.deleted):
            names = list_first_names(result.deleted, n_deleted)
            say(f"{n_deleted:,} files deleted that may hold removed videos: {names}")
        for line in result.iter_warnings():
            say(line)
    return result


class _VideosRemover:
    """The steps of one removal of videos from a cache.

    Table files of another identity (for example, of an earlier version of a user method) do not count as rows of the
    cache but may hold the videos too. Each identity has its own live rows, and its other videos are kept.
    """

    def __init__(self, store: Store, identity: str, result: CacheRemoval, ids: frozenset[str]) -> None:
        """Read all rows of the table, and collect the token shards that rows of the videos name."""
        self._store = store
        self._identity = identity
        self._result = result
        self._ids = ids
        videos, _ = LiveVideos.read(store, identity, ("video_id",))  # this finds the files of other identities
        self._identities = [identity, *sorted(filter(None, {*videos.table.foreign.values()}))]
        self._rows = self._read()
        # The token shards of each removed video: at first those that its rows name, or that its removed row recorded.
        self._shards_by_video: dict[str, set[str]] = {video_id: set() for video_id in ids}
        for row in (
            self._select_rows_to_remove().select(["video_id", "status", "token_shard", "model_extra"]).to_pylist()
        ):
            names = _read_shard_names(row["model_extra"]) if row["status"] == "removed" else [row["token_shard"]]
            self._shards_by_video[row["video_id"]].update(filter(is_shard_name, names))

    def run(self, reason: str, say: Callable[[str], object], keep: timedelta) -> None:
        """Carry out the removal, and complete the result; ``say`` receives a line if the call waits.

        Args:
            keep: the wait before unused token shards are deleted, and the age from which sources of merges are deleted.
        """
        result = self._result
        self._mark(reason)
        self._find_unnamed_shards()
        uris = set(self._select_rows_to_remove()["uri"].to_pylist()) - {""}
        result.deleted += _forget_beside_tables(self._store, self._ids, uris)
        self._move_remaining_videos()
        self._merge(keep)
        unused = self._list_shards_with_removed() - self._list_live_shards()  # by the table as it is now
        if unused_names := sorted(name for name in unused if self._store.exists(name)):
            if keep:
                say(f"waiting {keep.total_seconds() / 60:g} minutes for readers of {len(unused_names)} token shards")
                time.sleep(keep.total_seconds())
            for name in unused_names:
                self._store.delete(name)
            result.deleted += unused_names
        self._merge(keep)
        result.strays = _list_strays_with(self._store, self._ids)

    def _live(self, identity: str) -> pa.Table:
        """Read _COLUMNS of the live rows of one identity, and each row's location."""
        return LiveVideos.read(self._store, identity, _COLUMNS)[1]

    def _read(self) -> pa.Table:
        """Read _COLUMNS of all rows of all identities, superseded rows too, and each row's location."""
        files = list_table_files(self._store)
        tables = [add_row_locations(read_file(self._store, file, _COLUMNS), file.name) for file in files]
        return pa.concat_tables([make_empty_location_table(_COLUMNS), *tables])

    def _select_rows_to_remove(self) -> pa.Table:
        """Select all rows of the videos to remove, whatever their status, from the rows read last."""
        return self._rows.filter(make_membership_mask(self._rows["video_id"], self._ids))

    def _mark(self, reason: str) -> None:
        """Commit a "removed" row for each id whose live row is not "removed", and read the rows again.

        Under the cache's identity, ids without a row get one too; under another identity, only ids with a row. Sets the
        unknown ids of the result, and suggests similar ids for the first of them.
        """
        for identity in self._identities:
            live = {row["video_id"]: row for row in self._live(identity).to_pylist()}
            ids = self._ids if identity == self._identity else self._ids & live.keys()
            rows: list[VideoRecord] = [
                {
                    "video_id": video_id,
                    "uri": "",
                    "status": "removed",
                    "error_message": make_printable(reason),
                    "model_extra": json.dumps({_SHARDS_KEY: sorted(self._shards_by_video[video_id])}),
                    "attempts": live[video_id]["attempts"] if video_id in live else 0,
                }
                for video_id in sorted(ids)
                if video_id not in live or live[video_id]["status"] != "removed"
            ]
            if rows:
                commit_records(self._store, self._result.run_id, 0, rows, made_with=identity)
        known_ids = self._rows["video_id"].to_pylist()
        self._result.find_unknown(self._ids, known_ids, list_nameable_ids(self._rows))
        self._rows = self._read()

    def _find_unnamed_shards(self) -> None:
        """Find the token shards that hold a removed video though none of its rows names them.

        These are shards of earlier attempts, concurrent runs, merged caches and killed runs. A shard whose footer
        cannot be read counts as holding all the videos, unless a live row names it: such shards go to ``unread`` of the
        result. A file without the name of a token shard counts only if it can be read.
        """

        def read_ids(name: str) -> Collection[str] | None:
            try:
                return read_footer_ids(self._store, name)
            except CorruptShard:
                return None

        names = self._store.names(TOKENS, ".parquet")
        live_shards = self._list_live_shards()
        for name, ids in zip(names, map_in_order(read_ids, names, 8, 16), strict=True):
            if ids is None and name in live_shards:
                self._result.unread.append(name)
                continue
            if ids is None and not has_shard_form(name):
                continue  # not a file of the cache: ``strays`` names it
            for video_id in self._ids if ids is None else self._ids.intersection(ids):
                self._shards_by_video[video_id].add(name)

    def _list_live_shards(self) -> set[str]:
        """Read the table again, and return the names of the token shards that live rows of any identity name."""
        return {name for identity in self._identities for name in self._live(identity)["token_shard"].to_pylist()}

    def _list_shards_with_removed(self) -> set[str]:
        """Return the names of the token shards that hold a removed video."""
        return set().union(*self._shards_by_video.values())

    def _move_remaining_videos(self) -> None:
        """Copy the other live videos of each shard that holds a removed video to a new shard, and commit their rows."""
        table = VideosTable(self._store)
        number = 0
        names = self._list_shards_with_removed()
        for identity in self._identities:
            live = self._live(identity)
            ok = select_ok(live.filter(make_membership_mask(live["token_shard"], names)))
            for name in sorted(set(ok["token_shard"].to_pylist())):
                number += 1
                locations = ok.filter(pc.equal(ok["token_shard"], name))
                self._result.moved += len(move_videos(table, self._result.run_id, number, locations, identity))

    def _merge(self, keep: timedelta) -> None:
        """Merge the whole table of each identity, which drops all but the "removed" rows of removed videos.

        Adds the deleted source files of earlier merges, which are at least ``keep`` old, to the result.
        """
        for identity in self._identities:
            self._result.deleted += merge_table_files(self._store, identity, everything=True, keep=keep).deleted


def _read_shard_names(text: str | None) -> list[object]:
    """Return the unchecked token shards that a "removed" row names in ``model_extra``; [] if it has another form."""
    try:
        return list(json.loads(text or "{}").get(_SHARDS_KEY, ()))
    except (ValueError, RecursionError, AttributeError, TypeError):
        return []


def _forget_beside_tables(store: Store, ids: Collection[str], uris: Collection[str]) -> list[str]:
    """Erase ids, URIs and carried columns of videos from all files but the tables; return the names of deleted files.

    In records and logs of runs they become "(removed)". Indexes of archives lose the members, or are deleted. Files in
    ``repaired/`` that may have a row of the videos, and all unfinished files, are deleted. No run may be writing.

    Args:
        uris: the URIs in the rows of the videos; empty if an earlier removal deleted those rows.
    """
    deleted_names = remove_members(store, uris, ids)
    forget_in_runs(store, ids, uris)
    deleted_names += delete_unfinished(store, _FOLDERS)
    for file in store.list_files(KEPT_IN):
        if _may_hold_video(store.read(file.name), ids):
            store.delete(file.name)
            deleted_names.append(file.name)
    return deleted_names


def _list_strays_with(store: Store, ids: Collection[str]) -> list[str]:
    """List files in videos/ and tokens/ that do not have a name of the cache's files and may hold one of the videos.

    A Parquet file is listed if it has a row of them or cannot be read, any other file if its bytes contain an id. Empty
    files are not listed.
    """
    names = []
    for folder, is_own in ((VIDEOS, is_table_name), (TOKENS, has_shard_form)):
        for file in store.list_files(folder):
            if file.size and not is_own(file.name):
                data = store.read(file.name)
                is_parquet = data.startswith(_MAGIC)
                if _may_hold_video(data, ids) if is_parquet else any(video_id.encode() in data for video_id in ids):
                    names.append(file.name)
    return names


def _may_hold_video(data: bytes, ids: Collection[str]) -> bool:
    """Return True if the Parquet file in ``data`` has a row of one of the videos, or cannot be read."""
    try:
        table = read_bounded(data, ["video_id"])
    except (pa.ArrowException, OSError, ValueError):
        return True
    return "video_id" in table.column_names and not set(ids).isdisjoint(table["video_id"].to_pylist())
