"""Videos whose tokens are written again to other token shards: ``jobs.remove`` and ``jobs.compact --tokens``.

A removal first commits a row with status "removed". This row beats every other row of its video: from then on readers
refuse the video and no run encodes it again. Files beside the tables forget the video (``pipeline.verify.forget``).
Then the other videos of its token shards move to new ones, and the table is merged, which leaves out superseded rows.
Last, the files with the video are deleted, once readers had time to finish.

A join writes the videos of small token shards again, many to a shard. Its record names the shards that it emptied, and
a later join deletes them.

A moved row counts one rewrite more. A kill anywhere leaves both copies, and the rule of
``pipeline.cache.live`` takes one of them, with the same tokens. Rerun the command to resume.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.header import fingerprint, read_header
from pipeline.cache.live import RULE_COLUMNS, LiveVideos, list_nameable_ids, select_ok, sort_by_shard
from pipeline.cache.merging import merge
from pipeline.cache.near_ids import near_ids
from pipeline.cache.reader import map_in_order
from pipeline.cache.schema import TOKENS
from pipeline.cache.table import VideosTable, add_places, list_table_files, read_file
from pipeline.cache.token_shard import has_shard_form, is_shard_name, parse_shard_id, read_footer_ids, read_videos
from pipeline.cache.writer import SHARD_BYTES, commit_records, make_bundles, put_token_shard
from pipeline.errors import CorruptShard, describe_near, name_first, printable
from pipeline.rows import JsonObject, VideoRecord, VideoRow
from pipeline.runner.claim import Claim
from pipeline.runner.cluster.connection import provenance
from pipeline.runner.run_record import COMMITTED_KEY, RUNS, RunFile, new_run_id, read_record
from pipeline.storage.stores import Store
from pipeline.verify.forget import forget_videos, list_strays_with

_COLUMNS = ("video_id", *RULE_COLUMNS, "token_shard", "model_extra", "uri")
# Key in a removed row's model_extra: the shards that held the video, for a later run of the removal.
_SHARDS_KEY = "token_shards"
_EMPTIED_KEY = "emptied"  # key of a join's record: the token shards whose videos were written again
_MAX_EXAMPLES = 5  # unknown ids that a result names
_VERSIONS = ("gstep-cache", "pyarrow")


def move_videos(store: Store, run_id: str, rows: Sequence[VideoRow]) -> list[VideoRow]:
    """Copy the tokens of videos to one new token shard, and return their changed rows, which the caller commits.

    Each row counts one rewrite more. Raises CorruptShard where a video is damaged, and OSError.
    """
    new_rows: list[VideoRow] = [{**row, "rewritten": (row["rewritten"] or 0) + 1} for row in rows]
    put_token_shard(store, run_id, new_rows, read_videos(store, rows))
    return new_rows


@dataclass
class RemovalResult:
    """The result of a removal.

    Attributes:
        run_id: it names the record in runs/.
        videos: ids that are removed now; ``unknown`` are those of them that had no row.
        likely: ids that may have been meant by the first unknown ids.
        moved: other videos whose tokens were rewritten.
        deleted: files that held the videos.
        unread: damaged token shards of other videos, which may hold tokens of the removed ones too.
        strays: files in the cache's folders that are none of its files, as copies, and may hold the videos.
    """

    run_id: str
    videos: int = 0
    unknown: list[str] = field(default_factory=list)
    likely: dict[str, list[str]] = field(default_factory=dict)
    moved: int = 0
    deleted: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield lines for the user about the result."""
        yield f"{self.videos:,} videos removed for good, {self.moved:,} others moved to new token shards"
        yield f"{len(self.deleted):,} files deleted; {self.run_id} in runs/ says why"
        if self.unknown:
            shown = ", ".join(self.unknown[:_MAX_EXAMPLES])
            yield f"note: {len(self.unknown):,} of the videos had no row, and never get one now: {shown}"
            for video_id, likely in self.likely.items():
                names = ", ".join(describe_near(video_id, name) for name in likely)
                yield f"note: {video_id} was not there; did you mean {names}? It stays until it is named"
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
) -> RemovalResult:
    """Remove these videos for ``reason``, also ids without a row; repeat it to resume an interrupted removal.

    Waits for ``keep`` before it deletes token shards that held the videos, so that readers can finish. Then it deletes
    files of the videos table that were merged at least ``keep`` ago. The names of all deleted files are in the result.

    Raises NotACache, CacheLocked where a run writes to it, CorruptShard where a token shard is damaged, and OSError.
    """
    identity = fingerprint(read_header(store)["identity"])
    result = RemovalResult(new_run_id(), len(ids))
    record: JsonObject = {**provenance(result.run_id, _VERSIONS), "removed": len(ids), "reason": reason}
    with Claim(store, result.run_id, say), RunFile(store, record):
        _erase(store, _Removal(store, identity, result, frozenset(ids)), reason, say, keep)
    return result


