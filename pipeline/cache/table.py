"""The videos table: a set of files that only grows. Order, repetition and late arrival of files change nothing.

A *small* file is one commit of a run, named by the run, a number and the hash of its content. A *sorted* file is
merged from others (``pipeline.cache.merging``): its rows are in the order of ``id_high`` and ``id_low``, and its name
has the level, the first and the last ``id_high``, the rows, and the length and hash of its tail. No file ever
changes, and the live row of a video follows from the rows alone (``pipeline.cache.live``), so nothing is locked.

The tail of a sorted file is a block that Parquet readers ignore, then the Parquet footer. The block has the first
``id_high`` of each row group, and the CRC-32 of each column's bytes in it. So one listing opens a table, two reads of a
sorted file find a video, and damaged bytes raise CorruptShard.
"""

from __future__ import annotations

import os
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import PurePosixPath
from typing import NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.cache.bounds import check_unpacked, find_leaves, find_span, read_bounded
from pipeline.cache.schema import (
    FOOTER_TAIL,
    LATER,
    MADE_WITH,
    READ_THREADS,
    VIDEO_SCHEMA,
    VIDEOS,
    complete_columns,
    hex_digest,
    open_parquet,
    parse_footer,
    parse_footer_length,
    write_parquet,
)
from pipeline.errors import CorruptShard, ShardFault
from pipeline.keys import clip_keys, keys_of, tie_keys
from pipeline.rows import VideoRecord, VideoRow
from pipeline.storage.random_access import Fetched, LoadedOnce, Stretch
from pipeline.storage.stores import Store

GROUP_ROWS = 4096  # rows of a row group of a sorted file; finding a row reads one group
FILE_ROWS = 2**18  # maximum rows of a sorted file
_GROUPS_AT_ONCE = 64  # row groups of a sorted file that one step reads
_KEPT_GROUPS = 2  # row groups of sorted files that are kept in memory, some MB each
_FILES_AT_ONCE = 64  # small files whose content is in memory at once
_THREADS = 8  # threads that parse small files
_PLACE = (pa.field("file", pa.string()), pa.field("row", pa.int32()))
_SORTED_NAME = re.compile(r"sorted-(\d+)-([0-9a-f]{16})-([0-9a-f]{16})-(\d+)-(\d+)-([0-9a-f]{32})\.parquet")

_HASHED_STEM = re.compile(r".+-[0-9a-f]{32}", re.DOTALL)
_TABLE_NAME = re.compile(r".+-[0-9a-f]{32}\.parquet", re.DOTALL)
_OF_SORTED = re.compile(r"sorted-\d+-[0-9a-f]{16}-[0-9a-f]{16}-")  # a sorted file's own name, or a copy's


class TableFile(NamedTuple):
    """The facts in the name of a table's file.

    Attributes:
        name: the path below the store's root.
        level: the level of a sorted file, by the rows of its merge; 0 for a small file.
        first, last: ``id_high`` of its first and its last row; for a small file, the whole range.
        rows: the number of rows; 0 for a small file.
        n_tail: bytes of a sorted file's tail.
        tail_hash: hex of the tail's hash.
    """

    name: str
    level: int = 0
    first: int = 0
    last: int = 2**64 - 1
    rows: int = 0
    n_tail: int = 0
    tail_hash: str = ""

    @property
    def is_sorted(self) -> bool:
        """True for a sorted file, False for a small file."""
        return self.level > 0

    def holds(self, high: int) -> bool:
        """Return True if a row with this ``id_high`` may be in the file."""
        return self.first <= high <= self.last


class TableListing(NamedTuple):
    """The files of the videos table, sorted by name, and the names of stray files beside them, which are left out."""

    files: list[TableFile]
    strays: list[str]


def list_table_files(store: Store) -> list[TableFile]:
    """List the files of the videos table, sorted by name; raises as ``list_table``."""
    return list_table(store).files


def list_table(store: Store) -> TableListing:
    """List the files of the videos table and the stray files beside them: one listing, unless there are stray files.

    Raises CorruptShard for a stray file that must not be left out (``pipeline.cache.strays``), and OSError.
    """
    listing = list_unchecked(store)
    try:
        _check_strays(store, listing)
    except FileNotFoundError:  # a file of the table was merged since it was listed
        listing = list_unchecked(store)
        _check_strays(store, listing)
    return listing


