"""Which row of a video counts, for readers: from the index, and the videos shards that came after it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.cache.index.files import FAULT, SHARD_SCHEMA, Index, Place
from pipeline.cache.live_rows import live_rows, read_live, read_videos_shard
from pipeline.keys import keys_of
from pipeline.storage.stores import Store

# Of each video that no index covers; the rest of a row is read from its shard when asked for.
_COLUMNS = ("video_id", "status", "attempts", "error_class", "n_tokens", "hidden_size")


class LiveVideos:
    """The live row of every video of a cache, in short. Threads may share it.

    Attributes:
        index: None where all rows are in ``newer``.
        newer: live rows among the shards that the index does not cover, as ``read_live`` gives them.
    """

    def __init__(self, index: Index | None, newer: pa.Table) -> None:
        self.index, self.newer = index, newer
        self._place = {video_id: i for i, video_id in enumerate(newer["video_id"].to_pylist())}

    @classmethod
    def open(cls, store: Store) -> LiveVideos:
        """Find the live rows, by the index where there is one.

        Without an index one LIST a thousand videos shards and a GET each; with one a GET, a LIST of those that came
        after it, and a GET for each of these. Raises CorruptShard, OSError.
        """
        index = Index.read(store)
        return cls(index, read_live(store, _COLUMNS, None if index is None else index.newer()))

    def __reduce__(self) -> tuple[Any, ...]:
        return LiveVideos, (self.index, self.newer)

    def find(self, video_id: str) -> Place | None:
        """Where the live row of a video is; None where it has none. Raises CorruptShard, OSError."""
        return _live(*self._both(video_id))

    def _both(self, video_id: str) -> tuple[Place | None, Place | None]:
        """Its live rows among newer shards, and among those that the index covers."""
        row = self._place.get(video_id)
        newer = None if row is None else self._newer(row)
        return newer, None if self.index is None else self.index.find(video_id)

    def ok(self) -> list[str]:
        """The ids of the videos that have tokens, sorted. Reads the whole index."""
        return sorted(video_id for video_id, fault in self._faults() if fault is None)

    def failed(self) -> dict[str, str]:
        """The ids of the others, with the class of the fault. Reads the whole index."""
        return {video_id: fault for video_id, fault in sorted(self._faults()) if fault is not None}

    def most_tokens(self) -> int:
        """No fewer than are stored of any video."""
        newer = pc.max(self.newer["n_tokens"]).as_py() or 0
        return int(max(newer, 0 if self.index is None else self.index.root["most_tokens"]))

    def shards(self) -> LiveShards:
        """Return the videos shards that hold live rows with tokens.

        Of a compacted cache this reads the tables of shards, not the ids: 100 bytes a shard.
        """
        table = SHARD_SCHEMA.empty_table() if self.index is None else self.index.all_shards()
        names, counts = table["name"].cast(pa.large_string()), table["ok"].to_numpy().astype(np.int64)
        rows: dict[str, list[int]] = {}
        gone: dict[str, list[int]] = {}
        for video_id in self._newer_by_key():
            newest, former = self._both(video_id)
            if newest is not None and _live(newest, former) is newest:
                if newest.fault is None:
                    rows.setdefault(newest.shard, []).append(newest.row)
                if former is not None and former.fault is None:
                    gone.setdefault(former.shard, []).append(former.row)
        for shard, dead in gone.items():
            counts[pc.index(names, shard).as_py()] -= len(dead)
        held = pa.array(counts > 0)
        newer = LiveShards.of(rows)
        return LiveShards(
            pa.chunked_array([*names.filter(held).chunks, *newer.names.chunks], pa.large_string()),
            np.append(counts[counts > 0], newer.counts),
            table["dead"].filter(held),
            gone,
            newer.known,
        )

    def shards_of(self, video_ids: Sequence[str]) -> LiveShards:
        """The videos shards that hold the live rows of these videos. Raises KeyError with the first that has none."""
        rows: dict[str, list[int]] = {}
        for video_id in video_ids:
            if (place := self.find(video_id)) is None:
                raise KeyError(video_id)
            rows.setdefault(place.shard, []).append(place.row)
        return LiveShards.of(rows)

    def widths(self) -> set[int]:
        """D of the tokens; one number, unless the cache is older than the rule that it is."""
        return widths_of(self.newer) | ({self.index.root["hidden_size"]} - {0} if self.index is not None else set())

    def __len__(self) -> int:
        """How many videos have a row; those that both have are counted twice, as telling them apart takes a search."""
        return len(self.newer) + (0 if self.index is None else self.index.root["videos"])

    def _newer(self, row: int) -> Place:
        shard, place, attempts, fault = (
            self.newer[name][row].as_py() for name in ("shard", "row", "attempts", "error_class")
        )
        return Place(shard, place, attempts, None if self.newer["status"][row].as_py() == "ok" else fault or "internal")

    def _newer_by_key(self) -> list[str]:
        """The ids of newer rows in the order of the index, each of whose blocks is read once then."""
        newer = self.newer["video_id"]
        return list(newer.take(pa.array(np.lexsort(keys_of(newer).T[::-1]))).to_pylist())

    def _faults(self) -> list[tuple[str, str | None]]:
        """(id, class of its fault or None) of every video."""
        if self.index is None:  # nothing to compare: columns, as this is asked of caches in one's hand again and again
            ok = pc.equal(self.newer["status"], "ok")
            faults = pc.if_else(ok, pa.scalar(None, pa.string()), pc.fill_null(self.newer["error_class"], "internal"))
            return list(zip(self._place, faults.to_pylist(), strict=True))
        found: list[tuple[str, str | None]] = []
        classes = [None, *self.index.root["classes"][1:]]
        for block in self.index.blocks(("video_id", "code")):
            ids, codes = block["video_id"].to_pylist(), block["code"].to_numpy() & FAULT
            found += [
                (video_id, classes[code])
                for video_id, code in zip(ids, codes.tolist(), strict=True)
                if video_id not in self._place
            ]
        for video_id in self._newer_by_key():
            place = self.find(video_id)
            assert place is not None
            found.append((video_id, place.fault))
        return found


@dataclass(frozen=True)
class LiveShards:
    """Videos shards and which of their rows are meant; none of them without any.

    Attributes:
        names: [n].
        counts: [n] rows that are meant.
        dead: of the first shards, as the index lists them, the rows that do not count; ``gone`` are more of them by
            name. Of these all others with tokens are meant.
        known: by name the rows that are meant, ascending.
    """

    names: pa.ChunkedArray
    counts: NDArray[np.int64]
    dead: pa.ChunkedArray
    gone: Mapping[str, Sequence[int]]
    known: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, rows: Mapping[str, Sequence[int]]) -> LiveShards:
        """These rows of these shards, by the shards' names."""
        names = sorted(rows)
        counts = np.array([len(rows[name]) for name in names], np.int64)
        known = {name: sorted(rows[name]) for name in names}
        return cls(pa.chunked_array([pa.array(names, pa.large_string())]), counts, pa.chunked_array([[]]), {}, known)

    def __len__(self) -> int:
        return len(self.counts)

    def name(self, number: int) -> str:
        return str(self.names[number].as_py())

    def rows(self, number: int, ok: NDArray[np.bool_]) -> list[int]:
        """The rows of one of them that are meant, ascending, given which of all its rows are ``ok``."""
        name = self.name(number)
        if (found := self.known.get(name)) is not None:
            return list(found)
        alive = ok.copy()
        alive[self.dead[number].as_py()] = False
        alive[list(self.gone.get(name, ()))] = False
        return [int(row) for row in np.flatnonzero(alive)]


