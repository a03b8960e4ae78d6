"""What a cache holds, as the driver of a run keeps it: 79 bytes for each video, whatever its row says.

An id is a hash of 16 bytes, the clip that it was made of one of 8; of the rest there are the numbers that resume and
the summary add up. Anything else of a row is read again from its file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.cache.live_rows import (
    VIDEOS,
    VideoRows,
    belongs,
    completed,
    filled,
    live_and_earlier,
    small_rows,
    states_of,
)
from pipeline.cache.schema import KEY_COLUMNS, LATER
from pipeline.cache.table import SortedFile, TableFile, table_files
from pipeline.cache.token_shard import ids_in_footer
from pipeline.cache.writer import run_of
from pipeline.errors import ON_THE_GPU, CorruptShard
from pipeline.errors import OUTSIDE as OUTSIDE_CLASSES
from pipeline.keys import find, keys_of, tie_keys
from pipeline.rows import BY_DECODING, VideoRow
from pipeline.storage.stores import Store

TIMED: Final = ("decode", "encode", "prune", "write")  # the steps whose seconds a row of the videos table has
_COLUMNS: Final[dict[str, tuple[type[np.generic], tuple[int, ...]]]] = {
    "high": (np.uint64, ()),  # the two halves of the id's key
    "low": (np.uint64, ()),
    "clip": (np.uint64, ()),  # the key of uri, start_s, end_s
    "size": (np.int64, ()),  # bytes of the source; -1 where they are not known
    "n_tokens": (np.int32, ()),
    "n_total": (np.int32, ()),
    "place": (np.uint32, ()),  # number of the row, over all shards in the order in which they were read
    "attempts": (np.uint16, ()),
    "earlier": (np.uint8, ()),  # attempts on another file or clip under this id
    "rewritten": (np.uint16, ()),
    "tie": (np.uint64, ()),
    "run": (np.uint16, ()),  # its number in ``runs``
    "state": (np.int8, ()),  # 0 removed, 1 ok, 2 failed
    "code": (np.uint8, ()),  # 0 ok or removed, else the fault's number in ``classes``; and the bits below
    "remarks": (np.uint8, ()),  # the bits HDR to SHARED
    "note": (np.uint8, ()),  # 0, or why another decoder than asked served: its number in ``notes``
    "seconds": (np.float32, (4,)),  # seconds of each step in TIMED
}
HDR, STRETCHED, UNEVEN, SHARED = 1, 2, 4, 8  # what rows remark on their video: colours, pixels, positions in time
_HDR_TRANSFERS = ("smpte2084", "arib-std-b67")  # PQ and HLG
_SQUARE = "1:1"
_MOST_NOTES = 255  # all further ones share the last number
FAULT, OUTSIDE, WARNED = 0x3F, 0x40, 0x80  # bits of ``code``
# Columns of a row that the ledger is made of.
_READ = (
    *KEY_COLUMNS,
    *("run_id", "source_size", "status", "error_class", "error_stage", "attempts"),
    *("n_tokens", "n_total", "hidden_size", "decode_warnings", "backend_note"),
    *LATER,
    *(f"{stage}_s" for stage in TIMED),
)
_FILES_AT_ONCE = 256  # small files that are turned into arrays at once
_THREADS = 8  # that parse small files
Columns = dict[str, np.ndarray]


class Ledger:
    """The live row of every video (see ``pipeline.cache.live_rows``), in the order of their keys.

    Attributes:
        columns: name -> an array of all rows; see ``_COLUMNS``.
        classes: the classes of faults by their numbers; 0 is "ok".
        runs: the ids of runs by their numbers.
        notes: why another decoder than asked served, by number, with numbers in the text replaced by N; 0 is "".
        hidden_size: D of the tokens; 0 while no video is ok.
        names: the files that were read; ``starts`` is the number of the first row of each.
        n_rows: of all files, live or not.
        foreign: files of another identity, whose rows are left out.
    """

    def __init__(self, store: Store, made_with: str | None = None) -> None:
        """Start empty; ``made_with`` is the fingerprint of the identity whose rows count, None for all."""
        self._store, self._made_with = store, made_with
        self.names: list[str] = []
        self.starts: list[int] = []
        self.foreign: list[str] = []
        self.n_rows = 0
        self._rows = VideoRows(store)
        self.columns: Columns = {name: np.empty((0, *shape), kind) for name, (kind, shape) in _COLUMNS.items()}
        self.classes = ["ok"]
        self.runs: list[str] = []
        self.notes = [""]
        self.hidden_size = 0

    def __len__(self) -> int:
        return len(self.columns["high"])

    def refresh(self) -> Ledger:
        """Take in what was committed since; files never change, so each is read once. Raises CorruptShard, OSError."""
        known = {*self.names, *self.foreign}
        new = [file for file in table_files(self._store, VIDEOS) if file.name not in known]
        n_read = len(self.names)
        parts: dict[str, list[np.ndarray]] = {name: [column] for name, column in self.columns.items()}
        for table in self._of_small([file.name for file in new if not file.level]):
            for name, column in self._numbers(table).items():
                parts[name].append(column)
        for name, column in self._of_sorted([file for file in new if file.level]).items():
            parts[name].append(column)
        if len(self.names) > n_read:
            for name, pieces in parts.items():  # column by column, so that only one is in memory twice
                filled = [piece for piece in pieces if len(piece)]
                self.columns[name] = filled[0] if len(filled) == 1 else np.concatenate(pieces)
                pieces.clear()
            self._settle()
        return self

    def find(self, ids: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
        """Return the row [n] of each video in ``columns``; -1 where it has none."""
        return find(keys_of(ids), self.columns["high"], self.columns["low"])

    def failed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether these rows [n] are failures."""
        return np.greater(self.columns["state"][rows], 1)

    def removed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether the videos of these rows [n] were removed for good."""
        return np.equal(self.columns["state"][rows], 0)

    def faults(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the error class of each of these rows, [n] numbers in ``classes``."""
        return np.bitwise_and(self.columns["code"][rows], np.uint8(FAULT))

    def warned(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether these rows [n] were decoded with warnings."""
        return np.greater_equal(self.columns["code"][rows], WARNED)

    def outside(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether these rows [n] failed by no fault of the video: io, internal, memory of a GPU."""
        return np.not_equal(np.bitwise_and(self.columns["code"][rows], np.uint8(OUTSIDE)), 0)

    def read(self, row: int) -> VideoRow:
        """Read the whole row of a video again from its file. Raises CorruptShard, OSError."""
        place = int(self.columns["place"][row])
        shard = int(np.searchsorted(self.starts, place, side="right")) - 1
        return self._rows(self.names[shard], place - self.starts[shard])

    def of_run(self, run_id: str) -> tuple[int, int]:
        """Count the live rows that this run has committed: (all, failed ones)."""
        mine = self.columns["run"] == (self.runs.index(run_id) if run_id in self.runs else len(self.runs))
        return int(mine.sum()), int((self.columns["state"][mine] > 1).sum())

    def lost(self, token_shards: Sequence[str]) -> list[str]:
        """List the videos of token shards whose rows were committed before the refresh, and are in no file now.

        Reads the footers of those that no live row names: the superseded ones, whose videos have other rows, and these.
        Where files of another identity were left out nothing is listed, since they may hold the rows. Raises OSError.
        """
        if self.foreign:
            return []
        parts = {"run_id": [run_of(name) for name in token_shards], "token_shard": list(token_shards)}
        rows = pa.table({**parts, "error_message": pa.nulls(len(token_shards), pa.string())})
        lost: set[str] = set()
        for place in np.flatnonzero(~np.isin(tie_keys(rows), self.columns["tie"])).tolist():
            with suppress(FileNotFoundError, CorruptShard):  # removed meanwhile; jobs.verify tells of damage
                ids = pa.array(ids_in_footer(self._store, token_shards[place]), pa.string())
                lost |= set(ids.filter(pa.array(self.find(ids) < 0)).to_pylist())
        return sorted(lost)

    def _of_small(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of small files, many files at a time, since numpy's cost is by the call.

        Raises CorruptShard, OSError.
        """
        contents = zip(names, self._store.read_all(names), strict=True)
        # Checking and parsing a small file is work for one core, and leaves Python's lock free for most of it.
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            while some := list(islice(contents, _FILES_AT_ONCE)):
                tables = []
                for (name, _), table in zip(some, pool.map(self._parsed, some), strict=True):
                    if table is not None:
                        self._add(name, len(table))
                        tables.append(table)
                if tables:
                    yield pa.concat_tables(tables)

    def _of_sorted(self, files: Sequence[TableFile]) -> Columns:
        """Read sorted files into ``_COLUMNS`` made for them at once, as their names tell how many rows they have."""
        n_rows, at = sum(file.rows for file in files), 0
        columns: Columns = {name: np.empty((n_rows, *shape), kind) for name, (kind, shape) in _COLUMNS.items()}
        for file in files:
            opened = SortedFile(self._store, file)
            if not belongs(opened.made_with, self._made_with):
                self.foreign.append(file.name)
                continue
            self._add(file.name, 0)
            for part in opened.parts(_READ):
                self.n_rows += len(part)
                for name, values in self._numbers(completed(part, _READ)).items():
                    columns[name][at : at + len(part)] = values
                at += len(part)
        return {name: column[:at] for name, column in columns.items()}

    def _add(self, name: str, n_rows: int) -> None:
        """Note a file that was read, and how many rows it has."""
        self.names.append(name)
        self.starts.append(self.n_rows)
        self.n_rows += n_rows

    def _parsed(self, file: tuple[str, bytes]) -> pa.Table | None:
        """Parse a small file, or return None where it is of another identity."""
        table = small_rows(self._store, *file, _READ, self._made_with)
        if table is None:
            self.foreign.append(file[0])
        return table

    def _numbers(self, table: pa.Table) -> Columns:
        """Convert the rows that were read last to ``_COLUMNS``."""
        self.hidden_size = self.hidden_size or pc.max(table["hidden_size"]).as_py() or 0
        seconds = np.stack([filled(table[f"{stage}_s"]) for stage in TIMED], axis=1)
        return {
            "high": table["id_high"].to_numpy(),
            "low": table["id_low"].to_numpy(),
            "clip": table["clip_key"].to_numpy(),
            "size": filled(table["source_size"], -1),
            "n_tokens": filled(table["n_tokens"]),
            "n_total": filled(table["n_total"]),
            "place": np.arange(self.n_rows - len(table), self.n_rows, dtype=np.uint32),
            "attempts": np.clip(filled(table["attempts"]), 0, 2**16 - 1).astype(np.uint16),
            "earlier": np.clip(filled(table["earlier_attempts"]), 0, 255).astype(np.uint8),
            "rewritten": np.clip(filled(table["rewritten"]), 0, 2**16 - 1).astype(np.uint16),
            "tie": table["tie_break"].to_numpy(),
            "run": self._runs_of(table["run_id"]),
            "state": states_of(table["status"]),
            "code": self._codes(table),
            "remarks": _remarks(table),
            "note": self._notes_of(table["backend_note"]),
            "seconds": seconds.astype(np.float32),
        }

    def remarked(self, rows: NDArray[np.int64], remark: int) -> NDArray[np.bool_]:
        """Return whether these rows [n] make a remark: HDR, STRETCHED, UNEVEN or SHARED."""
        return np.not_equal(np.bitwise_and(self.columns["remarks"][rows], np.uint8(remark)), 0)

    def _notes_of(self, notes: pa.ChunkedArray) -> NDArray[np.uint8]:
        """Return the number in ``notes`` of each row's reason for another decoder, [n]; 0 where none served."""
        notes = pc.fill_null(notes, "")
        if not pc.any(pc.not_equal(notes, "")).as_py():
            return np.zeros(len(notes), np.uint8)
        notes = pc.if_else(pc.starts_with(notes, BY_DECODING), "", notes)
        notes = pc.replace_substring_regex(notes, r" [0-9]+\b", " N")
        new = [note for note in pc.unique(notes).to_pylist() if note not in self.notes]
        self.notes += new[: _MOST_NOTES - len(self.notes)]
        found = pc.index_in(notes, value_set=pa.array(self.notes, pa.string()))
        return np.asarray(pc.fill_null(found, len(self.notes) - 1).to_numpy(), np.uint8)

    def _runs_of(self, run_ids: pa.ChunkedArray) -> NDArray[np.uint16]:
        """Return the number in ``runs`` of each run, [n]; all runs after the first 65,535 share the last number."""
        self.runs += [name for name in pc.unique(run_ids).to_pylist() if name not in self.runs]
        numbers = pc.index_in(run_ids, value_set=pa.array(self.runs, pa.string())).to_numpy()
        return np.asarray(np.clip(numbers, 0, 2**16 - 1), np.uint16)

    def _codes(self, table: pa.Table) -> NDArray[np.uint8]:
        """Return each row's class of fault by its number in ``classes``, with the flags WARNED and OUTSIDE: [n]."""
        failed = pc.equal(table["status"], "failed")
        classes = pc.if_else(failed, pc.fill_null(table["error_class"], "internal"), "ok")
        self.classes += [name for name in pc.unique(classes).to_pylist() if name not in self.classes]
        codes = pc.index_in(classes, value_set=pa.array(self.classes)).to_numpy()
        warned = filled(table["decode_warnings"]) > 0
        memory = pc.and_(pc.equal(classes, "out-of-memory"), _among(table["error_stage"], ON_THE_GPU))
        outside = pc.and_(failed, pc.or_(_among(classes, OUTSIDE_CLASSES), memory)).to_numpy()
        return np.asarray(codes | np.where(warned, WARNED, 0) | np.where(outside, OUTSIDE, 0), np.uint8)

    def _settle(self) -> None:
        """Sort the rows by their keys and keep the live ones alone: a row that lost to another one never comes back."""
        high = self.columns["high"]
        if (high[1:] > high[:-1]).all():  # rows of one level of sorted files are in order already
            return
        order, earlier = live_and_earlier(self.columns)
        for name, column in self.columns.items():
            self.columns[name] = column[order]
        self.columns["earlier"] = np.minimum(earlier, 255).astype(np.uint8)


def _remarks(table: pa.Table) -> NDArray[np.uint8]:
    """Return the bits HDR to SHARED of rows, [n]."""
    shape = table["sample_aspect_ratio"]
    stretched = pc.fill_null(pc.not_equal(shape, _SQUARE), False)
    bits = (
        (HDR, _among(table["color_transfer"], _HDR_TRANSFERS).to_numpy()),
        (STRETCHED, stretched.to_numpy()),
        (UNEVEN, filled(table["uneven_positions"]) > 0),
        (SHARED, filled(table["shared_positions"]) > 0),
    )
    return np.asarray(sum((np.where(made, bit, 0) for bit, made in bits), np.zeros(len(table), np.int64)), np.uint8)


def _among(column: pa.ChunkedArray, values: Iterable[str]) -> pa.ChunkedArray:
    """Return whether each text of a column is one of ``values``."""
    return pc.is_in(column, value_set=pa.array(sorted(values), pa.string()))