def _check_strays(store: Store, listing: TableListing) -> None:
    """Raise CorruptShard for a stray file that must not be left out. Raises OSError."""
    if listing.strays:
        from pipeline.cache.strays import find_stray_fault  # noqa: PLC0415 - which reads tables by this module

        for name in listing.strays:
            if fault := find_stray_fault(store, name, listing.files):
                raise CorruptShard(fault.message, "commit")


def list_unchecked(store: Store) -> TableListing:
    """List the files of the videos table as ``list_table`` does, whatever is in stray files. Raises OSError."""
    names = store.names(VIDEOS, ".parquet")
    files = [parse_file_name(name) for name in names if is_table_name(name)]
    return TableListing(files, [name for name in names if not is_table_name(name)])


def is_table_name(name: str) -> bool:
    """Return True if a file's name is that of a file of the table: it ends in a hash, whatever the content is."""
    own_name = PurePosixPath(name).name
    pattern = _SORTED_NAME if _OF_SORTED.search(own_name) else _TABLE_NAME
    return pattern.fullmatch(own_name) is not None


def parse_file_name(name: str) -> TableFile:
    """Parse a file's name to a TableFile; any name that is no sorted file's gives a small file, of level 0."""
    match = _SORTED_NAME.fullmatch(PurePosixPath(name).name)
    if match is None:
        return TableFile(name)
    level, first, last, rows, n_tail, tail_hash = match.groups()
    return TableFile(name, int(level), int(first, 16), int(last, 16), int(rows), int(n_tail), tail_hash)


def make_small_name(folder: str, run_id: str, number: int, data: bytes | pa.Buffer, suffix: str = ".parquet") -> str:
    """Name a commit with the hash of its content, which detects any flipped bit."""
    return f"{folder}/{run_id}-{number:06d}-{hex_digest(data)}{suffix}"


def has_content_hash(name: str) -> bool:
    """Return True if a file's name ends with a hash of its content, as the names of all commits do."""
    return _HASHED_STEM.fullmatch(PurePosixPath(name).stem) is not None


def check_content(store: Store, name: str, data: bytes, kind: ShardFault = "commit") -> None:
    """Raise CorruptShard of this ``kind`` if a small file or token shard does not match the hash in its name."""
    if hex_digest(data) != PurePosixPath(name).stem.rpartition("-")[2]:
        message = f"{store}/{name}: its content does not have the hash in its name; restore the file"
        raise CorruptShard(message, kind)


def serialise_small(run_id: str, number: int, rows: pa.Table, made_with: str | None) -> tuple[str, pa.Buffer]:
    """Serialise rows as a commit: (its name, its content). ``made_with`` is the fingerprint of their identity."""
    data = write_parquet(rows if made_with is None else rows.replace_schema_metadata({MADE_WITH: made_with}))
    return make_small_name(VIDEOS, run_id, number, data), data


def parse_small(
    store: Store, name: str, data: bytes, columns: Sequence[str] | None = None
) -> tuple[pa.Table, str | None]:
    """Parse the bytes ``data`` of the small file ``name``: (its rows, the fingerprint of their identity or None).

    Only ``columns`` are read; a later column that the file lacks is null. None reads all columns of the file.
    Raises CorruptShard if the content does not have the hash in its name, cannot be read, or lacks another column.
    """
    check_content(store, name, data)
    try:
        table = read_bounded(data, columns)
    except (pa.ArrowException, ValueError) as error:
        raise CorruptShard(f"{store}/{name}: it cannot be read: {error}; restore the file", "commit") from error
    made_with = _read_made_with(table.schema.metadata)
    if columns is not None:
        table = complete_columns(table, columns, VIDEO_SCHEMA, LATER, f"{store}/{name}")
    return table, made_with


def _read_made_with(metadata: Mapping[bytes, bytes] | None) -> str | None:
    """Return the fingerprint of the rows' identity from a file's metadata; None without one."""
    made_with = (metadata or {}).get(MADE_WITH.encode())
    return None if made_with is None else made_with.decode()


