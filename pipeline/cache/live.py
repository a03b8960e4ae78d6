"""Select the live row of each video: the rule, and its two views, Ledger for the driver and LiveVideos for readers.

The live row is the first by (removed before ok before failed, most attempts, most rewritten, smallest tie_break). The
rule depends on rows alone, so that files may come in any order, twice, or late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.cache.near_ids import suggest_ids
from pipeline.cache.schema import KEY_COLUMNS
from pipeline.cache.table import TableFile, VideosTable, add_row_locations, list_table, make_empty_location_table
from pipeline.cache.token_shard import parse_run_id, read_footer_ids
from pipeline.errors import INFRASTRUCTURE_CLASSES, ON_THE_GPU, CorruptShard
from pipeline.keys import find, hash_texts, hash_ties
from pipeline.rows import BY_DECODING, READ_IN_PART, SIZES_DIFFER, VideoRow
from pipeline.storage.stores import Store, request_threads

P = ParamSpec("P")
T = TypeVar("T")

#: Columns of the hash of an id.
ID_COLUMNS = ("id_high", "id_low")
#: Columns that the rule of the live row compares.
RULE_COLUMNS = (*ID_COLUMNS, "status", "attempts", "rewritten", "tie_break")
# States of a row, best first; any other status counts as failed.
REMOVED, OK, FAILED = 0, 1, 2
_STATES = {"removed": REMOVED, "ok": OK}
# Columns that verify and generate keep in memory for each video; other columns are read from the file on demand.
INDEX_COLUMNS = ("video_id", *RULE_COLUMNS, "error_class", "uri", "source_size", "start_s", "end_s")
_MAX_TEXT_BYTES = 2**31  # bytes of text that 32-bit offsets can address

_TRIES = 5  # attempts to read a table while another run merges its files

Columns = dict[str, np.ndarray]  # rows as numbers, by name
_RULE_NAMES = (
    "high",
    "low",
    "state",
    "attempts",
    "rewritten",
    "tie",
    "clip",
    "size",
    "earlier",
)  # in ``find_live_indices``


def select_live_rows(rows: pa.Table) -> pa.Table:
    """Return each video's live row among ``rows``, sorted by video_id.

    Tables of 2 GiB and more get large_string columns.

    Args:
        rows: they have RULE_COLUMNS and video_id.
    """
    order, _ = find_live_indices(make_rule_columns(rows))
    if rows.nbytes >= _MAX_TEXT_BYTES:
        wide = [field.with_type(pa.large_string()) if field.type == pa.string() else field for field in rows.schema]
        rows = rows.cast(pa.schema(wide, rows.schema.metadata))
    return rows.take(pa.array(order)).sort_by("video_id")


def find_live_indices(columns: Mapping[str, np.ndarray]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the live row of each id, and the most attempts on another file under that id.

    The live row of an id has the lowest "state" (REMOVED, OK, FAILED), then the most "attempts", then the most
    "rewritten", then the smallest "tie"; if rows are equal, the first is live.

    Args:
        columns: name -> [n], from ``make_rule_columns``. "high" and "low" are the id; "clip" and "size" tell its source
            files apart; "earlier" is ``earlier_attempts``.

    Returns:
        Two arrays with an item per id, sorted by id. The first has the indices of the live rows. The second has the
        maximum, over the rows of the id, of ``attempts`` (rows of another file than the live row's) and ``earlier``
        (rows of the same file).
    """
    order = np.lexsort((columns["low"], columns["high"]))
    repeats = np.ones(max(len(order) - 1, 0), bool)
    for name in ("high", "low"):
        ids = columns[name][order]
        repeats &= ids[1:] == ids[:-1]
    earlier = columns["earlier"][order].astype(np.int64)
    if not repeats.any():
        return order, earlier
    first = ~np.append(False, repeats)
    is_shared = np.append(repeats, False) | ~first
    several = order[is_shared]  # only ids with several rows need the rest of the rule
    rows = {name: columns[name][several] for name in _RULE_NAMES}
    later_keys = [-rows["rewritten"].astype(np.int64), rows["tie"]]
    best = sort_by_rule([rows["high"], rows["low"]], rows["state"], rows["attempts"], later_keys)
    rows = {name: column[best] for name, column in rows.items()}
    starts = np.flatnonzero(first[is_shared])
    live = np.repeat(starts, np.diff(np.append(starts, len(several))))
    same_file = (rows["clip"] == rows["clip"][live]) & (rows["size"] == rows["size"][live])
    on_others = np.where(same_file, rows["earlier"], rows["attempts"])
    order[is_shared] = several[best]
    earlier[np.flatnonzero(is_shared)[starts]] = np.maximum.reduceat(on_others, starts)
    return order[first], earlier[first]


