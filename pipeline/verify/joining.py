"""``jobs.compact --tokens``: join the small token shards that a slow run leaves.

The videos of small shards are written again, many to a shard, and rows that count one rewrite more name the new place.
So a kill anywhere leaves both, of which the rule of ``pipeline.cache.live_rows`` takes one, with the same tokens. The
record of a join names the shards that it emptied; a later join deletes them, once readers had time to go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.header import fingerprint
from pipeline.cache.live_rows import TOKENS, VideoRows, in_shard_order, ok_rows
from pipeline.cache.live_videos import LiveVideos
from pipeline.cache.merging import merge
from pipeline.cache.reader import read_header
from pipeline.cache.writer import SHARD_BYTES, bundled, commit, token_shard_id
from pipeline.execution.claim import Claim
from pipeline.execution.cluster import provenance
from pipeline.execution.request import new_run_id
from pipeline.execution.run_record import COMMITTED, RUNS, RunFile
from pipeline.storage.stores import Store
from pipeline.verify.repair import move_videos

_EMPTIED = "emptied"  # key of a record: the token shards whose videos were written again
_VERSIONS = ("gstep-cache", "pyarrow")


@dataclass
class Joined:
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


def join_tokens(store: Store, say: Callable[[str], object], keep: timedelta, shard_bytes: int = SHARD_BYTES) -> Joined:
    """Join token shards of less than half of ``shard_bytes``, and delete those that were emptied ``keep`` ago.

    Raises NotACache, CacheLocked where a run writes to it, CorruptShard where a token shard is damaged, and OSError.
    """
    header = read_header(store)
    done, run_id, made_with = Joined(), new_run_id(), fingerprint(header["identity"])
    with Claim(store, run_id, say):
        live = ok_rows(LiveVideos.open(store, made_with).live(("status", "token_shard", "first_row_group")))
        _delete_emptied(store, live, keep, done)
        bundles = _bundles(store, live, shard_bytes)
        if bundles:
            done.run_id = run_id
            run_file = RunFile(store, {**provenance(run_id, _VERSIONS), "joins": len(bundles)})
            with run_file:
                for number, names in enumerate(bundles):
                    run_file.save(**{_EMPTIED: [*done.read, *names]})  # before they are, so that none is forgotten
                    _join(store, run_id, number, live, names, made_with, done)
                    run_file.note(**{COMMITTED: [token_shard_id(name) for name in done.written]})
                    say(f"{number + 1:,} of {len(bundles):,} token shards written")
            merge(store, made_with, everything=True, keep=keep)
    return done


def _bundles(store: Store, live: pa.Table, shard_bytes: int) -> list[list[str]]:
    """List the names of small token shards that make a shard of about ``shard_bytes`` together, two or more."""
    named = set(live["token_shard"].to_pylist())
    small = [file for file in store.listed(TOKENS) if file.name in named and 2 * file.size < shard_bytes]
    bundles = bundled(small, lambda file: file.size, shard_bytes)
    return [[file.name for file in bundle] for bundle in bundles if len(bundle) > 1]


def _join(
    store: Store, run_id: str, number: int, live: pa.Table, names: list[str], made_with: str, done: Joined
) -> None:
    """Write the live videos of these token shards as one, and commit their rows. Raises CorruptShard, OSError."""
    mine = live.filter(pc.is_in(live["token_shard"], value_set=pa.array(names)))
    moved = move_videos(store, run_id, list(VideoRows(store).each(in_shard_order(mine))))
    commit(store, run_id, number, moved, made_with=made_with)
    done.videos += len(moved)
    done.read += names
    done.written.append(moved[0]["token_shard"])


def _delete_emptied(store: Store, live: pa.Table, keep: timedelta, done: Joined) -> None:
    """Delete the token shards that earlier joins emptied at least ``keep`` ago and that no live row names."""
    named = set(live["token_shard"].to_pylist())
    for record in store.names(RUNS, ".json"):
        emptied = json.loads(store.read(record)).get(_EMPTIED, [])
        if emptied and store.age(record) >= keep:
            for name in emptied:
                if name not in named and store.exists(name):
                    store.delete(name)
                    done.deleted.append(name)