def widths_of(live: pa.Table) -> set[int]:
    """The different ``hidden_size`` of the live rows that are ok."""
    return set(pc.unique(live.filter(pc.equal(live["status"], "ok"))["hidden_size"]).to_pylist())


def _live(*places: Place | None) -> Place | None:
    """The live one of rows of a video."""
    return min((place for place in places if place is not None), key=_rank, default=None)


def _rank(place: Place) -> tuple[bool, int, str]:
    """The rule of ``pipeline.cache.live_rows``: the lowest is live."""
    return place.fault is not None, -place.attempts, place.shard


def read_live_of(store: Store, video_ids: Collection[str], columns: Sequence[str]) -> pa.Table:
    """As ``read_live``, of these videos alone: where the cache has an index, no other shards are read."""
    wanted = pa.array(sorted(set(video_ids)), pa.string())
    index = Index.read(store)
    if index is None:
        table = read_live(store, columns)
        return table.filter(pc.is_in(table["video_id"], value_set=wanted))
    live = LiveVideos(index, read_live(store, _COLUMNS, index.newer()))
    rows: dict[str, list[int]] = {}
    for video_id in wanted.to_pylist():
        if (place := live.find(video_id)) is not None:
            rows.setdefault(place.shard, []).append(place.row)
    tables = [read_live(store, columns, []).slice(0, 0)]
    for shard, places in rows.items():
        table = read_videos_shard(store, shard, columns).take(places)
        place = pa.array(places, pa.int32())
        tables.append(table.append_column("shard", [pa.repeat(shard, len(table))]).append_column("row", place))
    return live_rows(pa.concat_tables(tables))