def erase_removed(store: Store, identity: str, run_id: str, say: Callable[[str], object]) -> RemovalResult:
    """Erase what is left of all removed videos but their removed rows: rows and tokens that came from other caches.

    Calls ``say`` with the names of deleted files, and of files that may still hold the videos. Nothing is kept for
    readers, who find moved videos by themselves. The caller holds the claim of the run ``run_id``. Raises CorruptShard
    where a token shard is damaged, and OSError.
    """
    rows = LiveVideos.read(store, identity, ("video_id", "status"))[1]
    ids = frozenset(rows.filter(pc.equal(rows["status"], "removed"))["video_id"].to_pylist())
    result = RemovalResult(run_id, len(ids))
    if ids:
        removal = _Removal(store, identity, result, ids)
        _erase(store, removal, "removed from another cache", say, timedelta(0))
        if n_deleted := len(result.deleted):
            say(f"{n_deleted:,} files deleted that may hold removed videos: {name_first(result.deleted, n_deleted)}")
        for line in result.iter_warnings():
            say(line)
    return result


def _erase(store: Store, removal: _Removal, reason: str, say: Callable[[str], object], keep: timedelta) -> None:
    """Carry out a removal; raises as ``remove_videos``, which says what ``keep`` does."""
    result = removal.result
    removal.mark(reason)
    removal.find_others()
    result.deleted += removal.forget()
    removal.move_others()
    removal.merge(keep)
    if unused := removal.unused():
        if keep:
            say(f"waiting {keep.total_seconds() / 60:g} minutes for readers of {len(unused)} token shards")
            time.sleep(keep.total_seconds())
        for name in unused:
            store.delete(name)
        result.deleted += unused
    result.deleted += removal.merge(keep)
    result.strays = list_strays_with(store, removal.ids)