def sort_by_rule(
    ids: Sequence[NDArray[Any]], states: NDArray[np.int8], attempts: NDArray[Any], later_keys: Sequence[NDArray[Any]]
) -> NDArray[np.int64]:
    """Return the [n] row indices that sort rows by id, and the rows of an id by the rule, the live row first.

    The rule is: the lowest state, then the most attempts, then ``later_keys``. Equal rows keep their order.

    Args:
        ids: one or several arrays [n] that make up an id, the most significant first.
        states: [n], from ``read_states``.
        later_keys: further sort keys [n], ascending, the most significant first.
    """
    return np.lexsort((*reversed(later_keys), -attempts.astype(np.int64), states, *reversed(ids)))


def make_rule_columns(rows: pa.Table) -> Columns:
    """Convert rows with RULE_COLUMNS to the arrays that ``find_live_indices`` takes.

    Nulls in status mean FAILED. Nulls in the other columns become 0, and so do the columns clip_key, source_size and
    earlier_attempts if ``rows`` lack them; id_high, id_low and tie_break have no nulls.
    """
    zeros = np.zeros(len(rows), np.int64)
    optional = {"clip": "clip_key", "size": "source_size", "earlier": "earlier_attempts"}
    present = {name: column for name, column in optional.items() if column in rows.schema.names}
    return {
        "high": rows["id_high"].to_numpy(),
        "low": rows["id_low"].to_numpy(),
        "state": read_states(rows["status"]),
        "attempts": fill_nulls(rows["attempts"]),
        "rewritten": fill_nulls(rows["rewritten"]),
        "tie": rows["tie_break"].to_numpy(),
        **dict.fromkeys(optional, zeros),
        **{name: fill_nulls(rows[column]) for name, column in present.items()},
    }


def read_states(status: pa.ChunkedArray) -> NDArray[np.int8]:
    """Return the state of each row, [n]: REMOVED, OK, or FAILED for any other status and for null."""
    states = pc.index_in(status, value_set=pa.array(_STATES.keys()))
    return fill_nulls(states, FAILED).astype(np.int8)


def fill_nulls(column: pa.ChunkedArray, value: float = 0) -> NDArray[Any]:
    """Convert a column to an array [n], with ``value`` in place of nulls."""
    return np.asarray(pc.fill_null(column, value).to_numpy())


def select_ok(rows: pa.Table) -> pa.Table:
    """Return the rows whose status is "ok": the videos that have tokens."""
    return rows.filter(pc.equal(rows["status"], "ok"))


def select_removed(rows: pa.Table) -> pa.Table:
    """Return the rows whose status is "removed"."""
    return rows.filter(pc.equal(rows["status"], "removed"))


def list_nameable_ids(rows: pa.Table) -> pa.ChunkedArray:
    """Return the ids of the rows that were not removed; messages must not name removed videos."""
    return rows.filter(pc.not_equal(rows["status"], "removed"))["video_id"]


def make_membership_mask(column: pa.ChunkedArray, values: Iterable[str]) -> pa.ChunkedArray:
    """Return a mask [n]: True where a text of the column is one of ``values``; nulls are False."""
    return pc.is_in(column, value_set=pa.array(sorted(values), pa.string()))


def sort_by_shard(rows: pa.Table) -> pa.Table:
    """Sort rows by token shard and row group, the order in which their tokens are stored."""
    return rows.sort_by([("token_shard", "ascending"), ("first_row_group", "ascending")])


def _retry_after_merges(read: Callable[P, T]) -> Callable[P, T]:
    """Decorate ``read`` so that it is called again, up to _TRIES times in all, while it raises FileNotFoundError."""

    @wraps(read)
    def read_again(*args: P.args, **keywords: P.kwargs) -> T:
        for _ in range(_TRIES - 1):
            with suppress(FileNotFoundError):
                return read(*args, **keywords)
        return read(*args, **keywords)

    return read_again


