"""``jobs.remove`` on a cache: videos are removed for good.

A removal first commits a row with status "removed". This row beats every other row of its video: from then on readers
refuse the video and no run encodes it again. Files beside the tables forget the video. Then the other videos of its
token shards move to new ones, and the table is merged, which leaves out superseded rows. Last, the files with the video
are deleted, once readers had time to finish. Rerun the command after a kill.
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
from pipeline.cache.header import fingerprint, read_header
from pipeline.cache.live import RULE_COLUMNS, LiveVideos, is_among, list_nameable_ids, select_ok, select_removed
from pipeline.cache.merging import merge
from pipeline.cache.reader import map_in_order
from pipeline.cache.schema import TOKENS, VIDEOS
from pipeline.cache.table import VideosTable, add_places, is_table_name, list_table_files, make_empty_table, read_file
from pipeline.cache.token_shard import has_shard_form, is_shard_name, read_footer_ids
from pipeline.cache.writer import commit_records, move_videos
from pipeline.errors import CorruptShard, name_first, printable
from pipeline.inputs.indexes import remove_members
from pipeline.rows import VideoRecord
from pipeline.runner.removal import Removal, claim_for_removal, delete_unfinished, forget_in_runs
from pipeline.runner.run_record import RUNS, new_run_id
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
        moved: other videos whose tokens were rewritten.
        unread: damaged token shards of other videos, which may hold tokens of the removed ones too.
        strays: files in the cache's folders that are none of its files, as copies, and may hold the videos.
    """

    moved: int = 0
    unread: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield lines for the user about the result."""
        yield f"{self.videos:,} videos removed for good, {self.moved:,} others moved to new token shards"
        yield f"{len(self.deleted):,} files deleted; {self.run_id} in runs/ says why"
        yield from super().lines()
        yield from self.iter_warnings()

    def iter_warnings(self) -> Iterator[str]:
        """Yield a line about each kind of file that may still hold the videos."""
        if self.unread:
            yield (
                f"note: {len(self.unread):,} damaged token shards of other videos, e.g. {self.unread[0]}, may hold "
                "tokens of the videos: run jobs.verify CACHE --repair, then this command again"
            )
        for name in self.strays:
            yield f"warning: {name} is no file of this cache, and may hold the videos: delete it if it does"


def remove_videos(
    store: Store, ids: Sequence[str], reason: str, say: Callable[[str], object], keep: timedelta
) -> CacheRemoval:
    """Remove these videos for ``reason``, also ids without a row; repeat it to resume an interrupted removal.

    Waits for ``keep`` before it deletes token shards that held the videos, so that readers can finish. Then it deletes
    files of the videos table that were merged at least ``keep`` ago. The names of all deleted files are in the result.

    Raises NotACache, CacheLocked where a run writes to it, CorruptShard where a token shard is damaged, and OSError.
    """
    identity = fingerprint(read_header(store)["identity"])
    result = CacheRemoval(new_run_id(), len(ids))
    with claim_for_removal(store, result, reason, say):
        _VideosRemover(store, identity, result, frozenset(ids)).run(reason, say, keep)
    return result


def erase_removed(store: Store, identity: str, run_id: str, say: Callable[[str], object]) -> CacheRemoval:
    """Erase what is left of all removed videos but their removed rows: rows and tokens that came from other caches.

    Calls ``say`` with the names of deleted files, and of files that may still hold the videos. Nothing is kept for
    readers, who find moved videos by themselves. The caller holds the claim of the run ``run_id``. Raises CorruptShard
    where a token shard is damaged, and OSError.
    """
    removed_rows = select_removed(LiveVideos.read(store, identity, ("video_id", "status"))[1])
    ids = frozenset(removed_rows["video_id"].to_pylist())
    result = CacheRemoval(run_id, len(ids))
    if ids:
        _VideosRemover(store, identity, result, ids).run("removed from another cache", say, timedelta(0))
        if n_deleted := len(result.deleted):
            say(f"{n_deleted:,} files deleted that may hold removed videos: {name_first(result.deleted, n_deleted)}")
        for line in result.iter_warnings():
            say(line)
    return result


class _VideosRemover:
    """The steps of one removal of videos from a cache.

    Rows of another identity, as of a method's old code, are no rows of the cache, but may hold the videos too. Each
    identity has live rows of its own, and keeps the videos that move.
    """

    def __init__(self, store: Store, identity: str, result: CacheRemoval, ids: frozenset[str]) -> None:
        self._store, self._identity, self._result, self._ids = store, identity, result, ids
        videos, _ = LiveVideos.read(store, identity, ("video_id",))  # which finds the files of another identity
        self._identities = [identity, *sorted(filter(None, {*videos.table.foreign.values()}))]
        self._rows = self._read()
        # The token shards of each removed video: at first those that its rows name, or that its removed row recorded.
        self._shards_by_video: dict[str, set[str]] = {video_id: set() for video_id in ids}
        for row in self._read_removed().select(["video_id", "status", "token_shard", "model_extra"]).to_pylist():
            names = _read_shard_names(row["model_extra"]) if row["status"] == "removed" else [row["token_shard"]]
            self._shards_by_video[row["video_id"]].update(filter(is_shard_name, names))

    def run(self, reason: str, say: Callable[[str], object], keep: timedelta) -> None:
        """Carry out the removal. Raises as ``remove_videos``, which says what ``keep`` does."""
        result = self._result
        self._mark(reason)
        self._find_others()
        uris = set(self._read_removed()["uri"].to_pylist()) - {""}
        result.deleted += _forget_beside_tables(self._store, self._ids, uris)
        self._move_others()
        self._merge(keep)
        unused = self._list_own_shards() - self._live_shards()  # by the table as it is now
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
        """Read _COLUMNS of the live rows of one identity, with each row's file and place."""
        return LiveVideos.read(self._store, identity, _COLUMNS)[1]

    def _read(self) -> pa.Table:
        """Read _COLUMNS of all rows, superseded ones too, with each row's file and place."""
        files = list_table_files(self._store)
        tables = [add_places(read_file(self._store, file, _COLUMNS), file.name) for file in files]
        return pa.concat_tables([make_empty_table(_COLUMNS), *tables])

    def _read_removed(self) -> pa.Table:
        """Select all rows of the removed videos."""
        return self._rows.filter(is_among(self._rows["video_id"], self._ids))

    def _mark(self, reason: str) -> None:
        """Commit a "removed" row for each video without such a row, also for unknown ids, and read the rows again.

        The result gets the unknown ids, and similar ids for the first of them.
        """
        for identity in self._identities:
            live = {row["video_id"]: row for row in self._live(identity).to_pylist()}
            ids = self._ids if identity == self._identity else self._ids & live.keys()
            rows: list[VideoRecord] = [
                {
                    "video_id": video_id,
                    "uri": "",
                    "status": "removed",
                    "error_message": printable(reason),
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

    def _find_others(self) -> None:
        """Add the token shards that hold a removed video though no row of it names them.

        These are shards of earlier attempts, of runs beside another one and of merged caches, whose rows merges drop,
        and of killed runs, which have no rows. A shard that cannot be read counts as one that holds all the videos,
        unless a live row names it: ``unread`` of the result gets such shards. A file of another name counts only if
        it can be read.
        """

        def read_ids(name: str) -> Collection[str] | None:
            try:
                return read_footer_ids(self._store, name)
            except CorruptShard:
                return None

        names, live_shards = self._store.names(TOKENS, ".parquet"), self._live_shards()
        for name, ids in zip(names, map_in_order(read_ids, names, 8, 16), strict=True):
            if ids is None and name in live_shards:
                self._result.unread.append(name)
                continue
            if ids is None and not has_shard_form(name):
                continue  # somebody's own file, which ``strays`` names
            for video_id in self._ids if ids is None else self._ids.intersection(ids):
                self._shards_by_video[video_id].add(name)

    def _live_shards(self) -> set[str]:
        """Read the names of the token shards that live rows name."""
        return {name for identity in self._identities for name in self._live(identity)["token_shard"].to_pylist()}

    def _list_own_shards(self) -> set[str]:
        """Return the token shards that hold a removed video."""
        return set().union(*self._shards_by_video.values())

    def _move_others(self) -> None:
        """Move the other videos of token shards that hold a removed video to new shards, a shard for each."""
        table, number, names = VideosTable(self._store), 0, self._list_own_shards()
        for identity in self._identities:
            live = self._live(identity)
            ok = select_ok(live.filter(is_among(live["token_shard"], names)))
            for name in sorted(set(ok["token_shard"].to_pylist())):
                number += 1
                places = ok.filter(pc.equal(ok["token_shard"], name))
                self._result.moved += len(move_videos(table, self._result.run_id, number, places, identity))

    def _merge(self, keep: timedelta) -> None:
        """Merge the table, which leaves out the rows of removed videos.

        The result gets the files of earlier merges that were deleted, which are at least ``keep`` old.
        """
        for identity in self._identities:
            self._result.deleted += merge(self._store, identity, everything=True, keep=keep).deleted


def _read_shard_names(text: str | None) -> list[object]:
    """Read the token shards that a removed row of any cache names; they may be names of other files, or no names."""
    try:
        return list(json.loads(text or "{}").get(_SHARDS_KEY, ()))
    except (ValueError, RecursionError, AttributeError, TypeError):
        return []


def _forget_beside_tables(store: Store, ids: Collection[str], uris: Collection[str]) -> list[str]:
    """Take ids, addresses and carried texts of videos out of all files but the tables; return the deleted files.

    Records and logs of runs get "(removed)" instead. Kept indexes lose the members, or are deleted. Replaced files with
    a row of the videos are deleted, and so are all unfinished files.

    ``uris`` are the places that rows had; where an earlier removal has deleted the rows, ``ids`` alone tell. No run may
    be writing. Raises OSError.
    """
    deleted_names = remove_members(store, uris, ids)
    forget_in_runs(store, ids, uris)
    deleted_names += delete_unfinished(store, _FOLDERS)
    for file in store.list_files(KEPT_IN):
        if _may_hold(store.read(file.name), ids):
            store.delete(file.name)
            deleted_names.append(file.name)
    return deleted_names


def _list_strays_with(store: Store, ids: Collection[str]) -> list[str]:
    """List files in the folders of tables that are none of the cache's, as copies and backups, and may hold the videos.

    Their names are not a table's file's or a token shard's. Raises OSError.
    """
    names = []
    for folder, is_own in ((VIDEOS, is_table_name), (TOKENS, has_shard_form)):
        for file in store.list_files(folder):
            if file.size and not is_own(file.name):
                data = store.read(file.name)
                is_parquet = data.startswith(_MAGIC)
                if _may_hold(data, ids) if is_parquet else any(video_id.encode() in data for video_id in ids):
                    names.append(file.name)
    return names


def _may_hold(data: bytes, ids: Collection[str]) -> bool:
    """Return True if a Parquet file has a row of one of the videos, or cannot be read."""
    try:
        table = read_bounded(data, ["video_id"])
    except (pa.ArrowException, OSError, ValueError):
        return True
    return "video_id" in table.column_names and not set(ids).isdisjoint(table["video_id"].to_pylist())
