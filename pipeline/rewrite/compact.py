"""``jobs.compact --tokens``: the videos of small token shards are written again, many to a shard.

The record of the run names the shards that it emptied, and a later run deletes them. Rerun the command after a kill.
Merging the files of the videos table is the work of ``pipeline.cache.merging``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from pipeline.cache.header import fingerprint, read_header
from pipeline.cache.live import LiveVideos, is_among, select_ok
from pipeline.cache.merging import merge
from pipeline.cache.schema import TOKENS
from pipeline.cache.table import VideosTable
from pipeline.cache.token_shard import is_shard_name, parse_shard_id
from pipeline.cache.writer import SHARD_BYTES, make_bundles, move_videos
from pipeline.runner.claim import Claim
from pipeline.runner.cluster.connection import provenance
from pipeline.runner.run_record import COMMITTED_KEY, RUNS, RunFile, new_run_id, read_record
from pipeline.storage.stores import Store

_EMPTIED_KEY = "emptied"  # key of a record: the token shards whose videos were written again


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
    made_with, result, run_id = fingerprint(read_header(store)["identity"]), JoinResult(), new_run_id()
    with Claim(store, run_id, say):
        live = select_ok(LiveVideos.read(store, made_with, ("status", "token_shard", "first_row_group"))[1])
        live_shards = set(live["token_shard"].to_pylist())
        result.deleted = _delete_emptied(store, live_shards, keep)
        small = [file for file in store.list_files(TOKENS) if file.name in live_shards and 2 * file.size < shard_bytes]
        bundles = [files for files in make_bundles(small, lambda file: file.size, shard_bytes) if len(files) > 1]
        if not bundles:
            return result
        result.run_id, table = run_id, VideosTable(store)
        with RunFile(store, {**provenance(run_id), "joins": len(bundles)}) as run_file:
            for number, files in enumerate(bundles):
                names = [file.name for file in files]
                result.read += names
                run_file.save(**{_EMPTIED_KEY: result.read})  # before the shards are emptied, so that none is forgotten
                places = live.filter(is_among(live["token_shard"], names))
                rows = move_videos(table, run_id, number, places, made_with)
                result.videos += len(rows)
                result.written.append(rows[0]["token_shard"])
                run_file.note(**{COMMITTED_KEY: [parse_shard_id(name) for name in result.written]})
                say(f"{number + 1:,} of {len(bundles):,} token shards written")
        merge(store, made_with, everything=True, keep=keep)
    return result


def _delete_emptied(store: Store, live_shards: Collection[str], keep: timedelta) -> list[str]:
    """Delete the token shards that joins emptied at least ``keep`` ago, unless a live row names them.

    Returns the names of the deleted shards. The records of the joins stay.
    """
    deleted_names = []
    for record in store.names(RUNS, ".json"):
        shards = read_record(store, record).get(_EMPTIED_KEY)
        if isinstance(shards, list) and store.age(record) >= keep:
            for name in filter(is_shard_name, shards):
                if name not in live_shards and store.exists(name):
                    store.delete(name)
                    deleted_names.append(name)
    return deleted_names
