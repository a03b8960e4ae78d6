"""Which row of a video counts: one rule, and its two views, the driver's Ledger and the readers' LiveVideos.

The videos table may have many rows of a video. A video's live row is the first of them by (removed before ok before
failed, most attempts, most rewritten, smallest tie_break). The rule looks at nothing but rows, so files may come in any
order, twice, or late. TokenCache, resume, inspect, verify and merge all take it from here.

The driver of a run keeps the live row of every video in a ``Ledger``, 96 bytes each, and takes in each file once.
``LiveVideos`` keeps rows of small files alone, and searches a sorted file when a video is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.cache.near_ids import did_you_mean_id
from pipeline.cache.schema import KEY_COLUMNS, LATER
from pipeline.cache.table import TableFile, VideosTable, add_places, empty_rows, table_files
from pipeline.cache.token_shard import ids_in_footer, run_of
from pipeline.errors import ON_THE_GPU, CorruptShard
from pipeline.errors import OUTSIDE as OUTSIDE_CLASSES
from pipeline.keys import find, keys_of, tie_keys
from pipeline.rows import BY_DECODING, VideoRow
from pipeline.storage.stores import Store, request_threads

#: Columns of the hash of an id.
ID_COLUMNS = ("id_high", "id_low")
#: Columns that the rule of which row of a video counts looks at.
RULE_COLUMNS = (*ID_COLUMNS, "status", "attempts", "rewritten", "tie_break")
# States of a row in the order in which they count; a status of any other name has failed too.
REMOVED, OK, FAILED = 0, 1, 2
_STATES = {"removed": REMOVED, "ok": OK}
# What verify and generate keep in memory for each video; the rest of a row is read from its file when asked for.
INDEX_COLUMNS = ("video_id", *RULE_COLUMNS, "error_class", "uri", "source_size", "start_s", "end_s")
_MAX_TEXT_BYTES = 2**31  # that 32-bit offsets can address

Columns = dict[str, np.ndarray]  # rows as numbers, by name
_RULE_NAMES = ("high", "low", "state", "attempts", "rewritten", "tie", "clip", "size", "earlier")  # in ``find_live``


def live_rows(rows: pa.Table) -> pa.Table:
    """Select each video's live row among rows with RULE_COLUMNS and video_id, sorted by video_id."""
    order, _ = find_live(rule_columns(rows))
    if rows.nbytes >= _MAX_TEXT_BYTES:
        wide = [field.with_type(pa.large_string()) if field.type == pa.string() else field for field in rows.schema]
        rows = rows.cast(pa.schema(wide, rows.schema.metadata))
    return rows.take(pa.array(order)).sort_by("video_id")