def serialise_sorted(
    level: int, rows: pa.Table, metadata: Mapping[bytes, str], made_with: str | None, group_rows: int = GROUP_ROWS
) -> tuple[str, bytes]:
    """Serialise rows of videos that are sorted by ``id_high`` as a sorted file: (its name, its content).

    There must be a row. ``metadata`` goes into the footer.
    """
    rows = rows.replace_schema_metadata({**metadata, **({} if made_with is None else {MADE_WITH.encode(): made_with})})
    groups = [min(group_rows, len(rows) - start) for start in range(0, len(rows), group_rows)]
    data = memoryview(write_parquet(rows, groups, bloom_column="video_id"))  # for the queries of other tools
    n_footer = parse_footer_length(bytes(data[-FOOTER_TAIL:]))
    body, footer = data[: len(data) - n_footer], data[len(data) - n_footer :]
    metadata_ = parse_footer(bytes(footer))
    high = rows["id_high"].to_numpy()
    crcs = [[zlib.crc32(body[slice(*span)]) for span in _spans(metadata_, group)] for group in range(len(groups))]
    tail = high[::group_rows].astype("<u8").tobytes() + np.array(crcs, "<u4").tobytes() + bytes(footer)
    ends = f"{int(high[0]):016x}-{int(high[-1]):016x}"
    name = f"sorted-{level}-{ends}-{len(rows)}-{len(tail)}-{hex_digest(tail)}.parquet"
    return f"{VIDEOS}/{name}", bytes(body) + tail


