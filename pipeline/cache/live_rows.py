"""Which row of a video counts, in one rule for every reader of the table: TokenCache, resume, inspect, verify, merge.

A video's live row is the first by (removed before ok before failed, most attempts, most rewritten, smallest tie_break).
The rule looks at nothing but rows, so files may come in any order, twice, or late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.cache.loaded_once import LoadedOnce
from pipeline.cache.schema import KEY_COLUMNS, VIDEO_SCHEMA
from pipeline.cache.table import SortedFile, TableFile, file_named, made_with_of, read_small
from pipeline.errors import CorruptShard
from pipeline.keys import clip_keys, keys_of, tie_keys
from pipeline.rows import VideoRecord, VideoRow
from pipeline.storage.stores import Store

TOKENS, VIDEOS = "tokens", "videos"  # folders of a cache
PLACE = (pa.field("shard", pa.string()), pa.field("row", pa.int32()))
_MOST_TEXT = 2**31  # bytes of text that 32-bit offsets can address
_GROUPS = 2  # row groups of sorted files that are kept in memory, some MB each
_STATES = ("removed", "ok")  # these states come before all others, in this order
_RULE = ("high", "low", "state", "attempts", "rewritten", "tie")  # RULE_COLUMNS in numbers
#: Columns that the rule of which row of a video counts looks at.
RULE_COLUMNS = ("id_high", "id_low", "status", "attempts", "rewritten", "tie_break")
# What stays in memory for each video; the rest of a row is read from its file when asked for.
INDEX_COLUMNS = ("video_id", *RULE_COLUMNS, "error_class", "uri", "source_size", "start_s", "end_s")

RuleColumns = dict[str, np.ndarray]


def belongs(found: str | None, made_with: str | None) -> bool:
    """Return whether a file that carries the fingerprint ``found`` is of a cache with ``made_with``; None is any."""
    return found is None or made_with is None or found == made_with


def completed(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return these columns of rows; those that came later and are not there are null."""
    for name in columns:
        if name not in table.schema.names:
            field = VIDEO_SCHEMA.field(name)
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(list(columns)).replace_schema_metadata(None)


def with_keys(table: pa.Table) -> pa.Table:
    """Return rows of VIDEO_SCHEMA with their KEY_COLUMNS, which are computed from other columns."""
    keys = keys_of(table["video_id"])
    zeros = pa.array(np.zeros(len(table), np.int32))
    made = [keys[:, 0], keys[:, 1], clip_keys(table), zeros, zeros, tie_keys(table)]
    for name, values in zip(KEY_COLUMNS, made, strict=True):
        if name in table.schema.names:
            table = table.drop_columns([name])
        table = table.append_column(VIDEO_SCHEMA.field(name), pa.array(values))
    return table


def keyed(rows: Sequence[VideoRecord] | Sequence[VideoRow]) -> pa.Table:
    """Build a table of VIDEO_SCHEMA from rows, with their KEY_COLUMNS; counts of rewrites and earlier attempts stay."""
    table = with_keys(pa.Table.from_pylist(list(rows), schema=VIDEO_SCHEMA))
    for name in ("rewritten", "earlier_attempts"):
        counts = pa.array([row.get(name) or 0 for row in rows], pa.int32())
        table = table.set_column(table.schema.get_field_index(name), VIDEO_SCHEMA.field(name), counts)
    return table.select(VIDEO_SCHEMA.names).cast(VIDEO_SCHEMA)


def with_place(table: pa.Table, name: str) -> pa.Table:
    """Return all rows of the file ``name`` with two more columns: the file's name and the number of the row in it."""
    table = table.append_column(PLACE[0], pa.repeat(name, len(table)).cast(pa.string()))
    return table.append_column(PLACE[1], pa.array(np.arange(len(table)), pa.int32()))


def no_rows(columns: Sequence[str]) -> pa.Table:
    """Return a table of these columns with ``shard`` and ``row``, without rows, to which others are joined."""
    return pa.schema([*(VIDEO_SCHEMA.field(name) for name in columns), *PLACE]).empty_table()


def ok_rows(rows: pa.Table) -> pa.Table:
    """Select the rows of videos that have tokens."""
    return rows.filter(pc.equal(rows["status"], "ok"))


def in_shard_order(rows: pa.Table) -> pa.Table:
    """Return rows in the order in which their tokens lie: by token shard and row group."""
    return rows.sort_by([("token_shard", "ascending"), ("first_row_group", "ascending")])


def read_file(store: Store, file: TableFile, columns: Sequence[str] | None = None) -> pa.Table:
    """Read all rows of one file of the videos table into memory. Raises CorruptShard, OSError."""
    columns = VIDEO_SCHEMA.names if columns is None else columns
    if file.level:
        opened = SortedFile(store, file)
        return completed(pa.concat_tables(opened.parts(columns)), columns)
    return small_rows(store, file.name, store.read(file.name), columns)


def small_rows(
    store: Store, name: str, data: bytes, columns: Sequence[str], made_with: str | None = None
) -> pa.Table | None:
    """Parse ``columns`` of a small file; None where it is not of the identity ``made_with``. Raises CorruptShard."""
    table = read_small(store, name, data, columns)
    return completed(table, columns) if belongs(made_with_of(table.schema.metadata), made_with) else None


def states_of(status: pa.ChunkedArray) -> NDArray[np.int8]:
    """Return each row's state, [n]: 0 removed, 1 ok, 2 all others."""
    found = pc.index_in(status, value_set=pa.array(_STATES))
    return np.asarray(pc.fill_null(found, len(_STATES)).to_numpy(), np.int8)