def find_live(columns: Mapping[str, np.ndarray]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find each id's live row, by key: return the rows' places, and how often other files were tried under each id.

    Args:
        columns: [n] each of high, low, state, attempts, rewritten and tie, by which rows are compared; clip, size and
            earlier tell other files of an id apart. ``rule_columns`` gives them.
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
    shared = np.append(repeats, False) | ~first
    several = order[shared]  # only videos with several rows need the rest of the rule
    rows = {name: columns[name][several] for name in _RULE_NAMES}
    others = [-rows["rewritten"].astype(np.int64), rows["tie"]]
    best = best_first([rows["high"], rows["low"]], rows["state"], rows["attempts"], others)
    rows = {name: column[best] for name, column in rows.items()}
    starts = np.flatnonzero(first[shared])
    live = np.repeat(starts, np.diff(np.append(starts, len(several))))
    same_file = (rows["clip"] == rows["clip"][live]) & (rows["size"] == rows["size"][live])
    on_others = np.where(same_file, rows["earlier"], rows["attempts"])
    order[shared] = several[best]
    earlier[np.flatnonzero(shared)[starts]] = np.maximum.reduceat(on_others, starts)
    return order[first], earlier[first]


def best_first(
    ids: Sequence[NDArray[Any]], states: NDArray[np.int8], attempts: NDArray[Any], others: Sequence[NDArray[Any]]
) -> NDArray[np.int64]:
    """Sort rows by the rule: those of one id stand together, the live one first; [n] places.

    Args:
        ids: one array [n] or several that make up an id, the most significant first.
        states: [n] of ``states_of``.
        attempts: [n].
        others: what decides then, ascending: [n] each.
    """
    return np.lexsort((*reversed(others), -attempts.astype(np.int64), states, *reversed(ids)))


def rule_columns(rows: pa.Table) -> Columns:
    """Convert rows with RULE_COLUMNS to the arrays that ``find_live`` takes; a column that rows may lack is 0."""
    zeros = np.zeros(len(rows), np.int64)
    optional = {"clip": "clip_key", "size": "source_size", "earlier": "earlier_attempts"}
    present = {name: column for name, column in optional.items() if column in rows.schema.names}
    return {
        "high": rows["id_high"].to_numpy(),
        "low": rows["id_low"].to_numpy(),
        "state": states_of(rows["status"]),
        "attempts": fill_nulls(rows["attempts"]),
        "rewritten": fill_nulls(rows["rewritten"]),
        "tie": rows["tie_break"].to_numpy(),
        **dict.fromkeys(optional, zeros),
        **{name: fill_nulls(rows[column]) for name, column in present.items()},
    }


def states_of(status: pa.ChunkedArray) -> NDArray[np.int8]:
    """Return each row's state, [n]: REMOVED, OK, or FAILED for all others."""
    states = pc.index_in(status, value_set=pa.array(_STATES.keys()))
    return fill_nulls(states, FAILED).astype(np.int8)


def fill_nulls(column: pa.ChunkedArray, value: float = 0) -> NDArray[Any]:
    """Return a column as an array, with ``value`` for nulls."""
    return np.asarray(pc.fill_null(column, value).to_numpy())


def ok_rows(rows: pa.Table) -> pa.Table:
    """Select the rows of videos that have tokens."""
    return rows.filter(pc.equal(rows["status"], "ok"))


def ids_to_name(rows: pa.Table) -> pa.ChunkedArray:
    """Return the ids of rows that a message may name: those that were not removed."""
    return rows.filter(pc.not_equal(rows["status"], "removed"))["video_id"]


def in_shard_order(rows: pa.Table) -> pa.Table:
    """Return rows in the order in which their tokens lie: by token shard and row group."""
    return rows.sort_by([("token_shard", "ascending"), ("first_row_group", "ascending")])


TIMED: Final = ("decode", "encode", "prune", "write")  # the steps whose seconds a row of the videos table has
_LEDGER: Final[dict[str, tuple[type[np.generic], tuple[int, ...]]]] = {
    "high": (np.uint64, ()),  # the two halves of the id's key
    "low": (np.uint64, ()),
    "clip": (np.uint64, ()),  # the key of uri, start_s, end_s
    "size": (np.int64, ()),  # bytes of the source; -1 where they are not known
    "mark": (np.uint64, ()),  # the source's ``mark_key``; 0 where it is not known
    "sample": (np.uint64, ()),  # the source's ``sample_key``, likewise
    "n_tokens": (np.int32, ()),
    "n_total": (np.int32, ()),
    "place": (np.uint32, ()),  # number of the row, over all files in the order in which they were read
    "attempts": (np.uint16, ()),
    "earlier": (np.uint8, ()),  # attempts on another file or clip under this id
    "rewritten": (np.uint16, ()),
    "tie": (np.uint64, ()),
    "run": (np.uint16, ()),  # its number in ``runs``
    "state": (np.int8, ()),  # REMOVED, OK or FAILED
    "fault": (np.uint8, ()),  # 0 ok or removed, else the number of its class in ``classes``
    "remarks": (np.uint8, ()),  # the bits HDR to OUTSIDE
    "note": (np.uint8, ()),  # 0, or why another decoder than asked served: its number in ``notes``
    "decoder": (np.uint8, ()),  # 0, or the user's own decoder and its version: their number in ``decoders``
    "seconds": (np.float32, (4,)),  # seconds of each step in TIMED
}
# What rows remark on their video: colours, pixels, positions in time (two bits), warnings of the decoder, and a failure
# by no fault of the video (io, internal, memory of a GPU).
HDR, STRETCHED, UNEVEN, SHARED, WARNED, OUTSIDE = 1, 2, 4, 8, 16, 32
_HDR_TRANSFERS = ("smpte2084", "arib-std-b67")  # PQ and HLG
_MAX_RUNS, _MAX_NOTES, _MAX_CLASSES = 2**16, 2**8 - 1, 2**8  # all further texts share the last number
# Columns of a row that the ledger is made of.
_LEDGER_READS = (
    *KEY_COLUMNS,
    *("run_id", "source_size", "status", "error_class", "error_stage", "attempts"),
    *("n_tokens", "n_total", "hidden_size", "decode_warnings", "backend_note", "backend", "backend_version"),
    *LATER,
    *(f"{stage}_s" for stage in TIMED),
)
_FILES_AT_ONCE = 256  # small files that are turned into arrays at once, since numpy's cost is by the call


class Ledger:
    """The live row of every video in numbers, in the order of their keys, for the driver of a run.

    An id is a hash of 16 bytes, the clip that it was made of one of 8; of the rest there are the numbers that resume
    and the summary add up. Anything else of a row is read again from its file.

    Attributes:
        columns: name -> an array of all rows; see ``_LEDGER``.
        classes: the classes of faults by their numbers; 0 is "ok".
        runs: the ids of runs by their numbers.
        decoders: decoders of users' own, each with its version, by their numbers; 0 is "".
        notes: why another decoder than asked served, by number, with numbers in the text replaced by N; 0 is "".
        hidden_size: D of the tokens; 0 while no video is ok.
        names: the files that were read; ``starts`` is the number of the first row of each.
        n_rows: of all files, live or not.
    """

    def __init__(self, store: Store, made_with: str | None = None) -> None:
        """Start empty; ``made_with`` is the fingerprint of the identity whose rows count, None for all."""
        self._store = store
        self._table = VideosTable(store, made_with, keep=2)  # all files are read once, and few rows again
        self.names: list[str] = []
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
        """Files of another identity, whose rows are left out -> the fingerprint of that identity."""
        return self._table.foreign

    def refresh(self) -> Ledger:
        """Take in what was committed since; files never change, so each is read once. Raises CorruptShard, OSError."""
        known = {*self.names, *self.foreign}
        new = [file for file in table_files(self._store) if file.name not in known]
        n_known = len(self.names)
        parts = [self.columns]
        small = self._table.read_small([file.name for file in new if not file.level], _LEDGER_READS)
        while some := list(islice(small, _FILES_AT_ONCE)):
            first = self.n_rows
            for name, rows in some:
                self._note_file(name)
                self.n_rows += len(rows)
            parts.append(self._to_columns(pa.concat_tables([rows for _, rows in some]), first))
        parts.append(self._read_sorted([file for file in new if file.level]))
        if len(self.names) > n_known:
            for name in _LEDGER:  # column by column, so that only one is in memory twice
                pieces = [part.pop(name) for part in parts]
                filled = [piece for piece in pieces if len(piece)]
                self.columns[name] = filled[0] if len(filled) == 1 else np.concatenate(pieces)
            self._keep_live()
        return self

    def _read_sorted(self, files: Sequence[TableFile]) -> Columns:
        """Read sorted files into columns made for them at once, as their names tell how many rows they have."""
        columns, end = _empty_columns(sum(file.rows for file in files)), 0
        for file in files:
            opened = self._table.open_sorted(file.name)
            if opened is None:
                continue
            self._note_file(file.name)
            for rows in opened.parts(_LEDGER_READS):
                for name, values in self._to_columns(rows, self.n_rows).items():
                    columns[name][end : end + len(rows)] = values
                end += len(rows)
                self.n_rows += len(rows)
        return {name: column[:end] for name, column in columns.items()}

    def _note_file(self, name: str) -> None:
        """Note a file whose rows come next."""
        self.names.append(name)
        self.starts.append(self.n_rows)

    def _to_columns(self, rows: pa.Table, first: int) -> Columns:
        """Convert rows to ledger columns; ``first`` is the place of the first row."""
        self.hidden_size = self.hidden_size or pc.max(rows["hidden_size"]).as_py() or 0
        numbers = rule_columns(rows)
        classes = pc.if_else(pc.equal(rows["status"], "failed"), pc.fill_null(rows["error_class"], "internal"), "ok")
        return {
            **numbers,
            "size": fill_nulls(rows["source_size"], -1),
            "mark": fill_nulls(rows["source_mark"]),
            "sample": fill_nulls(rows["source_sample"]),
            "n_tokens": fill_nulls(rows["n_tokens"]),
            "n_total": fill_nulls(rows["n_total"]),
            "place": np.arange(first, first + len(rows), dtype=np.uint32),
            "attempts": np.clip(numbers["attempts"], 0, 2**16 - 1).astype(np.uint16),
            "earlier": np.clip(numbers["earlier"], 0, 255).astype(np.uint8),
            "rewritten": np.clip(numbers["rewritten"], 0, 2**16 - 1).astype(np.uint16),
            "run": _number_texts(rows["run_id"], self.runs, _MAX_RUNS).astype(np.uint16),
            "fault": _number_texts(classes, self.classes, _MAX_CLASSES).astype(np.uint8),
            "remarks": _remarks(rows, classes),
            "note": self._number_notes(rows["backend_note"]),
            "decoder": self._number_decoders(rows["backend"], rows["backend_version"]),
            "seconds": np.stack([fill_nulls(rows[f"{stage}_s"]) for stage in TIMED], axis=1).astype(np.float32),
        }

    def _number_notes(self, notes: pa.ChunkedArray) -> NDArray[np.uint8]:
        """Return the number in ``notes`` of each row's reason for another decoder, [n]; 0 where none served."""
        notes = pc.fill_null(notes, "")
        if not pc.any(pc.not_equal(notes, "")).as_py():
            return np.zeros(len(notes), np.uint8)
        notes = pc.if_else(pc.starts_with(notes, BY_DECODING), "", notes)
        notes = pc.replace_substring_regex(notes, r" [0-9]+\b", " N")
        return _number_texts(notes, self.notes, _MAX_NOTES).astype(np.uint8)

    def _number_decoders(self, names: pa.ChunkedArray, versions: pa.ChunkedArray) -> NDArray[np.uint8]:
        """Return the number in ``decoders`` of the user's own decoder that read each row's video, [n]; 0 for others."""
        own = pc.fill_null(pc.match_substring(names, ":"), False)
        if not pc.any(own).as_py():
            return np.zeros(len(names), np.uint8)
        texts = pc.if_else(own, pc.binary_join_element_wise(names, pc.fill_null(versions, ""), " "), "")
        return _number_texts(texts, self.decoders, _MAX_NOTES).astype(np.uint8)

    def _keep_live(self) -> None:
        """Sort the rows by their keys and keep the live ones alone: a row that lost to another one never comes back."""
        high = self.columns["high"]
        if (high[1:] > high[:-1]).all():  # rows of one level of sorted files are in order already
            return
        order, earlier = find_live(self.columns)
        for name, column in self.columns.items():
            self.columns[name] = column[order]
        self.columns["earlier"] = np.minimum(earlier, 255).astype(np.uint8)

    def find(self, ids: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
        """Return the row [n] of each video in ``columns``; -1 where it has none."""
        return find(keys_of(ids), self.columns["high"], self.columns["low"])

    def failed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether these rows [n] are failures."""
        return np.equal(self.columns["state"][rows], FAILED)

    def failed_by(self, rows: NDArray[np.int64], error_class: str) -> NDArray[np.bool_]:
        """Return whether these rows [n] are failures of a class."""
        number = self.classes.index(error_class) if error_class in self.classes else _MAX_CLASSES
        return np.equal(self.columns["fault"][rows], number)

    def removed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether the videos of these rows [n] were removed for good."""
        return np.equal(self.columns["state"][rows], REMOVED)

    def remarked(self, rows: NDArray[np.int64], remark: int) -> NDArray[np.bool_]:
        """Return whether these rows [n] make a remark: HDR, STRETCHED, UNEVEN, SHARED, WARNED or OUTSIDE."""
        return np.not_equal(np.bitwise_and(self.columns["remarks"][rows], np.uint8(remark)), 0)

    def read(self, row: int) -> VideoRow:
        """Read the whole row of a video again from its file. Raises CorruptShard, OSError."""
        place = int(self.columns["place"][row])
        file = int(np.searchsorted(self.starts, place, side="right")) - 1
        return self._table.read_row(self.names[file], place - self.starts[file])

    def of_run(self, run_id: str) -> tuple[int, int]:
        """Count the live rows that this run has committed: (all, failed ones)."""
        rows = np.flatnonzero(self.columns["run"] == (self.runs.index(run_id) if run_id in self.runs else _MAX_RUNS))
        return len(rows), int(self.failed(rows).sum())

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


def _empty_columns(n_rows: int) -> Columns:
    """Return the columns of ``_LEDGER`` for so many rows, without values."""
    return {name: np.empty((n_rows, *shape), kind) for name, (kind, shape) in _LEDGER.items()}


def _number_texts(texts: pa.ChunkedArray, known: list[str], limit: int) -> NDArray[Any]:
    """Return the place in ``known`` of each text, [n]; it takes in new ones up to ``limit``, others share the last."""
    new = [text for text in pc.unique(texts).to_pylist() if text not in known]
    known += new[: limit - len(known)]
    return fill_nulls(pc.index_in(texts, value_set=pa.array(known, pa.string())), len(known) - 1)


def _remarks(rows: pa.Table, classes: pa.ChunkedArray) -> NDArray[np.uint8]:
    """Return the bits HDR to OUTSIDE of rows, [n]; ``classes`` are those of their faults."""
    on_gpu = pc.and_(pc.equal(classes, "out-of-memory"), _is_among(rows["error_stage"], ON_THE_GPU))
    remarks = {
        HDR: _is_among(rows["color_transfer"], _HDR_TRANSFERS).to_numpy(),
        STRETCHED: pc.fill_null(pc.not_equal(rows["sample_aspect_ratio"], "1:1"), False).to_numpy(),
        UNEVEN: fill_nulls(rows["uneven_positions"]) > 0,
        SHARED: fill_nulls(rows["shared_positions"]) > 0,
        WARNED: fill_nulls(rows["decode_warnings"]) > 0,
        OUTSIDE: pc.or_(_is_among(classes, OUTSIDE_CLASSES), on_gpu).to_numpy(),
    }
    bits = [np.where(made, np.uint8(bit), np.uint8(0)) for bit, made in remarks.items()]
    return np.asarray(np.bitwise_or.reduce(bits))


def _is_among(column: pa.ChunkedArray, values: Iterable[str]) -> pa.ChunkedArray:
    """Return whether each text of a column is one of ``values``."""
    return pc.is_in(column, value_set=pa.array(sorted(values), pa.string()))


# Of each row of small files; the rest of a row is read from its file when asked for.
LIVE_COLUMNS = (*RULE_COLUMNS, "video_id", "error_class", "n_tokens", "hidden_size")
_OPENED = 16  # sorted files whose ends are kept in memory, some 2 MB each
_TRIES = 5  # attempts to open a table whose files another run merges
_FEW = 256  # up to so many videos are searched for one by one
_MAX_IDS = 2**22  # ids that are looked through for likely ones: a second on a disk


class RowPlace(NamedTuple):
    """The place of a video's live row: its file and the row in it.

    ``rank`` is what the rule compares, and the lowest is live: state, attempts, rewritten and tie_break.
    """

    shard: str
    row: int
    rank: tuple[int, int, int, int]

    @property
    def ok(self) -> bool:
        """Whether the video has tokens."""
        return self.rank[0] == OK


class LiveVideos:
    """The live row of every video of a cache, for readers. Threads may share it.

    Attributes:
        table: the cache's table, for single rows and for the files that are left out.
        small: LIVE_COLUMNS of the live rows among the small files, with ``shard`` and ``row``.
        files: all that there were when this was opened, whose rows these are.
        sorted: the sorted ones among them.
    """

    def __init__(self, table: VideosTable, small: pa.Table, files: Sequence[TableFile] = ()) -> None:
        self.table, self.small, self.files = table, small, list(files)
        self.sorted = [file for file in self.files if file.level]
        self._row_in_small = {video_id: row for row, video_id in enumerate(small["video_id"].to_pylist())}

    @classmethod
    def open(cls, store: Store, made_with: str | None = None) -> LiveVideos:
        """List the table, and read its small files: one LIST, and a GET each. Raises CorruptShard, OSError."""
        for attempt in range(_TRIES):
            table, files = VideosTable(store, made_with, _OPENED), table_files(store)
            small = table.read_small([file.name for file in files if not file.level], LIVE_COLUMNS)
            try:
                rows = pa.concat_tables([empty_rows(LIVE_COLUMNS), *(add_places(rows, name) for name, rows in small)])
            except FileNotFoundError:  # another run has merged the file since it was listed
                if attempt == _TRIES - 1:
                    raise
            else:
                return cls(table, live_rows(rows.combine_chunks()), files)
        raise AssertionError("not reached")

    def __reduce__(self) -> tuple[Any, ...]:
        return LiveVideos, (self.table, self.small, self.files)

    def find(self, video_id: str) -> RowPlace | None:
        """Find the live row of a video, or None; at most two reads of each level of sorted files.

        Raises CorruptShard, FileNotFoundError where a file was merged since this was opened, and OSError.
        """
        try:
            high = int(keys_of(pa.array([video_id]))[0, 0])
        except UnicodeEncodeError:  # half of a surrogate pair is not valid text, so no id has one
            return None
        places = []
        if (row := self._row_in_small.get(video_id)) is not None:
            places.append(_place_of(self.small, row, self.small["shard"][row].as_py(), self.small["row"][row].as_py()))
        files = [file for file in self.sorted if file.holds(high)]
        look = partial(self._find_in_sorted, video_id, high)
        if len(files) > 1 and self.table.store.folder is None:  # so that the delays do not add up
            with request_threads(len(files)) as pool:
                places += [place for place in pool.map(look, files) if place is not None]
        else:
            places += [place for place in map(look, files) if place is not None]
        return min(places, key=lambda place: place.rank, default=None)

    def _find_in_sorted(self, video_id: str, high: int, file: TableFile) -> RowPlace | None:
        """Find a video's row in one sorted file, or None; ``high`` is the first half of its id's hash."""
        opened = self.table.open_sorted(file.name)
        if opened is None:
            return None
        for number in opened.groups_of(high, high):
            group = self.table.group(file.name, number)
            ids = group["id_high"].to_numpy()
            for row in range(*np.searchsorted(ids, np.array([high, high + 1], np.uint64)).tolist()):
                if group["video_id"][row].as_py() == video_id:
                    return _place_of(group, row, file.name, number * opened.group_rows + row)
        return None

    def row(self, video_id: str) -> VideoRow | None:
        """Read the live row of a video, or None where it has none. Raises as ``find``."""
        place = self.find(video_id)
        return None if place is None else self.table.read_row(place.shard, place.row)

    def live(self, columns: Sequence[str]) -> pa.Table:
        """Read ``columns`` of every live row with ``shard`` and ``row``, by video_id. All files are read."""
        needed = tuple(dict.fromkeys((*columns, *RULE_COLUMNS, "video_id")))
        tables = [self._live_in_small(needed)]
        for file in self.sorted:
            opened = self.table.open_sorted(file.name)
            tables += [] if opened is None else [add_places(pa.concat_tables(opened.parts(needed)), file.name)]
        return live_rows(pa.concat_tables(tables)).select([*columns, "shard", "row"])

    def _live_in_small(self, columns: Sequence[str]) -> pa.Table:
        """Return these columns of the live rows in small files, read again where memory lacks them."""
        if set(columns) <= set(self.small.column_names):
            return self.small.select([*columns, "shard", "row"])
        tables = [empty_rows(columns)]
        for name, rows in self.table.read_small(sorted(set(self.small["shard"].to_pylist())), columns):
            live = self.small["row"].filter(pc.equal(self.small["shard"], name))
            tables.append(add_places(rows, name).take(live))
        return pa.concat_tables(tables)

    def near(self, video_id: str) -> str:
        """Return ``"; did you mean A?"`` with the ids nearest to one that has no row, or "".

        Reads the ids of sorted files, up to _MAX_IDS of them. Raises as ``find``.
        """
        columns = ("video_id", "status")
        parts, n_rows = [self.small.select(columns)], len(self.small)
        for file in self.sorted:
            n_rows += file.rows
            if n_rows <= _MAX_IDS and (opened := self.table.open_sorted(file.name)) is not None:
                parts += opened.parts(columns)
        return did_you_mean_id(video_id, ids_to_name(pa.concat_tables(parts)))

    def rows_of(self, video_ids: Collection[str], columns: Sequence[str]) -> pa.Table:
        """Return ``columns`` of the live rows of these videos, with ``shard`` and ``row``, in any order.

        Ids without a row are left out. Rows of few videos are searched for; for many all live rows are read.
        """
        ids = sorted(set(video_ids))
        if len(ids) > _FEW or not self.sorted:
            table = self.live(("video_id", *(name for name in columns if name != "video_id")))
            chosen = table.filter(pc.is_in(table["video_id"], value_set=pa.array(ids, pa.string())))
            return chosen.select([*columns, "shard", "row"])
        places = [place for video_id in ids if (place := self.find(video_id)) is not None]
        rows = [self.table.read_row(place.shard, place.row) for place in places]
        with_places = [{**row, "shard": place.shard, "row": place.row} for row, place in zip(rows, places, strict=True)]
        return pa.Table.from_pylist(with_places, schema=empty_rows(columns).schema)

    def widths(self) -> set[int]:
        """Return the widths D of the tokens: one number, but for caches from before a second width was refused."""
        for file in self.sorted:
            if self.table.open_sorted(file.name) is not None:
                return widths_of(self.table.group(file.name, 0)) | widths_of(self.small)
        return widths_of(self.small)

    def __len__(self) -> int:
        """Count the videos with a row; one that is in several files is counted in each, as telling takes a search."""
        return len(self.small) + sum(file.rows for file in self.sorted)


@dataclass
class LiveShards:
    """The token shards of some videos, and where the rows of these videos are.

    Videos without tokens are under the name "".

    Attributes:
        names: [n], sorted: in the order in which runs wrote them.
        counts: [n] videos of each.
        places: ``shard``, ``row`` and the hash of the id of each video, in the order of the token shards and within
            these.
    """

    names: pa.Array
    counts: NDArray[np.int64]
    places: pa.Table

    @classmethod
    def of(cls, rows: pa.Table) -> LiveShards:
        """Group rows by token shard; they have ID_COLUMNS, token_shard, first_row_group, shard and row."""
        named = pc.fill_null(rows["token_shard"], "")
        rows = in_shard_order(rows.set_column(rows.schema.get_field_index("token_shard"), "token_shard", named))
        shards = rows.group_by("token_shard", use_threads=False).aggregate([([], "count_all")])
        return cls(shards["token_shard"].combine_chunks(), shards["count_all"].to_numpy(), _to_places(rows))

    def find_places(self, rows: pa.Table) -> bool:
        """Find the same videos among ``rows`` (of all videos: ID_COLUMNS, shard, row); return False if one lacks."""
        order = self.places.select(ID_COLUMNS).append_column("order", pa.array(range(len(self.places))))
        places = _to_places(order.join(rows, list(ID_COLUMNS), join_type="inner").sort_by("order"))
        complete = len(places) == len(self.places)
        if complete:
            self.places = places
        return complete

    def __len__(self) -> int:
        return len(self.counts)

    def name(self, number: int) -> str:
        """Return the name of the token shard of this number."""
        return str(self.names[number].as_py())

    def places_of(self, number: int) -> pa.Table:
        """Return the places of the videos of a token shard, in its order: ``shard`` and ``row``."""
        return self.places.slice(int(self.counts[:number].sum()), int(self.counts[number]))


def _to_places(rows: pa.Table) -> pa.Table:
    """Return the places of rows with the hashes of their ids, and each name of a file in memory once."""
    places = rows.select([*ID_COLUMNS, "row"])
    return places.append_column("shard", rows["shard"].dictionary_encode())


def widths_of(live: pa.Table) -> set[int]:
    """Return the different ``hidden_size`` of the live rows that are ok."""
    return set(pc.unique(ok_rows(live)["hidden_size"]).to_pylist())


def _place_of(rows: pa.Table, at: int, shard: str, row: int) -> RowPlace:
    """Build the RowPlace of the row number ``at`` of ``rows``, which have RULE_COLUMNS."""
    values = rows.select(RULE_COLUMNS).slice(at, 1).to_pylist()[0]
    attempts, rewritten = values["attempts"] or 0, values["rewritten"] or 0
    state = _STATES.get(values["status"], FAILED)
    return RowPlace(shard, row, (state, -attempts, -rewritten, values["tie_break"]))