TIMED_STAGES: Final = ("decode", "encode", "prune", "write")  # stages with a column of seconds in the videos table
_LEDGER: Final[dict[str, tuple[type[np.generic], tuple[int, ...]]]] = {
    "high": (np.uint64, ()),  # the two halves of the id's key
    "low": (np.uint64, ()),
    "clip": (np.uint64, ()),  # the key of uri, start_s, end_s
    "size": (np.int64, ()),  # bytes of the source; -1 if unknown
    "mark": (np.uint64, ()),  # the source's ``hash_mark``; 0 if unknown
    "sample": (np.uint64, ()),  # the source's ``hash_sample``; 0 if unknown
    "n_tokens": (np.int32, ()),
    "n_total": (np.int32, ()),
    "row_number": (np.uint32, ()),  # counted over all files in the order in which they were read
    "attempts": (np.uint16, ()),
    "earlier": (np.uint8, ()),  # attempts on another file or clip under this id
    "rewritten": (np.uint16, ()),
    "tie": (np.uint64, ()),
    "run": (np.uint16, ()),  # its number in ``runs``
    "state": (np.int8, ()),  # REMOVED, OK or FAILED
    "fault": (np.uint8, ()),  # the number of its class in ``classes``; 0 for ok and removed
    "remarks": (np.uint8, ()),  # the bits HDR to INFRASTRUCTURE
    "note": (np.uint8, ()),  # the number in ``notes`` of the reason for another decoder than requested; 0 without one
    "by_rate": (np.int32, ()),  # ``frames_by_rate``; -1 if unknown
    "decoder": (np.uint8, ()),  # the number in ``decoders`` of a user decoder and its version; 0 for built-in ones
    "seconds": (np.float32, (4,)),  # seconds of each of TIMED_STAGES
}
# The bits of the column "remarks": HDR colors, pixels that are not square, positions in time (two bits), decoder
# warnings, and an infrastructure error (io, internal, GPU memory).
HDR, STRETCHED, UNEVEN, SHARED, WARNED, INFRASTRUCTURE = 1, 2, 4, 8, 16, 32
#: PQ and HLG, by FFmpeg's names.
HDR_TRANSFERS = ("smpte2084", "arib-std-b67")
_MAX_RUNS, _MAX_NOTES, _MAX_CLASSES = 2**16, 2**8 - 1, 2**8  # further texts share the last number
# Columns of the videos table that the ledger reads.
_LEDGER_READS = (
    *KEY_COLUMNS,
    *("run_id", "source_size", "status", "error_class", "error_stage", "attempts"),
    *("n_tokens", "n_total", "hidden_size", "decode_warnings", "backend_note", "backend", "backend_version"),
    *("color_transfer", "sample_aspect_ratio", "uneven_positions", "shared_positions", "frames_by_rate"),
    *("source_mark", "source_sample"),
    *(f"{stage}_s" for stage in TIMED_STAGES),
)
_FILES_AT_ONCE = 256  # small files that are converted to arrays together, since each call of numpy has a cost


