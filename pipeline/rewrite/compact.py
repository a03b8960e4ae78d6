"""``jobs.compact --tokens``: copy the videos of small token shards to larger shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from pipeline.cache.header import compute_fingerprint, read_header
from pipeline.cache.live import LiveVideos, make_membership_mask, select_ok
from pipeline.cache.merging import merge_table_files
from pipeline.cache.schema import TOKENS
from pipeline.cache.table import VideosTable
from pipeline.cache.token_shard import is_shard_name, parse_shard_id
from pipeline.cache.writer import SHARD_BYTES, make_batches, move_videos
from pipeline.runner.claim import Claim
from pipeline.runner.cluster.connection import collect_provenance
from pipeline.runner.run_record import COMMITTED_KEY, RUNS, RunFile, make_run_id, read_record
from pipeline.storage.stores import Store

_EMPTIED_KEY = "emptied"  # key of a run's record: the token shards whose videos were copied to other shards


@dataclass
class JoinResult:
    """The result of ``join_tokens``; names are those of token shards.

    Attributes:
        run_id: the run whose record in runs/ names the emptied shards; "" if nothing was joined.
        read: the small shards that were emptied.
        deleted: the shards that earlier joins had emptied.
    """

    run_id: str = ""
    videos: int = 0
    read: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield one or two lines for the terminal: the joined shards, and the deleted shards if there are any."""
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
    """Join small token shards into shards of about ``shard_bytes``, and delete the shards that earlier joins emptied.

    A shard is small below half of ``shard_bytes``. Only shards that live rows name are joined, two or more at a time.
    The emptied shards stay for current readers; the run's record names them, so that a later call deletes them. If any
    shards were joined, the files of the videos table are merged too.

    Args:
        keep: the age of a join from which on its emptied shards are deleted, unless a live row names them; also the age
            from which the sources of earlier merges of the table are deleted.

    Raises:
        NotACache: ``store`` has no valid header.
        CacheLocked: another run is writing to the cache.
        UsageError: nothing can be written there, or a folder of the cache is a symbolic link.
        CorruptShard: a token shard or a file of the videos table is damaged.
    """
    made_with = compute_fingerprint(read_header(store)["identity"])
    result = JoinResult()
    run_id = make_run_id()
    with Claim(store, run_id, say):
        live = select_ok(LiveVideos.read(store, made_with, ("status", "token_shard", "first_row_group"))[1])
        live_shards = set(live["token_shard"].to_pylist())
        result.deleted = _delete_emptied(store, live_shards, keep)
        small = [file for file in store.list_files(TOKENS) if file.name in live_shards and 2 * file.size < shard_bytes]
        bundles = [files for files in make_batches(small, lambda file: file.size, shard_bytes) if len(files) > 1]
        if not bundles:
            return result
        result.run_id = run_id
        table = VideosTable(store)
        with RunFile(store, {**collect_provenance(run_id), "joins": len(bundles)}) as run_file:
            for number, files in enumerate(bundles):
                names = [file.name for file in files]
                result.read += names
                run_file.save(**{_EMPTIED_KEY: result.read})  # first, so that a kill forgets no emptied shard
                locations = live.filter(make_membership_mask(live["token_shard"], names))
                rows = move_videos(table, run_id, number, locations, made_with)
                result.videos += len(rows)
                result.written.append(rows[0]["token_shard"])
                run_file.note(**{COMMITTED_KEY: [parse_shard_id(name) for name in result.written]})
                say(f"{number + 1:,} of {len(bundles):,} token shards written")
        merge_table_files(store, made_with, everything=True, keep=keep)
    return result


def _delete_emptied(store: Store, live_shards: Collection[str], keep: timedelta) -> list[str]:
    """Delete the token shards that joins emptied at least ``keep`` ago and no live row names; return their names.

    The age is that of the join's record, which stays. A name in a record that is not directly in the folder of token
    shards is ignored.
    """
    deleted_names = []
    for record in store.names(RUNS, ".json"):
        shards = read_record(store, record).get(_EMPTIED_KEY)
        if isinstance(shards, list) and store.compute_age(record) >= keep:
            for name in filter(is_shard_name, shards):
                if name not in live_shards and store.exists(name):
                    store.delete(name)
                    deleted_names.append(name)
    return deleted_names