class _Removal:
    """The steps of one removal of videos.

    Rows of another identity, as of a method's old code, are no rows of the cache, but may hold the videos too. Each
    identity has live rows of its own, and keeps the videos that move.
    """

    def __init__(self, store: Store, identity: str, result: RemovalResult, ids: frozenset[str]) -> None:
        self._store, self._identity, self.result, self.ids = store, identity, result, ids
        videos, _ = LiveVideos.read(store, identity, ("video_id",))  # which finds the files of another identity
        self._identities = [identity, *sorted(filter(None, {*videos.table.foreign.values()}))]
        self._rows = self._read()
        self._shards_by_video = self._find_shards()

    def _live(self, identity: str) -> pa.Table:
        """Read _COLUMNS of the live rows of one identity, with each row's file and place."""
        return LiveVideos.read(self._store, identity, _COLUMNS)[1]

    def _read(self) -> pa.Table:
        """Read _COLUMNS of all rows, superseded ones too, with each row's file and place."""
        files = list_table_files(self._store)
        tables = [add_places(read_file(self._store, file, _COLUMNS), file.name) for file in files]
        return pa.concat_tables(tables)

    def _read_removed(self) -> pa.Table:
        """Select all rows of the removed videos."""
        ids = pa.array(sorted(self.ids), pa.string())
        return self._rows.filter(pc.is_in(self._rows["video_id"], value_set=ids))

    def _find_shards(self) -> dict[str, set[str]]:
        """Return the token shards of each removed video: those its rows name, or that its removed row recorded."""
        shards: dict[str, set[str]] = {video_id: set() for video_id in self.ids}
        for row in self._read_removed().select(["video_id", "status", "token_shard", "model_extra"]).to_pylist():
            is_removed = row["status"] == "removed"
            shards[row["video_id"]] |= (
                _read_shard_names(row["model_extra"])
                if is_removed
                else set(filter(is_shard_name, [row["token_shard"]]))
            )
        return shards

    def mark(self, reason: str) -> None:
        """Commit a "removed" row for each video without such a row, also for unknown ids, and read the rows again.

        ``unknown`` of the result gets the unknown ids, and ``likely`` similar ids for the first of them.
        """
        for identity in self._identities:
            live = {row["video_id"]: row for row in self._live(identity).to_pylist()}
            ids = self.ids if identity == self._identity else self.ids & live.keys()
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
                commit_records(self._store, self.result.run_id, 0, rows, made_with=identity)
        self.result.unknown = sorted(self.ids.difference(self._rows["video_id"].to_pylist()))
        for video_id in self.result.unknown[:_MAX_EXAMPLES]:
            if likely := [name for name in near_ids(video_id, list_nameable_ids(self._rows)) if name not in self.ids]:
                self.result.likely[video_id] = likely
        self._rows = self._read()

    def find_others(self) -> None:
        """Add the token shards that hold a removed video though no row of it names them.

        These are shards of earlier attempts, of runs beside another one and of merged caches, whose rows merges drop,
        and of killed runs, which have no rows. A shard that cannot be read counts as one that holds all the videos,
        unless a live row names it: ``unread`` of the result gets such shards. A file of another name counts only if
        it can be read.
        """
        names, live_shards = self._store.names(TOKENS, ".parquet"), self._live_shards()
        for name, ids in zip(names, map_in_order(self._read_ids, names, 8, 16), strict=True):
            if ids is None and name in live_shards:
                self.result.unread.append(name)
                continue
            if ids is None and not has_shard_form(name):
                continue  # somebody's own file, which ``strays`` names
            for video_id in self.ids if ids is None else self.ids.intersection(ids):
                self._shards_by_video[video_id].add(name)

    def _read_ids(self, name: str) -> Collection[str] | None:
        """Read the ids of the videos in a token shard; None if it is damaged."""
        try:
            return read_footer_ids(self._store, name)
        except CorruptShard:
            return None

    def _live_shards(self) -> set[str]:
        """Read the names of the token shards that live rows name."""
        return {name for identity in self._identities for name in self._live(identity)["token_shard"].to_pylist()}

    def forget(self) -> list[str]:
        """Take what is said of the videos out of the files beside the tables; return the names of deleted files."""
        return forget_videos(self._store, self.ids, set(self._read_removed()["uri"].to_pylist()) - {""})

    def move_others(self) -> None:
        """Copy the other videos of token shards that hold a removed video to new shards, and commit their rows."""
        full, number = VideosTable(self._store), 0
        names = pa.array(sorted(set().union(*self._shards_by_video.values())), pa.string())
        for identity in self._identities:
            live = self._live(identity)
            ok = select_ok(live.filter(pc.is_in(live["token_shard"], value_set=names)))
            for name in sorted(set(ok["token_shard"].to_pylist())):
                number += 1
                rows = full.read_rows(ok.filter(pc.equal(ok["token_shard"], name)))
                records = move_videos(
                    self._store, self.result.run_id, sorted(rows, key=lambda row: row["first_row_group"])
                )
                commit_records(self._store, self.result.run_id, number, records, made_with=identity)
                self.result.moved += len(records)

    def merge(self, keep: timedelta) -> list[str]:
        """Merge the table, which leaves out the rows of removed videos; return the files of earlier merges it deleted.

        These are at least ``keep`` old.
        """
        results = [merge(self._store, identity, everything=True, keep=keep) for identity in self._identities]
        return [name for result in results for name in result.deleted]

    def unused(self) -> list[str]:
        """Return the token shards that hold a removed video and that no live row names any more.

        Reads the table again.
        """
        own_shards = set().union(*self._shards_by_video.values())
        return sorted(name for name in own_shards - self._live_shards() if self._store.exists(name))


def _read_shard_names(text: str | None) -> set[str]:
    """Read the token shards that a removed row names; names of other files are left out."""
    try:
        names = json.loads(text or "{}").get(_SHARDS_KEY, ())
        return set(filter(is_shard_name, names))
    except (ValueError, RecursionError, AttributeError, TypeError):
        return set()