class Ledger:
    """The live row of every video as numbers, sorted by the hash of the id, for the driver of a run.

    It takes about 100 bytes per video.

    Attributes:
        columns: name -> an array with an item per video; see ``_LEDGER``.
        classes: the fault classes by number; 0 is "ok".
        decoders: user decoders with their versions, by number; 0 is "".
        notes: the reasons for another decoder than requested, by number, with N in place of numbers in the text; 0 is
            "".
        hidden_size: D of the tokens; 0 while no video is ok.
        names: the files that were read.
        starts: the number of the first row of each of ``names``.
        strays: files in ``videos/`` that are not files of the table, and are ignored.
        n_rows: the number of rows in all files that were read, live or not.
    """

    def __init__(self, store: Store, made_with: str | None = None) -> None:
        """Create an empty ledger; ``refresh`` reads the rows.

        Args:
            made_with: the fingerprint of the identity whose rows count; None for all rows.
        """
        self._store = store
        self._made_with = made_with
        self._table = VideosTable(store, made_with, keep=2)  # every file is read once, and few rows are read again
        self._newer: Ledger | None = None  # the table after merges that deleted files of this ledger
        self.names: list[str] = []
        self.strays: list[str] = []
        self.starts: list[int] = []
        self.n_rows = 0
        self.columns = _empty_columns(0)
        self.classes = ["ok"]
        self.runs: list[str] = []
        self.notes = [""]
        self.decoders = [""]
        self.hidden_size = 0

    def __len__(self) -> int:
        return len(self.columns["high"])

    @property
    def foreign(self) -> dict[str, str | None]:
        """The ignored files of another identity -> the fingerprint of that identity."""
        return self._table.foreign

    @_retry_after_merges
    def refresh(self) -> Ledger:
        """Read the files that were committed since the last call, and return this ledger.

        Rows stay if their file was deleted meanwhile, as after a merge. If a file is merged and deleted before it is
        read, the table is listed again, up to _TRIES times in all.

        Raises:
            CorruptShard: a file is damaged, or a stray file must not be ignored.
            OSError: the store failed, or files vanished at every try. After any error the rows are as before the call,
                and the next call reads all new files again.
        """
        self._newer = None
        n_files = len(self.names)
        n_rows = self.n_rows
        try:
            parts = self._read_new_files()
        except Exception:
            del self.names[n_files:], self.starts[n_files:]
            self.n_rows = n_rows
            raise
        if len(self.names) > n_files:
            for name in _LEDGER:  # column by column, so that only one column is in memory twice
                pieces = [part.pop(name) for part in parts]
                filled_pieces = [piece for piece in pieces if len(piece)]
                self.columns[name] = filled_pieces[0] if len(filled_pieces) == 1 else np.concatenate(pieces)
            self._drop_superseded()
        return self

    def _read_new_files(self) -> list[Columns]:
        """Read the files that were not read before: return ``columns`` itself, followed by columns of the new rows.

        Sets ``strays``. Adds the files to ``names`` and ``starts`` and their rows to ``n_rows``, also those read before
        an error.
        """
        known_names = {*self.names, *self.foreign}
        files, self.strays = list_table(self._store)
        new_files = [file for file in files if file.name not in known_names]
        parts = [self.columns]
        small = self._table.read_small([file.name for file in new_files if not file.is_sorted], _LEDGER_READS)
        while batch := list(islice(small, _FILES_AT_ONCE)):
            first = self.n_rows
            for name, rows in batch:
                self._add_file(name)
                self.n_rows += len(rows)
            parts.append(self._to_columns(pa.concat_tables([rows for _, rows in batch]), first))
        # Allocated once for all sorted files, whose names state their rows; ``rows`` of small files is 0.
        columns = _empty_columns(sum(file.rows for file in new_files))
        end = 0
        for sorted_file in self._table.iter_open_sorted(new_files):
            self._add_file(sorted_file.file.name)
            for rows in sorted_file.parts(_LEDGER_READS):
                for name, values in self._to_columns(rows, self.n_rows).items():
                    columns[name][end : end + len(rows)] = values
                end += len(rows)
                self.n_rows += len(rows)
        return [*parts, {name: column[:end] for name, column in columns.items()}]

    def _add_file(self, name: str) -> None:
        """Add a file to ``names`` and ``starts``; call this before its rows are added to ``n_rows``."""
        self.names.append(name)
        self.starts.append(self.n_rows)

    def _to_columns(self, rows: pa.Table, first: int) -> Columns:
        """Convert rows with _LEDGER_READS to columns of the ledger.

        Adds new texts to ``runs``, ``classes``, ``notes`` and ``decoders``, and sets ``hidden_size`` if it is still 0.
        ``attempts``, ``earlier`` and ``rewritten`` are clipped to the range of their types. A failed row without a
        class counts as "internal".

        Args:
            first: the number of the first row.
        """
        self.hidden_size = self.hidden_size or pc.max(rows["hidden_size"]).as_py() or 0
        numbers = make_rule_columns(rows)
        classes = pc.if_else(pc.equal(rows["status"], "failed"), pc.fill_null(rows["error_class"], "internal"), "ok")
        return {
            **numbers,
            "size": fill_nulls(rows["source_size"], -1),
            "mark": fill_nulls(rows["source_mark"]),
            "sample": fill_nulls(rows["source_sample"]),
            "n_tokens": fill_nulls(rows["n_tokens"]),
            "n_total": fill_nulls(rows["n_total"]),
            "row_number": np.arange(first, first + len(rows), dtype=np.uint32),
            "attempts": np.clip(numbers["attempts"], 0, 2**16 - 1).astype(np.uint16),
            "earlier": np.clip(numbers["earlier"], 0, 255).astype(np.uint8),
            "rewritten": np.clip(numbers["rewritten"], 0, 2**16 - 1).astype(np.uint16),
            "run": _assign_numbers(rows["run_id"], self.runs, _MAX_RUNS).astype(np.uint16),
            "fault": _assign_numbers(classes, self.classes, _MAX_CLASSES).astype(np.uint8),
            "remarks": _make_remark_bits(rows, classes),
            "note": self._number_notes(rows["backend_note"]),
            "by_rate": fill_nulls(rows["frames_by_rate"], -1),
            "decoder": self._number_decoders(rows["backend"], rows["backend_version"]),
            "seconds": np.stack([fill_nulls(rows[f"{stage}_s"]) for stage in TIMED_STAGES], axis=1).astype(np.float32),
        }

    def _number_notes(self, notes: pa.ChunkedArray) -> NDArray[np.uint8]:
        """Return the number in ``notes`` of each row's reason for another decoder, [n]; new reasons are appended.

        The number is 0 without a reason, and if the requested decoder served after all. A remark on partly read files
        or on sizes is cut off with all that follows it, and numbers after a space become N.
        """
        notes = pc.fill_null(notes, "")
        if not pc.any(pc.not_equal(notes, "")).as_py():
            return np.zeros(len(notes), np.uint8)
        notes = pc.replace_substring_regex(notes, f"(^|; )({READ_IN_PART}|{SIZES_DIFFER}).*", "")
        notes = pc.if_else(pc.starts_with(notes, BY_DECODING), "", notes)
        notes = pc.replace_substring_regex(notes, r" [0-9]+\b", " N")
        return _assign_numbers(notes, self.notes, _MAX_NOTES).astype(np.uint8)

    def _number_decoders(self, names: pa.ChunkedArray, versions: pa.ChunkedArray) -> NDArray[np.uint8]:
        """Return the number in ``decoders`` of each row's user decoder, [n]; new decoders are appended.

        The number is 0 for built-in decoders, whose names have no ":".
        """
        is_own = pc.fill_null(pc.match_substring(names, ":"), False)
        if not pc.any(is_own).as_py():
            return np.zeros(len(names), np.uint8)
        texts = pc.if_else(is_own, pc.binary_join_element_wise(names, pc.fill_null(versions, ""), " "), "")
        return _assign_numbers(texts, self.decoders, _MAX_NOTES).astype(np.uint8)

    def _drop_superseded(self) -> None:
        """Sort the rows by id, and keep only the live row of each id; superseded rows can never become live again.

        If an id has several rows or the rows are not sorted, the column ``earlier`` is set to the attempts on other
        files under the id, at most 255. Otherwise nothing changes.
        """
        high = self.columns["high"]
        if (high[1:] > high[:-1]).all():  # the rows of one level of sorted files are already in order
            return
        order, earlier = find_live_indices(self.columns)
        for name, column in self.columns.items():
            self.columns[name] = column[order]
        self.columns["earlier"] = np.minimum(earlier, 255).astype(np.uint8)

    def find(self, ids: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
        """Return the row number in ``columns`` of each video id, [n]; -1 for a video without a row."""
        return find(hash_texts(ids), self.columns["high"], self.columns["low"])

    def failed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask over ``rows``, [n]: True for videos that failed."""
        return np.equal(self.columns["state"][rows], FAILED)

    def make_failure_class_mask(self, rows: NDArray[np.int64], error_class: str) -> NDArray[np.bool_]:
        """Return a mask over ``rows``, [n]: True for videos that failed with this class."""
        number = self.classes.index(error_class) if error_class in self.classes else _MAX_CLASSES
        return np.equal(self.columns["fault"][rows], number)

    def removed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask over ``rows``, [n]: True for videos that were removed."""
        return np.equal(self.columns["state"][rows], REMOVED)

    def make_remark_mask(self, rows: NDArray[np.int64], remark: int) -> NDArray[np.bool_]:
        """Return a mask over ``rows``, [n]: True for rows with the remark, one of the bits HDR to INFRASTRUCTURE."""
        return np.not_equal(np.bitwise_and(self.columns["remarks"][rows], np.uint8(remark)), 0)

    def read(self, row: int) -> VideoRow:
        """Read the complete row of a video from its file; ``row`` is its row number in ``columns``.

        If the file was merged and deleted, a second ledger reads the whole table to find the video's row, which may
        then be a newer one.

        Raises:
            CorruptShard: a file is damaged.
            FileNotFoundError: the file is gone, and no other file has a row of the video.
        """
        number = int(self.columns["row_number"][row])
        file = int(np.searchsorted(self.starts, number, side="right")) - 1
        try:
            return self._table.read_row(self.names[file], number - self.starts[file])
        except FileNotFoundError:
            if self._newer is None:
                self._newer = Ledger(self._store, self._made_with).refresh()
            key = np.array([[self.columns["high"][row], self.columns["low"][row]]])
            (new_row,) = find(key, self._newer.columns["high"], self._newer.columns["low"]).tolist()
            if new_row < 0:
                raise
            return self._newer.read(new_row)

    def count_run_rows(self, run_id: str) -> tuple[int, int]:
        """Count the live rows that a run has committed; return (all of them, the failed ones)."""
        rows = np.flatnonzero(self.columns["run"] == (self.runs.index(run_id) if run_id in self.runs else _MAX_RUNS))
        return len(rows), int(self.failed(rows).sum())

    def lost(self, token_shards: Sequence[str]) -> list[str]:
        """Return the sorted ids of videos in committed token shards that have no row in any file.

        Reads the footers of the shards that no live row names; missing and damaged shards are skipped. Returns [] if
        there are files of another identity, since these may have the rows.

        Args:
            token_shards: shards that were committed before the last refresh.
        """
        if self.foreign:
            return []
        parts = {"run_id": [parse_run_id(name) for name in token_shards], "token_shard": list(token_shards)}
        rows = pa.table({**parts, "error_message": pa.nulls(len(token_shards), pa.string())})
        lost_ids: set[str] = set()
        for index in np.flatnonzero(~np.isin(hash_ties(rows), self.columns["tie"])).tolist():
            with suppress(FileNotFoundError, CorruptShard):  # removed meanwhile, or damaged, which jobs.verify reports
                ids = pa.array(read_footer_ids(self._store, token_shards[index]), pa.string())
                lost_ids |= set(ids.filter(pa.array(self.find(ids) < 0)).to_pylist())
        return sorted(lost_ids)


def _empty_columns(n_rows: int) -> Columns:
    """Allocate the columns of ``_LEDGER`` for ``n_rows`` rows, with undefined values."""
    return {name: np.empty((n_rows, *shape), kind) for name, (kind, shape) in _LEDGER.items()}


def _assign_numbers(texts: pa.ChunkedArray, numbered: list[str], limit: int) -> NDArray[Any]:
    """Return the index in ``numbered`` of each text, [n]; new texts are appended to ``numbered``.

    Once ``numbered`` has ``limit`` texts, further texts share the last index.
    """
    new_texts = [text for text in pc.unique(texts).to_pylist() if text not in numbered]
    numbered += new_texts[: limit - len(numbered)]
    return fill_nulls(pc.index_in(texts, value_set=pa.array(numbered, pa.string())), len(numbered) - 1)


def _make_remark_bits(rows: pa.Table, classes: pa.ChunkedArray) -> NDArray[np.uint8]:
    """Return the remarks on each row as a sum of the bits HDR to INFRASTRUCTURE, [n].

    Args:
        classes: the fault class of each row, "ok" if it did not fail.
    """
    on_gpu = pc.and_(pc.equal(classes, "out-of-memory"), make_membership_mask(rows["error_stage"], ON_THE_GPU))
    remarks = {
        HDR: make_membership_mask(rows["color_transfer"], HDR_TRANSFERS).to_numpy(),
        STRETCHED: pc.fill_null(pc.not_equal(rows["sample_aspect_ratio"], "1:1"), False).to_numpy(),
        UNEVEN: fill_nulls(rows["uneven_positions"]) > 0,
        SHARED: fill_nulls(rows["shared_positions"]) > 0,
        WARNED: fill_nulls(rows["decode_warnings"]) > 0,
        INFRASTRUCTURE: pc.or_(make_membership_mask(classes, INFRASTRUCTURE_CLASSES), on_gpu).to_numpy(),
    }
    bits = [np.where(has_remark, np.uint8(bit), np.uint8(0)) for bit, has_remark in remarks.items()]
    return np.asarray(np.bitwise_or.reduce(bits))


# Columns in memory for each row of small files; other columns are read from the file on demand.
LIVE_COLUMNS = (*RULE_COLUMNS, "video_id", "error_class", "n_tokens", "hidden_size")
_MAX_OPEN_FILES = 16  # sorted files whose footers stay in memory, about 2 MB each
_MAX_SEARCHED_IDS = 256  # for more videos the whole table is read
_MAX_IDS = 2**22  # ids that are compared for suggestions, which takes a second with a local disk


class RowLocation(NamedTuple):
    """The row location of a video's live row: its file, and the number of the row in it.

    Attributes:
        rank: (state, -attempts, -rewritten, tie_break); of several rows of a video, the one with the lowest rank is
            live.
    """

    file: str
    row: int
    rank: tuple[int, int, int, int]

    @property
    def ok(self) -> bool:
        """True if the video has tokens; False if it failed or was removed."""
        return self.rank[0] == OK


class LiveVideos:
    """The live row of every video of a cache, for readers, when this object was opened. Threads may share it.

    Only the rows of small files are in memory; sorted files are searched for a requested video. Reading raises
    CorruptShard for a damaged file, and FileNotFoundError for a file that was merged and deleted since.

    Attributes:
        small: LIVE_COLUMNS of the live rows in small files, with ``file`` and ``row``.
        files: all files of the table.
        sorted: the sorted files among them.
        strays: files in ``videos/`` that are not files of the table, and are ignored.
    """

    def __init__(
        self, table: VideosTable, small: pa.Table, files: Sequence[TableFile] = (), strays: Sequence[str] = ()
    ) -> None:
        """Index the rows in ``small`` by video id; no file is read. ``open`` reads a cache.

        Args:
            small: LIVE_COLUMNS, ``file`` and ``row`` of the live rows in small files. If an id occurs twice, the last
                row counts.
            files: the files of the table, of which the sorted ones are searched.
            strays: kept as an attribute only.
        """
        self.table = table
        self.small = small
        self.files = list(files)
        self.strays = list(strays)
        self.sorted = [file for file in self.files if file.is_sorted]
        self._row_in_small = {video_id: row for row, video_id in enumerate(small["video_id"].to_pylist())}

    @classmethod
    @_retry_after_merges
    def open(cls, store: Store, made_with: str | None = None) -> LiveVideos:
        """List the table, and read its small files.

        It is read again, up to _TRIES times in all, if files are merged away meanwhile.

        Raises:
            CorruptShard: a small file is damaged, or a stray file must not be ignored.
        """
        table = VideosTable(store, made_with, _MAX_OPEN_FILES)
        files, strays = list_table(store)
        small = table.read_small([file.name for file in files if not file.is_sorted], LIVE_COLUMNS)
        rows = pa.concat_tables(
            [make_empty_location_table(LIVE_COLUMNS), *(add_row_locations(rows, name) for name, rows in small)]
        )
        return cls(table, select_live_rows(rows.combine_chunks()), files, strays)

    @classmethod
    @_retry_after_merges
    def read(cls, store: Store, made_with: str | None, columns: Sequence[str]) -> tuple[LiveVideos, pa.Table]:
        """Open the table, and read all of it; return (the opened table, the result of ``live(columns)``).

        It is read again, up to _TRIES times in all, if files are merged away meanwhile.
        """
        videos = cls.open(store, made_with)
        return videos, videos.live(columns)

    @classmethod
    @_retry_after_merges
    def read_removed(cls, store: Store, made_with: str | None) -> list[VideoRow]:
        """Read the whole table, and return the complete rows of the removed videos.

        It is read again, up to _TRIES times in all, if files are merged away meanwhile.
        """
        videos = cls.open(store, made_with)
        return list(videos.table.read_rows(select_removed(videos.live(("status",)))))

    def __reduce__(self) -> tuple[Any, ...]:
        return LiveVideos, (self.table, self.small, self.files, self.strays)

    def find(self, video_id: str) -> RowLocation | None:
        """Find the live row of a video; return None if the video has no row.

        This usually takes two reads per level of sorted files, in parallel on an object store.
        """
        try:
            high = int(hash_texts(pa.array([video_id]))[0, 0])
        except UnicodeEncodeError:  # a lone surrogate is not valid text, so no id has one
            return None
        places = []
        if (row := self._row_in_small.get(video_id)) is not None:
            file = self.small["file"][row].as_py()
            row_in_file = self.small["row"][row].as_py()
            places.append(_build_row_location(self.small, row, file, row_in_file))
        files = [file for file in self.sorted if file.holds(high)]
        look = partial(self._find_in_file, video_id, high)
        if len(files) > 1 and self.table.store.folder is None:  # in parallel, so that latencies do not add up
            with request_threads(len(files)) as pool:
                places += [place for place in pool.map(look, files) if place is not None]
        else:
            places += [place for place in map(look, files) if place is not None]
        return min(places, key=lambda place: place.rank, default=None)

    def _find_in_file(self, video_id: str, high: int, file: TableFile) -> RowLocation | None:
        """Find a video's row in one sorted file; None if the file lacks the video or has another identity.

        Args:
            high: the first half of the id's hash, ``id_high``.
        """
        sorted_file = self.table.open_sorted(file)
        if sorted_file is None:
            return None
        for number in sorted_file.find_row_groups(high, high):
            group = self.table.group(file, number)
            ids = group["id_high"].to_numpy()
            for row in range(*np.searchsorted(ids, np.array([high, high + 1], np.uint64)).tolist()):
                if group["video_id"][row].as_py() == video_id:
                    return _build_row_location(group, row, file.name, number * sorted_file.group_rows + row)
        return None

    def row(self, video_id: str) -> VideoRow | None:
        """Read the complete live row of a video; return None if the video has no row."""
        place = self.find(video_id)
        return None if place is None else self.table.read_row(place.file, place.row)

    def live(self, columns: Sequence[str]) -> pa.Table:
        """Read ``columns`` of every live row from all files, followed by ``file`` and ``row``, sorted by video_id."""
        read_columns = tuple(dict.fromkeys((*columns, *RULE_COLUMNS, "video_id")))
        tables = (
            add_row_locations(pa.concat_tables(file.parts(read_columns)), file.file.name)
            for file in self.table.iter_open_sorted(self.sorted)
        )
        rows = pa.concat_tables([self._read_live_of_small_files(read_columns), *tables])
        return select_live_rows(rows).select([*columns, "file", "row"])

    def _read_live_of_small_files(self, columns: Sequence[str]) -> pa.Table:
        """Return ``columns``, ``file`` and ``row`` of the live rows in small files.

        If ``small`` lacks one of the columns, the small files are read again.
        """
        if set(columns) <= set(self.small.column_names):
            return self.small.select([*columns, "file", "row"])
        tables = [make_empty_location_table(columns)]
        for name, rows in self.table.read_small(sorted(set(self.small["file"].to_pylist())), columns):
            live = self.small["row"].filter(pc.equal(self.small["file"], name))
            tables.append(add_row_locations(rows, name).take(live))
        return pa.concat_tables(tables)

    def near(self, video_id: str) -> str:
        """Return ``"; did you mean A, B?"`` with up to three ids similar to an unknown id, or "" if none is similar.

        Reads the ids of sorted files, except of those that exceed _MAX_IDS ids in all; removed videos are not
        suggested.
        """
        columns = ("video_id", "status")
        parts = [self.small.select(columns)]
        n_rows = len(self.small)
        for file in self.sorted:
            n_rows += file.rows
            if n_rows <= _MAX_IDS and (sorted_file := self.table.open_sorted(file)) is not None:
                parts += sorted_file.parts(columns)
        return suggest_ids(video_id, list_nameable_ids(pa.concat_tables(parts)))

    def rows_of(self, video_ids: Collection[str], columns: Sequence[str]) -> pa.Table:
        """Return ``columns``, ``file`` and ``row`` of the live rows of some videos, sorted by id, once per video.

        Ids without a row are left out. For more than _MAX_SEARCHED_IDS videos the whole table is read.
        """
        ids = sorted(set(video_ids))
        if len(ids) > _MAX_SEARCHED_IDS or not self.sorted:
            table = self.live(("video_id", *(name for name in columns if name != "video_id")))
            return table.filter(make_membership_mask(table["video_id"], ids)).select([*columns, "file", "row"])
        places = [place for video_id in ids if (place := self.find(video_id)) is not None]
        rows = [self.table.read_row(place.file, place.row) for place in places]
        with_places = [{**row, "file": place.file, "row": place.row} for row, place in zip(rows, places, strict=True)]
        return pa.Table.from_pylist(with_places, schema=make_empty_location_table(columns).schema)

    def widths(self) -> set[int]:
        """Return the hidden sizes D of the tokens in the small files and in the first row group of one sorted file.

        This is one number, none if these have no tokens, or several in old caches, which could mix widths.
        """
        first = next(self.table.iter_open_sorted(self.sorted), None)
        widths = set[int]() if first is None else collect_hidden_sizes(self.table.group(first.file, 0))
        return widths | collect_hidden_sizes(self.small)

    def __len__(self) -> int:
        """Return an upper limit on the videos with a row: a video in several files counts several times."""
        return len(self.small) + sum(file.rows for file in self.sorted)


@dataclass
class LiveShards:
    """The token shards of some videos, and the row locations of these videos in the videos table.

    Attributes:
        names: [n] shard names, sorted; videos without tokens have the name "".
        counts: [n] the number of videos per shard.
        row_locations: ID_COLUMNS, ``file`` and ``row`` of each video, by token shard and in the order of its tokens.
    """

    names: pa.Array
    counts: NDArray[np.int64]
    row_locations: pa.Table

    @classmethod
    def of(cls, rows: pa.Table) -> LiveShards:
        """Group rows by token shard; ``rows`` have ID_COLUMNS, token_shard, first_row_group, ``file`` and ``row``."""
        shard_names = pc.fill_null(rows["token_shard"], "")
        rows = sort_by_shard(rows.set_column(rows.schema.get_field_index("token_shard"), "token_shard", shard_names))
        shards = rows.group_by("token_shard", use_threads=False).aggregate([([], "count_all")])
        return cls(shards["token_shard"].combine_chunks(), shards["count_all"].to_numpy(), _select_locations(rows))

    def update_locations(self, rows: pa.Table) -> bool:
        """Replace ``row_locations`` by the row locations in ``rows`` (ID_COLUMNS, ``file``, ``row``), and return True.

        If a video is not in ``rows``, ``row_locations`` stays as it is, and False is returned.
        """
        order = self.row_locations.select(ID_COLUMNS).append_column("order", pa.array(range(len(self.row_locations))))
        places = _select_locations(order.join(rows, list(ID_COLUMNS), join_type="inner").sort_by("order"))
        complete = len(places) == len(self.row_locations)
        if complete:
            self.row_locations = places
        return complete

    def __len__(self) -> int:
        return len(self.counts)

    def name(self, number: int) -> str:
        """Return the name of token shard ``number``."""
        return str(self.names[number].as_py())

    def get_locations(self, number: int) -> pa.Table:
        """Return the row locations of the videos in token shard ``number``, in the order of their tokens."""
        return self.row_locations.slice(int(self.counts[:number].sum()), int(self.counts[number]))


def _select_locations(rows: pa.Table) -> pa.Table:
    """Return ID_COLUMNS, ``row`` and ``file`` of ``rows``, with ``file`` dictionary-encoded to save memory."""
    places = rows.select([*ID_COLUMNS, "row"])
    return places.append_column("file", rows["file"].dictionary_encode())


def collect_hidden_sizes(live: pa.Table) -> set[int]:
    """Return the distinct values of ``hidden_size`` in the rows that are ok."""
    return set(pc.unique(select_ok(live)["hidden_size"]).to_pylist())


def _build_row_location(rows: pa.Table, at: int, file: str, row: int) -> RowLocation:
    """Build the RowLocation of a row of ``file``, from its RULE_COLUMNS in row ``at`` of ``rows``."""
    values = rows.select(RULE_COLUMNS).slice(at, 1).to_pylist()[0]
    attempts = values["attempts"] or 0
    rewritten = values["rewritten"] or 0
    state = _STATES.get(values["status"], FAILED)
    return RowLocation(file, row, (state, -attempts, -rewritten, values["tie_break"]))
