"""The compacted index: the live row of every video in short, sorted by the hash of its id.

So one of millions is found by reading one block of them.

It is derived from the videos shards, which stay the only truth: ``python -m jobs.compact`` makes it anew at any time,
and a cache without it reads the same, only slower. ``index.json`` names the blocks, and the videos shards that they
cover; it is replaced in one step, last. What it names is named by its content and never changes, so that a reader goes
on with the index that it opened. Videos shards after ``through``, the last name covered, are read besides; a run takes
care that its shards come after it (``run_id_after``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple, TypedDict

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.cache.header import read_sealed
from pipeline.cache.live_rows import VIDEOS, parse_videos_shard
from pipeline.cache.loaded_once import LoadedOnce
from pipeline.cache.schema import column
from pipeline.errors import CorruptShard
from pipeline.keys import find, keys_of
from pipeline.storage.stores import Store

INDEX, ROOT = "index", "index.json"
VERSION: Final = 1
#: What to do about an index that is damaged, or older than what it covers.
REMEDY = "python -m jobs.compact CACHE --rebuild makes it anew"
FAULT, OUTSIDE, WARNED = 0x3F, 0x40, 0x80  # bits of ``code``

BLOCK_SCHEMA = pa.schema(
    [
        column("video_id", pa.string(), "the id in the manifest", nullable=False),
        column("high", pa.uint64(), "the first half of the id's key (blake2b of 16 bytes); rows are sorted by both"),
        column("low", pa.uint64(), "the second half"),
        column("shard", pa.uint32(), "number of the videos shard that holds the live row, in the tables of shards"),
        column("row", pa.uint32(), "of it, from 0"),
        column("code", pa.uint8(), "0 ok, else the fault's number in classes; +64 from outside the video, +128 warned"),
        column("attempts", pa.uint16(), "how often the video was tried"),
        column("earlier", pa.uint8(), "attempts on another file or clip under this id"),
        column("clip", pa.uint64(), "the key of uri, start_s and end_s"),
        column("size", pa.int64(), "bytes of the source file; -1 where they are not known"),
        column("n_tokens", pa.int32(), "tokens stored"),
        column("n_total", pa.int32(), "tokens before pruning"),
        *(column(f"{stage}_s", pa.float32(), "seconds") for stage in ("decode", "encode", "prune", "write")),
    ]
)
SHARD_SCHEMA = pa.schema(
    [
        column("name", pa.string(), "of the videos shard, below the cache", nullable=False),
        column("rows", pa.uint32(), "of it"),
        column("failed", pa.uint32(), "rows of it that are errors, live or not"),
        column("ok", pa.uint32(), "live rows of it that have tokens"),
        column("dead", pa.list_(pa.uint32()), "rows of it that another shard has superseded"),
    ]
)
_FOUND_BY = ("high", "low", "shard", "row", "code", "attempts")
_BLOCKS, _SHARD_TABLES = 32, 8  # kept in memory, of 1 and 5 MB


class Part(TypedDict):
    """A file of the index: ``first`` is the number of its first shard, or the key of its first row as hex."""

    name: str
    rows: int
    first: str


class Root(TypedDict):
    """index.json.

    Attributes:
        through: the last videos shard covered, by name.
        mark: of the folder of videos shards once they were covered (``Store.mark``); None where there is none.
        shards, videos, failed: how many are covered; ``failed`` of the videos.
        most_tokens: that are stored of a video.
        hidden_size: D of the tokens; 0 where no video is ok.
        classes: the classes of faults by their numbers; 0 is "ok".
        blocks, shard_tables: the files, by ``first``.
    """

    schema_version: int
    through: str
    mark: str | None
    shards: int
    videos: int
    failed: int
    most_tokens: int
    hidden_size: int
    classes: list[str]
    blocks: list[Part]
    shard_tables: list[Part]


class Place(NamedTuple):
    """Where the live row of a video is: its videos shard and the row in it; ``fault`` is None where it is ok."""

    shard: str
    row: int
    attempts: int
    fault: str | None


class Index:
    """An index, opened; threads may share it.

    Raises CorruptShard where a file of it is damaged or gone, and OSError.
    """

    def __init__(self, store: Store, root: Root) -> None:
        self.store, self.root = store, root
        self._firsts = [int(block["first"], 16) for block in root["blocks"]]
        self._shard_firsts = [int(table["first"]) for table in root["shard_tables"]]
        self._keys = LoadedOnce(self._load_keys, _BLOCKS)
        self._shards = LoadedOnce(self.shards, _SHARD_TABLES)

    @classmethod
    def read(cls, store: Store) -> Index | None:
        """The index of a cache; None where it has none. One GET. Raises CorruptShard, OSError."""
        try:
            root = read_sealed(store, ROOT, CorruptShard)
        except FileNotFoundError:
            return None
        if root.get("schema_version") != VERSION:
            found = root.get("schema_version")
            raise CorruptShard(f"{store}/{ROOT}: version {found!r}, this program reads {VERSION}; {REMEDY}", "index")
        return cls(store, Root(**root))  # type: ignore[typeddict-item]

    def __reduce__(self) -> tuple[Any, ...]:
        return Index, (self.store, self.root)

    def newer(self) -> list[str]:
        """The videos shards that came after those that are covered; one LIST where there are few."""
        if self.root["mark"] is not None and self.store.mark(VIDEOS) == self.root["mark"]:
            return []
        return self.store.names(VIDEOS, ".parquet", after=self.root["through"])

    def find(self, video_id: str) -> Place | None:
        """Where the live row of a video is; None where the covered shards have none. At most two GETs."""
        try:
            key = keys_of(pa.array([video_id]))
        except UnicodeEncodeError:  # half of a surrogate pair is no text, and no id
            return None
        number = bisect_right(self._firsts, int(key[0, 0]) << 64 | int(key[0, 1])) - 1
        if number < 0:
            return None
        columns = self._keys(number)
        row = int(find(key, columns["high"], columns["low"])[0])
        if row < 0:
            return None
        code = int(columns["code"][row]) & FAULT
        fault = self.root["classes"][code] if code else None
        shard = self.shard_name(int(columns["shard"][row]))
        return Place(shard, int(columns["row"][row]), int(columns["attempts"][row]), fault)

    def shard_name(self, number: int) -> str:
        """The videos shard of this number."""
        table = bisect_right(self._shard_firsts, number) - 1
        return str(self._shards(table)["name"][number - self._shard_firsts[table]].as_py())

    def blocks(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """These columns of all blocks in turn."""
        return (self.block(number, columns) for number in range(len(self.root["blocks"])))

    def block(self, number: int, columns: Sequence[str]) -> pa.Table:
        """These columns of one block."""
        return self._read(self.root["blocks"][number], columns)

    def shards(self, number: int) -> pa.Table:
        """One table of shards, SHARD_SCHEMA."""
        return self._read(self.root["shard_tables"][number], SHARD_SCHEMA.names)

    def all_shards(self) -> pa.Table:
        """All videos shards that are covered, SHARD_SCHEMA."""
        tables = map(self.shards, range(len(self.root["shard_tables"])))
        return pa.concat_tables([SHARD_SCHEMA.empty_table(), *tables]).combine_chunks()

    def _load_keys(self, number: int) -> dict[str, NDArray[Any]]:
        table = self.block(number, _FOUND_BY)
        return {name: np.ascontiguousarray(table[name].to_numpy()) for name in _FOUND_BY}

    def _read(self, part: Part, columns: Sequence[str]) -> pa.Table:
        try:
            table = parse_videos_shard(self.store, part["name"], self.store.read(part["name"]), columns)
        except FileNotFoundError:
            message = "is gone: the index was made anew since it was opened, open the cache again; else "
            raise CorruptShard(f"{self.store}/{part['name']} {message}{REMEDY}", "index") from None
        except CorruptShard as error:
            raise CorruptShard(f"{error}; {REMEDY}", "index") from error
        if len(table) != part["rows"]:
            what = f"{len(table)} rows where {part['rows']} belong"
            raise CorruptShard(f"{self.store}/{part['name']}: {what}; {REMEDY}", "index")
        return table


def run_id_after(index: Index | None, run_id: str) -> str:
    """An id whose shards come after all that are covered: ``run_id``, unless clocks differ so far that it would not.

    Readers do not look for new shards before ``through``.
    """
    if index is None or f"{VIDEOS}/{run_id}-" > index.root["through"]:
        return run_id
    latest = PurePosixPath(index.root["through"]).stem.rpartition("-")[0].rpartition("-")[0]
    base, _, number = latest.partition("_")
    return f"{base}_{int(number or 0) + 1:06d}"