def best_first(
    ids: Sequence[NDArray[Any]], states: NDArray[np.int8], attempts: NDArray[Any], others: Sequence[NDArray[Any]]
) -> NDArray[np.int64]:
    """Sort rows by the rule of which row of a video counts: those of one id stand together, the live one first; [n].

    Args:
        ids: one array [n] or several that make up an id, the most significant first.
        states: [n] of ``states_of``.
        attempts: [n].
        others: what decides then, ascending: [n] each.
    """
    return np.lexsort((*reversed(others), -attempts.astype(np.int64), states, *reversed(ids)))


def rule_columns(rows: pa.Table) -> RuleColumns:
    """Convert rows with RULE_COLUMNS to the arrays that ``live_and_earlier`` takes.

    A column that rows may lack is 0.
    """
    optional = {"clip": "clip_key", "size": "source_size", "earlier": "earlier_attempts"}
    there = rows.schema.names
    zeros = np.zeros(len(rows), np.int64)
    return {
        "high": rows["id_high"].to_numpy(),
        "low": rows["id_low"].to_numpy(),
        "state": states_of(rows["status"]),
        "attempts": filled(rows["attempts"]),
        "rewritten": filled(rows["rewritten"]),
        "tie": rows["tie_break"].to_numpy(),
        **{name: filled(rows[column]) if column in there else zeros for name, column in optional.items()},
    }


def live_and_earlier(columns: RuleColumns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find each id's live row: return the places of these, by key, and how often other files were tried under each id.

    Args:
        columns: [n] each of high, low, state, attempts, rewritten and tie, by which rows are compared; clip, size and
            earlier tell other files of an id apart.
    """
    order = np.lexsort((columns["low"], columns["high"]))
    alike = np.ones(max(len(order) - 1, 0), bool)
    for name in ("high", "low"):
        ids = columns[name][order]
        alike &= ids[1:] == ids[:-1]
    earlier = columns["earlier"][order].astype(np.int64)
    if not alike.any():
        return order, earlier
    first = ~np.append(False, alike)
    shared = np.append(alike, False) | ~first
    several = order[shared]  # only videos with several rows need the rest of the rule
    own = {name: columns[name][several] for name in (*_RULE, "clip", "size", "earlier")}
    others = [-own["rewritten"].astype(np.int64), own["tie"]]
    best = best_first([own["high"], own["low"]], own["state"], own["attempts"], others)
    own = {name: column[best] for name, column in own.items()}
    starts = np.flatnonzero(first[shared])
    live = np.repeat(starts, np.diff(np.append(starts, len(several))))
    same = (own["clip"] == own["clip"][live]) & (own["size"] == own["size"][live])
    before = np.where(same, own["earlier"], own["attempts"])
    order[shared] = several[best]
    earlier[np.flatnonzero(shared)[starts]] = np.maximum.reduceat(before, starts)
    return order[first], earlier[first]


def filled(column: pa.ChunkedArray, value: float = 0) -> NDArray[Any]:
    """Return a column as an array, with ``value`` for nulls."""
    return np.asarray(pc.fill_null(column, value).to_numpy())


def live_rows(rows: pa.Table) -> pa.Table:
    """Select each video's live row among rows with RULE_COLUMNS and video_id, sorted by video_id."""
    order, _ = live_and_earlier(rule_columns(rows))
    return _roomy(rows).take(pa.array(order)).sort_by("video_id")


def _roomy(rows: pa.Table) -> pa.Table:
    """Return rows with text columns of 64-bit offsets if they may exceed 2 GB, else as they are."""
    if rows.nbytes < _MOST_TEXT:
        return rows
    wide = [field.with_type(pa.large_string()) if field.type == pa.string() else field for field in rows.schema]
    return rows.cast(pa.schema(wide, rows.schema.metadata))


class VideoRows:
    """A reader of full rows of the videos table, which keeps those of a few files in memory. Threads may share it.

    Attributes:
        opened: name -> the opened sorted file.
        group: name, number -> a row group of a sorted file as VIDEO_SCHEMA.
    """

    def __init__(self, store: Store, keep: int = 8) -> None:
        self._small = LoadedOnce(partial(_rows_of, store), keep)
        self.opened = LoadedOnce(lambda name: SortedFile(store, file_named(name)), keep)
        self.group = LoadedOnce(lambda name, number: _group_of(self.opened(name), number), _GROUPS)

    def __call__(self, shard: str, row: int) -> VideoRow:
        """Read one row. Raises CorruptShard, FileNotFoundError, OSError."""
        if file_named(shard).level == 0:
            return _copy(self._small(shard)[row])
        number, place = divmod(row, self.opened(shard).group_rows)
        return cast(VideoRow, self.group(shard, number).slice(place, 1).to_pylist()[0])

    def each(self, places: pa.Table) -> Iterator[VideoRow]:
        """Read the row at each of ``places``, a table with ``shard`` and ``row``. Raises as for one row."""
        return map(self, places["shard"].to_pylist(), places["row"].to_pylist())


def _copy(row: VideoRow) -> VideoRow:
    """Copy a row and its lists, so that a caller may change them."""
    copied = {name: list(value) if isinstance(value, list) else value for name, value in row.items()}
    return cast(VideoRow, copied)


def _rows_of(store: Store, shard: str) -> list[VideoRow]:
    """Read all rows of a small file: one of twenty takes Arrow half as long as all of them."""
    rows: list[VideoRow] = read_file(store, file_named(shard)).to_pylist()
    return rows


def _group_of(file: SortedFile, number: int) -> pa.Table:
    """Read a row group of a sorted file as VIDEO_SCHEMA. Raises CorruptShard where it is empty."""
    table = completed(file.read([number]), VIDEO_SCHEMA.names)
    if file.file.rows and len(table) == 0:
        raise CorruptShard(f"{file.file.name}: row group {number} is empty", "commit")
    return table
