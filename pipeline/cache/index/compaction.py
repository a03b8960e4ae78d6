"""Making the index (``pipeline.cache.index.files``) of a cache from its videos shards, under the cache's lock.

Blocks and tables of shards are named by their content and written first, ``index.json`` last and in one step: whoever
is killed on the way leaves the earlier index as it was. Files of the index before the last one are removed once they
are a day old, so that readers who have it open go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.cache.header import header_bytes
from pipeline.cache.index.files import BLOCK_SCHEMA, INDEX, ROOT, SHARD_SCHEMA, VERSION, Index, Part, Root
from pipeline.cache.ledger import TIMED, Ledger
from pipeline.cache.live_rows import VIDEOS, parse_videos_shard
from pipeline.cache.schema import digest, write_parquet
from pipeline.errors import CorruptShard, RunFailed
from pipeline.storage.lock import Lock
from pipeline.storage.stores import LocalStore, Store

BLOCK_ROWS = 2**15
SHARDS_A_TABLE = 2**16
OLD = timedelta(days=1)  # after which a file that no index names is removed
_MARKED = 10_000  # videos shards from which on listing them takes long enough to wait for a mark
_MARK_S = 5.0


@dataclass(frozen=True)
class Compacted:
    """What an index covers, and what it took.

    Attributes:
        videos, failed, shards: that it covers; ``new_shards`` of them were in no index.
        n_bytes: of its files.
        written: of these, what was not there before.
        removed: files of earlier indexes.
        why_anew: why the earlier index was not used; "" where it was, or there was none.
        seconds: wall time.
    """

    videos: int
    failed: int
    shards: int
    new_shards: int
    n_bytes: int
    written: int
    removed: int
    why_anew: str
    seconds: float


#: The ids of rows that no index covers, by their numbers over all videos shards.
Texts = Callable[[NDArray[np.int64]], pa.Array]


def compact(
    store: Store, lock: Lock, ledger: Ledger | None = None, *, rebuild: bool = False, texts: Texts | None = None
) -> Compacted:
    """Cover all videos shards of ``store``; the caller holds its ``lock``.

    Memory: about 100 bytes a video, and the ids of those that no index covers. Each videos shard that none covers is
    read twice, or once where a ``ledger`` of all of them is given.

    Args:
        rebuild: whether to read all of them, whatever an index says.
        texts: where the ids of new rows are from; by default they are read from their shards.

    Raises CorruptShard where a videos shard is damaged, RunFailed where the lock is lost, and OSError.
    """
    started = time.monotonic()
    ledger = ledger or Ledger(store, use_index=not rebuild).refresh()
    files = _Files(store, lock, ledger.index)
    root: Root = {
        "schema_version": VERSION,
        "through": max(ledger.names, default=""),
        "mark": None,
        "shards": len(ledger.names),
        "videos": len(ledger),
        "failed": int(np.count_nonzero(ledger.faults(np.arange(len(ledger))))),
        "most_tokens": int(ledger.columns["n_tokens"].max(initial=0)),
        "hidden_size": ledger.hidden_size,
        "classes": ledger.classes,
        "blocks": list(_blocks(files, ledger, _Ids(store, ledger, texts))),
        "shard_tables": list(_shard_tables(files, ledger)),
    }
    root["mark"] = _mark(store, len(ledger.names))
    data = header_bytes(root)
    lock.put(ROOT, data)
    return Compacted(
        videos=root["videos"],
        failed=root["failed"],
        shards=root["shards"],
        new_shards=root["shards"] - ledger.n_covered,
        n_bytes=files.n_bytes + len(data),
        written=files.written + len(data),
        removed=files.remove_old(),
        why_anew=ledger.unusable,
        seconds=time.monotonic() - started,
    )


class _Files:
    """The files of an index, written one after the other; those that are there are not written again."""

    def __init__(self, store: Store, lock: Lock, earlier: Index | None) -> None:
        self._store, self._lock = store, lock
        parts = [] if earlier is None else [*earlier.root["blocks"], *earlier.root["shard_tables"]]
        self._earlier = {part["name"] for part in parts}
        self._named: set[str] = set()
        self.n_bytes = self.written = 0

    def put(self, kind: str, table: pa.Table, first: str) -> Part:
        data = write_parquet(table)
        name = f"{INDEX}/{kind}-{digest(data).partition(':')[2]}.parquet"
        if name not in self._earlier:
            self._lock.commit(name, data)
            self.written += data.size
        self.n_bytes += data.size
        self._named.add(name)
        return {"name": name, "rows": len(table), "first": first}

    def remove_old(self) -> int:
        """Remove what neither this index nor the one before it names, once it is a day old; returns how many."""
        removed = 0
        with suppress(OSError):  # some roles may not delete, and what stays does no harm
            for file in self._store.listed(INDEX):
                if file.name not in self._named | self._earlier and self._store.age(file.name) > OLD:
                    self._lock.check()
                    self._store.delete(file.name)
                    removed += 1
        return removed


def _blocks(files: _Files, ledger: Ledger, ids: _Ids) -> Iterator[Part]:
    """Write the rows of the ledger, which are in the order of their keys."""
    starts = np.array(ledger.starts, np.int64)
    for first in range(0, len(ledger), BLOCK_ROWS):
        rows = slice(first, first + BLOCK_ROWS)
        columns: dict[str, Any] = {name: values[rows] for name, values in ledger.columns.items()}
        place = columns.pop("place")
        shard = np.searchsorted(starts, place, side="right") - 1
        columns |= {"shard": shard.astype(np.uint32), "row": (place - starts[shard]).astype(np.uint32)}
        columns |= {f"{stage}_s": values for stage, values in zip(TIMED, columns.pop("seconds").T, strict=True)}
        columns["video_id"] = ids.of(columns["high"], place)
        table = pa.table([columns[name] for name in BLOCK_SCHEMA.names], schema=BLOCK_SCHEMA)
        key = int(columns["high"][0]) << 64 | int(columns["low"][0])
        yield files.put("videos", table, f"{key:032x}")


def _shard_tables(files: _Files, ledger: Ledger) -> Iterator[Part]:
    ends = np.append(ledger.starts, ledger.n_rows).astype(np.int64)
    live, ok = np.zeros(ledger.n_rows, np.bool_), np.zeros(ledger.n_rows + 1, np.int64)
    live[ledger.columns["place"]] = True
    ok[ledger.columns["place"].astype(np.int64) + 1] = ledger.faults(np.arange(len(ledger))) == 0
    ok = ok.cumsum()
    for first in range(0, len(ledger.names), SHARDS_A_TABLE):
        names = ledger.names[first : first + SHARDS_A_TABLE]
        bounds = ends[first : first + len(names) + 1]
        dead = np.flatnonzero(~live[bounds[0] : bounds[-1]]) + bounds[0]
        cuts = np.searchsorted(dead, bounds)
        within = dead - np.repeat(bounds[:-1], np.diff(cuts))
        columns = [
            pa.array(names, pa.string()),
            pa.array(np.diff(bounds), pa.uint32()),
            pa.array(ledger.failed_rows[first : first + len(names)], pa.uint32()),
            pa.array(np.diff(ok[bounds]), pa.uint32()),
            pa.ListArray.from_arrays(pa.array(cuts, pa.int32()), pa.array(within, pa.uint32())),
        ]
        yield files.put("shards", pa.table(columns, schema=SHARD_SCHEMA), str(first))


class _Ids:
    """The ids of a ledger's rows, in whose place it keeps their hashes.

    They come from the blocks of the index that it began with, and from ``texts`` for the rows of shards that this does
    not cover.
    """

    def __init__(self, store: Store, ledger: Ledger, texts: Texts | None) -> None:
        self._index = ledger.index
        new = ledger.names[ledger.n_covered :]
        self._first_new = ledger.starts[ledger.n_covered] if new else ledger.n_rows
        self._texts = texts or _texts_of(store, new, self._first_new)
        self._starts = np.array(ledger.starts, np.int64)
        self._block = 0  # the next one to read
        self._held: list[tuple[NDArray[np.int64], pa.Array, int]] = []  # places, ids, the last key's first half

    def of(self, high: NDArray[np.uint64], place: NDArray[np.uint32]) -> pa.Array:
        """[n] ids of rows in ascending order of keys, which are asked for once; ``high`` is the first half of these."""
        self._read_to(int(high[-1]))
        self._held = [held for held in self._held if held[2] >= int(high[0])]
        new = place >= self._first_new
        ids = [self._texts(place[new].astype(np.int64)).cast(pa.large_string())]
        if not new.all():
            places = np.concatenate([held[0] for held in self._held])
            order = np.argsort(places)
            found = order[np.searchsorted(places, place[~new], sorter=order)]
            ids.append(pa.concat_arrays([held[1] for held in self._held]).take(pa.array(found)))
        where = np.argsort(np.concatenate([np.flatnonzero(new), np.flatnonzero(~new)]))
        return pa.concat_arrays(ids).take(pa.array(where)).cast(pa.string())

    def _read_to(self, last: int) -> None:
        """Read the blocks that hold keys up to ``last``."""
        while self._index is not None and self._block < len(self._index.root["blocks"]):
            if self._held and self._held[-1][2] > last:
                return
            table = self._index.block(self._block, ("video_id", "high", "shard", "row"))
            places = self._starts[table["shard"].to_numpy()] + table["row"].to_numpy()
            ids = table["video_id"].cast(pa.large_string()).combine_chunks()
            self._held.append((places, ids, int(table["high"][len(table) - 1].as_py())))
            self._block += 1


def _texts_of(store: Store, names: Sequence[str], first: int) -> Texts:
    """The ids in videos shards, whose rows are numbered from ``first``."""
    parts = [pa.array([], pa.large_string())]
    for start in range(0, len(names), 1024):
        some = names[start : start + 1024]
        read = zip(some, store.read_all(some), strict=True)
        tables = [parse_videos_shard(store, name, data, ["video_id"]) for name, data in read]
        parts.append(pa.concat_tables(tables)["video_id"].cast(pa.large_string()).combine_chunks())
    ids = pa.concat_arrays(parts)
    return lambda place: ids.take(pa.array(place - first))


def _mark(store: Store, n_shards: int) -> str | None:
    """What tells that no shard came after the ``n_shards`` covered; None where nothing does."""
    patient = isinstance(store, LocalStore) and n_shards >= _MARKED
    until = time.monotonic() + (_MARK_S if patient else 0.0)
    while (mark := store.mark(VIDEOS)) is None and time.monotonic() < until:
        time.sleep(0.5)
    # A driver that was stopped may have added one meanwhile, where the lock is a lease.
    return mark if mark is None or len(store.names(VIDEOS, ".parquet")) == n_shards else None


def try_compact(store: Store, lock: Lock, ledger: Ledger, after: int, say: Callable[[str], object]) -> bool:
    """Cover all videos shards at the end of a run, where ``after`` of them or more are in no index.

    Also where the index must be made anew; tells the user with ``say``. Returns whether it was made. What fails here
    costs no row.
    """
    waiting = len(ledger.names) - ledger.n_covered
    through = ledger.index.root["through"] if ledger.index is not None else ""
    late = any(name < through for name in ledger.names[ledger.n_covered :])
    if not (ledger.unusable or late or (after and waiting >= after)):
        return False
    say(f"making the index of {len(ledger.names):,} videos shards")
    try:
        done = compact(store, lock, ledger)
    except (CorruptShard, RunFailed, OSError) as error:
        say(f"warning: the index was not made ({error}); python -m jobs.compact {store} tries again")
        return False
    say(f"index: {done.videos} videos of {done.shards} shards, {done.seconds:.1f} s")
    return True


def described(done: Compacted) -> Sequence[str]:
    """Lines for the user."""
    lines = [f"note: the index was made anew: {done.why_anew}"] if done.why_anew else []
    shards = f"{done.videos:,} videos ({done.failed:,} failed) in {done.shards:,} videos shards"
    size = f"{done.n_bytes / 1e6:,.1f} MB, {done.written / 1e6:,.1f} MB of them new"
    return [*lines, f"{shards}, {done.new_shards:,} of them new to the index: {size}, {done.seconds:.1f} s"]