@dataclass
class JoinResult:
    """The result of joining token shards.

    Attributes:
        run_id: it names the record in runs/; "" where nothing was joined.
        videos: videos that were written again.
        read: small token shards that they were in.
        written: token shards that they are in now.
        deleted: token shards that earlier joins emptied.
    """

    run_id: str = ""
    videos: int = 0
    read: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield lines for the user about the result."""
        if self.read:
            yield (
                f"{self.videos:,} videos of {len(self.read):,} token shards are in {len(self.written):,} now; the old "
                "ones stay for a while, for those who read them"
            )
        else:
            yield "no token shards to join"
        if self.deleted:
            yield f"{len(self.deleted):,} token shards of earlier joins deleted"


def join_tokens(
    store: Store, say: Callable[[str], object], keep: timedelta, shard_bytes: int = SHARD_BYTES
) -> JoinResult:
    """Join token shards of less than half of ``shard_bytes``, and delete shards that earlier joins emptied.

    An emptied shard is deleted if its join is at least ``keep`` old and no live row names it. The shards that this join
    empties stay. If it joins any, the files of the videos table are merged too. ``say`` gets lines of progress.

    Raises NotACache, CacheLocked where a run writes to it, CorruptShard where a token shard is damaged, and OSError.
    """
    header = read_header(store)
    result, run_id, made_with = JoinResult(), new_run_id(), fingerprint(header["identity"])
    with Claim(store, run_id, say):
        live = select_ok(LiveVideos.read(store, made_with, ("status", "token_shard", "first_row_group"))[1])
        _delete_emptied(store, live, keep, result)
        bundles = _bundles(store, live, shard_bytes)
        if bundles:
            result.run_id = run_id
            run_file = RunFile(store, {**provenance(run_id, _VERSIONS), "joins": len(bundles)})
            with run_file:
                for number, names in enumerate(bundles):
                    # Saved before the shards are emptied, so that none is forgotten.
                    run_file.save(**{_EMPTIED_KEY: [*result.read, *names]})
                    _join(store, run_id, number, live, names, made_with, result)
                    run_file.note(**{COMMITTED_KEY: [parse_shard_id(name) for name in result.written]})
                    say(f"{number + 1:,} of {len(bundles):,} token shards written")
            merge(store, made_with, everything=True, keep=keep)
    return result


def _bundles(store: Store, live: pa.Table, shard_bytes: int) -> list[list[str]]:
    """List the names of small token shards that make a shard of about ``shard_bytes`` together, two or more."""
    live_shards = set(live["token_shard"].to_pylist())
    small = [file for file in store.list_files(TOKENS) if file.name in live_shards and 2 * file.size < shard_bytes]
    bundles = make_bundles(small, lambda file: file.size, shard_bytes)
    return [[file.name for file in bundle] for bundle in bundles if len(bundle) > 1]


def _join(
    store: Store, run_id: str, number: int, live: pa.Table, names: list[str], made_with: str, result: JoinResult
) -> None:
    """Write the live videos of these token shards as one shard, commit their rows, and add them to ``result``.

    Raises CorruptShard, OSError.
    """
    shard_rows = live.filter(pc.is_in(live["token_shard"], value_set=pa.array(names)))
    records = move_videos(store, run_id, list(VideosTable(store).read_rows(sort_by_shard(shard_rows))))
    commit_records(store, run_id, number, records, made_with=made_with)
    result.videos += len(records)
    result.read += names
    result.written.append(records[0]["token_shard"])


def _delete_emptied(store: Store, live: pa.Table, keep: timedelta, result: JoinResult) -> None:
    """Delete the token shards that joins emptied at least ``keep`` ago, unless a live row names them.

    The records of the joins stay. The names of the deleted shards are added to ``result.deleted``.
    """
    live_shards = set(live["token_shard"].to_pylist())
    for record in store.names(RUNS, ".json"):
        shards = read_record(store, record).get(_EMPTIED_KEY)
        if isinstance(shards, list) and store.age(record) >= keep:
            for name in filter(is_shard_name, shards):
                if name not in live_shards and store.exists(name):
                    store.delete(name)
                    result.deleted.append(name)