class SortedFile:
    """A sorted file whose tail was checked against the hash in its name. Threads may share it.

    Attributes:
        file: what its name tells.
        made_with: the fingerprint of the identity that its rows share; None for one without.
        schema: its columns.
        metadata: what else its footer says.
        n_bytes: of the file.
        firsts: ``id_high`` of the first row of each row group.
        group_rows: rows of each row group but the last, which may have fewer.

    Raises CorruptShard, FileNotFoundError, and OSError where the store fails. One read.
    """

    def __init__(self, store: Store, file: TableFile) -> None:
        """Read the tail of the file, and check it against the hash and the row count in its name."""
        self.file = file
        self._store = store
        tail = store.read_slice(file.name, -file.n_tail)
        if hex_digest(tail.data) != file.tail_hash:
            raise self.corrupt("its end is not the one that its name tells")
        self.n_bytes = tail.size
        try:
            n_footer = parse_footer_length(tail.data[-FOOTER_TAIL:])
            self._metadata: pq.FileMetaData = parse_footer(tail.data[-n_footer:])
            if self._metadata.num_rows != self.file.rows:
                raise self.corrupt(f"it has {self._metadata.num_rows} rows, where its name has {self.file.rows}")
            n_groups = self._metadata.num_row_groups
            self.group_rows: int = self._metadata.row_group(0).num_rows if n_groups else 0
            self.firsts: list[int] = np.frombuffer(tail.data, "<u8", n_groups).tolist()
            numbers: NDArray[np.uint32] = np.frombuffer(tail.data[8 * n_groups : -n_footer], "<u4")
            self._crcs = numbers.reshape(n_groups, self._metadata.num_columns)
            self.schema: pa.Schema = self._metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self.corrupt(f"its end cannot be read: {error}") from error
        self.metadata: dict[bytes, bytes] = self._metadata.metadata or {}
        self.made_with = _read_made_with(self.metadata)

    def corrupt(self, damage: str) -> CorruptShard:
        """Return the error for this damaged file; ``damage`` describes the damage."""
        return CorruptShard(f"{self._store}/{self.file.name}: {damage}; restore the file", "commit")

    def groups_of(self, first: int, last: int) -> range:
        """Return the row groups that may hold rows whose ``id_high`` is from ``first`` to ``last``."""
        return range(max(0, bisect_left(self.firsts, first) - 1), bisect_right(self.firsts, last))

    def read(self, groups: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        """Read row groups, each with checked bytes. Raises CorruptShard.

        Only ``columns`` are read; a column that came later than the file is null. None reads all columns of the file.
        """
        names = [name for name in self.schema.names if columns is None or name in columns]
        stretches = [stretch for group in groups for stretch in self._read_stretches(group, frozenset(names))]
        fetched = Fetched(stretches, self.n_bytes, _refuse_unread)
        try:
            check_unpacked(self._metadata, groups, find_leaves(self._metadata, names), fetched.view, self.n_bytes)
            file = open_parquet(pa.PythonFile(fetched, mode="r"), self._metadata)
            table = file.read_row_groups(list(groups), columns=names, use_threads=READ_THREADS)
        except (pa.ArrowException, ValueError) as error:
            raise self.corrupt(f"it cannot be read: {error}") from error
        if columns is None:
            return table
        return complete_columns(table, columns, VIDEO_SCHEMA, LATER, f"{self._store}/{self.file.name}")

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows in order, some row groups at a time; ``columns`` as of ``read``."""
        for start in range(0, len(self.firsts), _GROUPS_AT_ONCE):
            yield self.read(range(start, min(start + _GROUPS_AT_ONCE, len(self.firsts))), columns)

    def _read_stretches(self, group: int, names: frozenset[str]) -> Iterator[Stretch]:
        """Yield the checked bytes of columns of a row group, neighbours in one read. Raises CorruptShard."""
        meta = self._metadata.row_group(group)
        numbers = [i for i in range(meta.num_columns) if meta.column(i).path_in_schema.split(".")[0] in names]
        spans = _spans(self._metadata, group)
        run: list[int] = []
        for number in [*numbers, None]:
            if run and (number is None or spans[number][0] != spans[run[-1]][1]):
                data = self._store.read_slice(self.file.name, spans[run[0]][0], spans[run[-1]][1]).data
                stretch = Stretch(spans[run[0]][0], data)
                if any(zlib.crc32(stretch.view(*spans[i])) != self._crcs[group, i] for i in run):
                    raise self.corrupt(f"row group {group} is not what was written")
                yield stretch
                run = []
            if number is not None:
                run.append(number)


def _refuse_unread(start: int, end: int) -> Stretch:
    """Raise ValueError: a reader asks for bytes outside the fetched columns."""
    raise ValueError(f"bytes {start} to {end} are no part of the columns that the footer names")


def _spans(metadata: pq.FileMetaData, group: int) -> list[tuple[int, int]]:
    """Return the bytes [start, end) of each column of a row group."""
    return [find_span(metadata.row_group(group).column(i)) for i in range(metadata.num_columns)]


class VideosTable:
    """The videos table of a cache: reads small files, sorted files and single rows. Threads may share it.

    Files of another identity than ``made_with`` are left out; None takes all.

    Attributes:
        store: of the cache.
        foreign: the files that were left out -> the fingerprint of their identity.
        group: file, number -> a row group of a sorted file as VIDEO_SCHEMA.
    """

    def __init__(self, store: Store, made_with: str | None = None, keep: int = 8) -> None:
        """Read nothing yet.

        Args:
            made_with: the fingerprint of the identity whose files count; None for all files.
            keep: the number of small files, and of footers of sorted files, that stay in memory for single rows.
        """
        self.foreign: dict[str, str | None] = {}
        self.store, self._made_with = store, made_with
        self._rows_of_small = LoadedOnce(partial(_load_rows, store), keep)
        self._sorted = LoadedOnce(partial(SortedFile, store), keep)
        self.group = LoadedOnce(partial(_load_group, self._sorted), _KEPT_GROUPS)

    def read_small(self, names: Sequence[str], columns: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
        """Yield the name of each small file and ``columns`` of its rows, in the order of ``names``.

        Files of another identity are left out, and added to ``foreign``. Raises CorruptShard, OSError.
        """
        contents = zip(names, self.store.read_all(names), strict=True)
        # Checking and parsing a small file is work for one core, and leaves Python's lock free for most of it.
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            while some := list(islice(contents, _FILES_AT_ONCE)):
                tables = pool.map(lambda file: parse_small(self.store, file[0], file[1], columns), some)
                for (name, _), (rows, made_with) in zip(some, tables, strict=True):
                    if self._is_own(name, made_with):
                        yield name, rows

    def open_sorted(self, file: TableFile) -> SortedFile | None:
        """Open a sorted file, or take it from memory; None if its rows have another identity. Raises as SortedFile."""
        sorted_file = self._sorted(file)
        return sorted_file if self._is_own(file.name, sorted_file.made_with) else None

    def iter_sorted(self, files: Iterable[TableFile]) -> Iterator[SortedFile]:
        """Open the sorted files among ``files``, one after the other, without those of another identity.

        Raises as SortedFile.
        """
        for file in files:
            if file.is_sorted and (sorted_file := self.open_sorted(file)) is not None:
                yield sorted_file

    def read_row(self, name: str, row: int) -> VideoRow:
        """Read one row of a file, whatever its identity; the caller may change the row.

        Raises CorruptShard, FileNotFoundError, OSError.
        """
        file = parse_file_name(name)
        if file.is_sorted:
            number, row_in_group = divmod(row, self._sorted(file).group_rows)
            return cast(VideoRow, self.group(file, number).slice(row_in_group, 1).to_pylist()[0])
        values = self._rows_of_small(file)[row].items()
        # A copy of the row and its lists, so that a caller may change them.
        return cast(VideoRow, {key: list(value) if isinstance(value, list) else value for key, value in values})

    def read_rows(self, places: pa.Table) -> Iterator[VideoRow]:
        """Read the row at each of ``places``, a table with ``file`` and ``row``, when it is iterated.

        Raises as ``read_row``.
        """
        return map(self.read_row, places["file"].to_pylist(), places["row"].to_pylist())

    def _is_own(self, name: str, made_with: str | None) -> bool:
        """Return True if a file's fingerprint is the cache's, or either is None; else add it to ``foreign``."""
        if is_same_identity(made_with, self._made_with):
            return True
        self.foreign[name] = made_with
        return False


def is_same_identity(made_with: str | None, other_fingerprint: str | None) -> bool:
    """Return True if two fingerprints are equal, or one is None."""
    return made_with is None or other_fingerprint is None or made_with == other_fingerprint


def _load_rows(store: Store, file: TableFile) -> list[VideoRow]:
    """Read all rows of a small file as Python values: one row of twenty would cost Arrow half as much as all."""
    rows: list[VideoRow] = read_file(store, file).to_pylist()
    return rows


def _load_group(files: LoadedOnce[SortedFile], file: TableFile, number: int) -> pa.Table:
    """Read a row group of a sorted file as VIDEO_SCHEMA. Raises CorruptShard where it is empty."""
    table = files(file).read([number], VIDEO_SCHEMA.names)
    if file.rows and len(table) == 0:
        raise CorruptShard(f"{file.name}: row group {number} is empty", "commit")
    return table


def read_file(store: Store, file: TableFile, columns: Sequence[str] = tuple(VIDEO_SCHEMA.names)) -> pa.Table:
    """Read all rows of one file into memory, of any identity. Raises CorruptShard, OSError."""
    if file.is_sorted:
        return pa.concat_tables(SortedFile(store, file).parts(columns))
    return parse_small(store, file.name, store.read(file.name), columns)[0]


def build_table(rows: Sequence[VideoRecord] | Sequence[VideoRow]) -> pa.Table:
    """Build a table of VIDEO_SCHEMA from rows, with their KEY_COLUMNS as ``add_keys`` computes them."""
    return add_keys(pa.Table.from_pylist(list(rows), schema=VIDEO_SCHEMA))


def add_keys(rows: pa.Table) -> pa.Table:
    """Return rows as VIDEO_SCHEMA with their KEY_COLUMNS; counts of rewrites and earlier attempts stay.

    ``rows`` have the columns of VIDEO_SCHEMA; those that are never null may be nullable.
    """
    keys = keys_of(rows["video_id"])
    columns = {
        **dict(zip(rows.schema.names, rows.columns, strict=True)),
        "id_high": pa.array(keys[:, 0]),
        "id_low": pa.array(keys[:, 1]),
        "clip_key": pa.array(clip_keys(rows)),
        "rewritten": pc.fill_null(rows["rewritten"], 0),
        "earlier_attempts": pc.fill_null(rows["earlier_attempts"], 0),
        "tie_break": pa.array(tie_keys(rows)),
    }
    return pa.table([columns[name] for name in VIDEO_SCHEMA.names], schema=VIDEO_SCHEMA).combine_chunks()


def add_places(table: pa.Table, name: str) -> pa.Table:
    """Add the columns ``file`` (its ``name``) and ``row`` (the number in it) to all rows of a file."""
    table = table.append_column(_PLACE[0], pa.repeat(name, len(table)).cast(pa.string()))
    return table.append_column(_PLACE[1], pa.array(np.arange(len(table)), pa.int32()))


def empty_rows(columns: Sequence[str]) -> pa.Table:
    """Return an empty table of these columns, ``file`` and ``row``: the start of a concatenation."""
    return pa.schema([*(VIDEO_SCHEMA.field(name) for name in columns), *_PLACE]).empty_table()


def in_key_order(rows: pa.Table) -> pa.Table:
    """Return rows sorted by ``id_high`` and ``id_low``."""
    order = np.lexsort((rows["id_low"].to_numpy(), rows["id_high"].to_numpy()))
    return rows.take(pa.array(order))
