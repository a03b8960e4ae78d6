"""What a cache holds, as the driver of a run keeps it: 64 bytes for each video, whatever its row says.

An id is a hash of 16 bytes, the clip that it was made of one of 8; of the rest there are the numbers that resume and
the summary add up. Anything else of a row is read again from its shard. Where the cache has a compacted index
(``pipeline.cache.index.files``), the rows that this covers come from there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.cache.index.files import BLOCK_SCHEMA, FAULT, OUTSIDE, WARNED, Index
from pipeline.cache.live_rows import VIDEOS, VideoRows, best_first, parse_videos_shard
from pipeline.errors import ON_THE_GPU, CorruptShard
from pipeline.errors import OUTSIDE as OUTSIDE_CLASSES
from pipeline.keys import clip_keys, find, keys_of
from pipeline.rows import VideoRow
from pipeline.storage.stores import Store

TIMED: Final = ("decode", "encode", "prune", "write")  # the steps whose seconds a row of the videos table has
_COLUMNS: Final[dict[str, tuple[Any, tuple[int, ...]]]] = {
    "high": (np.uint64, ()),  # the two halves of the id's key
    "low": (np.uint64, ()),
    "clip": (np.uint64, ()),  # the key of uri, start_s, end_s
    "size": (np.int64, ()),  # bytes of the source; -1 where they are not known
    "n_tokens": (np.int32, ()),
    "n_total": (np.int32, ()),
    "place": (np.uint32, ()),  # number of the row, over all shards in the order in which they were read
    "attempts": (np.uint16, ()),
    "earlier": (np.uint8, ()),  # attempts on another file or clip under this id
    "code": (np.uint8, ()),  # see pipeline.cache.index.files
    "seconds": (np.float32, (4,)),  # of TIMED
}
_SAME = tuple(name for name in _COLUMNS if name not in ("place", "seconds"))  # as a block of the index has them
_READ = (
    *("video_id", "uri", "start_s", "end_s", "source_size", "status", "error_class", "error_stage", "attempts"),
    *("n_tokens", "n_total", "hidden_size", "decode_warnings"),
    *(f"{stage}_s" for stage in TIMED),
)
_SHARDS_AT_ONCE = 256
_THREADS = 8
Columns = dict[str, NDArray[Any]]


class Ledger:
    """The live row of every video (see ``pipeline.cache.live_rows``), in the order of their keys.

    Attributes:
        columns: name -> an array of all rows; see ``_COLUMNS``.
        classes: the classes of faults by their numbers; 0 is "ok".
        hidden_size: D of the tokens; 0 while no video is ok.
        index: where the first rows are from, those of the first ``n_covered`` shards; None where it could not serve.
        unusable: why it could not; "" where it did, and where there is none.
        names: the videos shards that were read; ``starts`` is the number of the first row of each, ``failed_rows`` how
            many rows of it are errors.
        n_rows: of all shards, live or not.
    """

    def __init__(self, store: Store, *, use_index: bool = True) -> None:
        self._use_index = use_index
        self.index: Index | None = None
        self.unusable = ""
        self.n_covered = 0
        self._store = store
        self.names: list[str] = []
        self.starts: list[int] = []
        self.failed_rows: list[int] = []
        self.n_rows = 0
        self._rows = VideoRows(store)
        self.columns: Columns = {name: np.empty((0, *shape), kind) for name, (kind, shape) in _COLUMNS.items()}
        self.classes = ["ok"]
        self.hidden_size = 0

    def __len__(self) -> int:
        return len(self.columns["high"])

    @property
    def n_shards(self) -> int:
        return len(self.names)

    def refresh(self) -> Ledger:
        """Take in what was committed since; shards never change, so each is read once. Raises CorruptShard, OSError."""
        names = self._store.names(VIDEOS, ".parquet")
        if self._use_index and not self.names:
            self._take_index(names)
        known = set(self.names)
        new = [name for name in names if name not in known]
        parts: dict[str, list[NDArray[Any]]] = {name: [column] for name, column in self.columns.items()}
        for table in self._tables(new):
            for name, column in self._numbers(table).items():
                parts[name].append(column)
        if new:
            for name, pieces in parts.items():  # one after the other: only one of them is there twice
                self.columns[name] = np.concatenate(pieces)
                pieces.clear()
            self._settle()
        return self

    def find(self, ids: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
        """[n]: the row of each video in ``columns``; -1 where it has none."""
        return find(keys_of(ids), self.columns["high"], self.columns["low"])

    def failed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[n]: whether these rows are failures."""
        return np.not_equal(self.faults(rows), 0)

    def faults(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """[n]: the class of each of these rows, a number in ``classes``."""
        return np.bitwise_and(self.columns["code"][rows], np.uint8(FAULT))

    def warned(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[n]: whether these rows were decoded with warnings."""
        return np.greater_equal(self.columns["code"][rows], WARNED)

    def outside(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[n]: whether these rows are failures from outside their videos: io, internal, memory of a GPU."""
        return np.not_equal(np.bitwise_and(self.columns["code"][rows], np.uint8(OUTSIDE)), 0)

    def read(self, row: int) -> VideoRow:
        """All that the videos table says of a row; its shard is read again."""
        place = int(self.columns["place"][row])
        shard = int(np.searchsorted(self.starts, place, side="right")) - 1
        return self._rows(self.names[shard], place - self.starts[shard])

    def of_run(self, run_id: str) -> tuple[int, int]:
        """(rows, failed ones) that this run has committed, live or not."""
        ends = [*self.starts[1:], self.n_rows]
        mine = [i for i, name in enumerate(self.names) if name.startswith(f"{VIDEOS}/{run_id}-")]
        return sum(ends[i] - self.starts[i] for i in mine), sum(self.failed_rows[i] for i in mine)

    def _take_index(self, names: Sequence[str]) -> None:
        """Begin with what the index covers, unless it is damaged or covers shards that are gone."""
        try:
            index = Index.read(self._store)
            if index is None:
                return
            shards = index.all_shards()
            if gone := len(set(shards["name"].to_pylist()) - set(names)):
                self.unusable = f"it covers {gone} videos shards that are gone"
                return
            self._take_rows(index, shards)
        except CorruptShard as error:
            self.unusable = str(error)

    def _take_rows(self, index: Index, shards: pa.Table) -> None:
        starts = np.cumsum(np.append(0, shards["rows"].to_numpy()).astype(np.int64))
        columns = {name: np.empty((index.root["videos"], *shape), kind) for name, (kind, shape) in _COLUMNS.items()}
        first = 0
        for block in index.blocks([name for name in BLOCK_SCHEMA.names if name != "video_id"]):
            rows = slice(first, first + len(block))
            for name in _SAME:
                columns[name][rows] = block[name].to_numpy()
            columns["place"][rows] = starts[block["shard"].to_numpy()] + block["row"].to_numpy()
            columns["seconds"][rows] = np.stack([block[f"{stage}_s"].to_numpy() for stage in TIMED], axis=1)
            first = rows.stop
        self.columns, self.index, self.n_covered = columns, index, len(shards)
        self.classes, self.hidden_size = list(index.root["classes"]), index.root["hidden_size"]
        self.names, self.starts = shards["name"].to_pylist(), starts[:-1].tolist()
        self.failed_rows, self.n_rows = shards["failed"].to_pylist(), int(starts[-1])

    def _tables(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of these shards, those of many at a time: what numpy does once for few rows costs as for many."""
        contents = zip(names, self._store.read_all(names), strict=True)
        # Checking and parsing a small shard is work for one core, and leaves Python's lock free for most of it.
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            while some := list(islice(contents, _SHARDS_AT_ONCE)):
                tables = list(pool.map(self._parsed, some))
                for (name, _), table in zip(some, tables, strict=True):
                    self.names.append(name)
                    self.starts.append(self.n_rows)
                    self.failed_rows.append(pc.sum(pc.not_equal(table["status"], "ok")).as_py() or 0)
                    self.n_rows += len(table)
                yield pa.concat_tables(tables)

    def _parsed(self, shard: tuple[str, bytes]) -> pa.Table:
        return parse_videos_shard(self._store, *shard, _READ)

    def _numbers(self, table: pa.Table) -> Columns:
        """``_COLUMNS`` of the rows that were read last."""
        keys = keys_of(table["video_id"])
        attempts = _filled(table["attempts"], 0)
        self.hidden_size = self.hidden_size or pc.max(table["hidden_size"]).as_py() or 0
        seconds = np.stack([_filled(table[f"{stage}_s"], 0.0) for stage in TIMED], axis=1)
        return {
            "high": keys[:, 0],
            "low": keys[:, 1],
            "clip": clip_keys(table),
            "size": _filled(table["source_size"], -1),
            "n_tokens": _filled(table["n_tokens"], 0),
            "n_total": _filled(table["n_total"], 0),
            "place": np.arange(self.n_rows - len(table), self.n_rows, dtype=np.uint32),
            "attempts": np.clip(attempts, 0, 2**16 - 1).astype(np.uint16),
            "earlier": np.zeros(len(table), np.uint8),
            "code": self._codes(table),
            "seconds": seconds.astype(np.float32),
        }

    def _codes(self, table: pa.Table) -> NDArray[np.uint8]:
        failed = pc.not_equal(table["status"], "ok")
        classes = pc.if_else(failed, pc.fill_null(table["error_class"], "internal"), "ok")
        self.classes += [name for name in pc.unique(classes).to_pylist() if name not in self.classes]
        codes = pc.index_in(classes, value_set=pa.array(self.classes)).to_numpy()
        warned = _filled(table["decode_warnings"], 0) > 0
        memory = pc.and_(pc.equal(classes, "out-of-memory"), _among(table["error_stage"], ON_THE_GPU))
        outside = pc.and_(failed, pc.or_(_among(classes, OUTSIDE_CLASSES), memory)).to_numpy()
        return np.asarray(codes | np.where(warned, WARNED, 0) | np.where(outside, OUTSIDE, 0), np.uint8)

    def _settle(self) -> None:
        """Sort the rows by their keys and keep the live ones alone: a row that lost to another one never comes back."""
        order = np.lexsort((self.columns["low"], self.columns["high"]))
        alike = np.ones(max(len(order) - 1, 0), bool)
        for name in ("high", "low"):
            column = self.columns[name][order]
            alike &= column[1:] == column[:-1]
        if alike.any():
            shared = np.append(alike, False) | np.append(False, alike)
            first = ~np.append(False, alike)
            order[shared] = self._best_first(order[shared])
            order = order[first]
        for name, column in self.columns.items():
            self.columns[name] = column[order]

    def _best_first(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of videos with several, each video's live one first; it learns how often another file was tried."""
        own = {name: self.columns[name][rows] for name in ("high", "low", "clip", "size", "attempts", "earlier")}
        shard = np.searchsorted(self.starts, self.columns["place"][rows], side="right") - 1
        rank = np.empty(len(self.names), np.int64)
        rank[sorted(range(len(rank)), key=self.names.__getitem__)] = np.arange(len(rank))
        order = best_first([own["high"], own["low"]], self.failed(rows), own["attempts"], rank[shard])
        own = {name: column[order] for name, column in own.items()}
        new = (own["high"][1:] != own["high"][:-1]) | (own["low"][1:] != own["low"][:-1])
        starts = np.flatnonzero(np.append(True, new))
        live = np.repeat(starts, np.diff(np.append(starts, len(rows))))
        same = (own["clip"] == own["clip"][live]) & (own["size"] == own["size"][live])
        before = np.where(same, own["earlier"], np.minimum(own["attempts"], 255))
        self.columns["earlier"][rows[order][starts]] = np.maximum.reduceat(before, starts)
        return np.asarray(rows[order])


def _among(column: pa.ChunkedArray, values: Iterable[str]) -> pa.ChunkedArray:
    return pc.is_in(column, value_set=pa.array(sorted(values), pa.string()))


def _filled(column: pa.ChunkedArray, value: float) -> NDArray[Any]:
    return np.asarray(pc.fill_null(column, value).to_numpy())
