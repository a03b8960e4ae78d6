"""Read and write the files of the videos table, none of which ever changes.

A *small* file is one commit of a run; its name has the run, a number and the hash of its content. A *sorted* file is
merged from others: its rows are sorted by ``id_high`` and ``id_low``, and its name has the fields of TableFile. Its
tail is the Parquet footer after a block that Parquet readers ignore, with the first ``id_high`` of each row group and
the CRC-32 of each column chunk, so that two reads of a sorted file find a video.
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
    hash_bytes_to_hex,
    open_parquet,
    parse_footer,
    parse_footer_length,
    write_parquet,
)
from pipeline.errors import CorruptShard, ShardFault
from pipeline.keys import hash_clips, hash_texts, hash_ties
from pipeline.rows import VideoRecord, VideoRow
from pipeline.storage.random_access import FetchedFile, LoadCache, Stretch
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
_OF_SORTED = re.compile(
    r"sorted-\d+-[0-9a-f]{16}-[0-9a-f]{16}-"
)  # the beginning of a sorted file's name, also in the name of a copy


class TableFile(NamedTuple):
    """The facts that are encoded in the name of a file of the videos table.

    Attributes:
        level: the level of a sorted file, by the rows of its merge; 0 for a small file.
        first, last: ``id_high`` of the first and last row; the whole range for a small file.
        rows: the number of rows; 0 for a small file.
        n_tail: the length of a sorted file's tail in bytes.
        tail_hash: the hash of the tail in hex.
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
    """The files of the videos table, sorted by name, and the stray files in its folder."""

    files: list[TableFile]
    strays: list[str]


def list_table_files(store: Store) -> list[TableFile]:
    """List the files of the videos table, sorted by name, after checking the stray files in its folder."""
    return list_table(store).files


def list_table(store: Store) -> TableListing:
    """List the files of the videos table and the stray files in its folder, which are checked.

    Stray files are read, and the table too for those that are not copies. If a file of the table is merged and deleted
    during the check, listing and check are repeated once.

    Raises:
        CorruptShard: a stray file must not be ignored (``pipeline.cache.strays``), or a file of the table is damaged.
        FileNotFoundError: a file of the table was deleted during the second check too.
    """
    listing = list_unchecked(store)
    try:
        _check_strays(store, listing)
    except FileNotFoundError:  # a file of the table was merged since it was listed
        listing = list_unchecked(store)
        _check_strays(store, listing)
    return listing


def _check_strays(store: Store, listing: TableListing) -> None:
    """Raise CorruptShard if a stray file in the listing must not be ignored."""
    if listing.strays:
        from pipeline.cache.strays import find_stray_fault  # noqa: PLC0415 - strays imports this module

        for name in listing.strays:
            if fault := find_stray_fault(store, name, listing.files):
                raise CorruptShard(fault.message, "commit")


def list_unchecked(store: Store) -> TableListing:
    """List the files of the videos table and the stray files in its folder without reading any file."""
    names = store.names(VIDEOS, ".parquet")
    files = [parse_file_name(name) for name in names if is_table_name(name)]
    return TableListing(files, [name for name in names if not is_table_name(name)])


def is_table_name(name: str) -> bool:
    """Return True if a file name has the form of a file of the table, which ends in a hash; no file is read."""
    own_name = PurePosixPath(name).name
    pattern = _SORTED_NAME if _OF_SORTED.search(own_name) else _TABLE_NAME
    return pattern.fullmatch(own_name) is not None


def parse_file_name(name: str) -> TableFile:
    """Parse a file name to a TableFile; every name that is not that of a sorted file gives a small file, of level 0."""
    match = _SORTED_NAME.fullmatch(PurePosixPath(name).name)
    if match is None:
        return TableFile(name)
    level, first, last, rows, n_tail, tail_hash = match.groups()
    return TableFile(name, int(level), int(first, 16), int(last, 16), int(rows), int(n_tail), tail_hash)


def make_small_name(folder: str, run_id: str, number: int, data: bytes | pa.Buffer, suffix: str = ".parquet") -> str:
    """Return the path of a commit, FOLDER/RUN-NUMBER-HASH.SUFFIX; the hash of ``data`` detects any flipped bit."""
    return f"{folder}/{run_id}-{number:06d}-{hash_bytes_to_hex(data)}{suffix}"


def has_content_hash(name: str) -> bool:
    """Return True if a file name without its suffix ends in a hash, as the names of all commits do."""
    return _HASHED_STEM.fullmatch(PurePosixPath(name).stem) is not None


def check_content(store: Store, name: str, data: bytes, kind: ShardFault = "commit") -> None:
    """Raise CorruptShard of this ``kind`` if a file's content ``data`` does not have the hash in its name."""
    if hash_bytes_to_hex(data) != PurePosixPath(name).stem.rpartition("-")[2]:
        message = f"{store}/{name}: its content does not have the hash in its name; restore the file"
        raise CorruptShard(message, kind)


def serialize_small(run_id: str, number: int, rows: pa.Table, made_with: str | None) -> tuple[str, pa.Buffer]:
    """Serialize rows as a small file; return (its name, its content).

    Args:
        made_with: the fingerprint of the rows' identity, for the file's metadata; None leaves it out.
    """
    data = write_parquet(rows if made_with is None else rows.replace_schema_metadata({MADE_WITH: made_with}))
    return make_small_name(VIDEOS, run_id, number, data), data


def parse_small(
    store: Store, name: str, data: bytes, columns: Sequence[str] | None = None
) -> tuple[pa.Table, str | None]:
    """Parse the content of a small file; return (its rows, the fingerprint of their identity or None).

    Args:
        columns: the columns to read; a later column that the file lacks is null. None reads all columns of the file.

    Raises:
        CorruptShard: the content does not have the hash in the name, cannot be read, or lacks another column.
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
    """Return the fingerprint of the rows' identity from a file's metadata; None if there is none."""
    made_with = (metadata or {}).get(MADE_WITH.encode())
    return None if made_with is None else made_with.decode()


def serialize_sorted(
    level: int, rows: pa.Table, metadata: Mapping[bytes, str], made_with: str | None, group_rows: int = GROUP_ROWS
) -> tuple[str, bytes]:
    """Serialize rows as a sorted file; return (its name, its content).

    Args:
        level: the level in its name, at least 1.
        rows: at least one row, sorted by ``id_high`` and ``id_low``.
        made_with: the fingerprint of the rows' identity; None leaves it out.
    """
    rows = rows.replace_schema_metadata({**metadata, **({} if made_with is None else {MADE_WITH.encode(): made_with})})
    groups = [min(group_rows, len(rows) - start) for start in range(0, len(rows), group_rows)]
    data = memoryview(write_parquet(rows, groups, bloom_column="video_id"))  # the filter is for other tools
    n_footer = parse_footer_length(bytes(data[-FOOTER_TAIL:]))
    body, footer = data[: len(data) - n_footer], data[len(data) - n_footer :]
    metadata_ = parse_footer(bytes(footer))
    high = rows["id_high"].to_numpy()
    crcs = [
        [zlib.crc32(body[slice(*span)]) for span in _list_column_spans(metadata_, group)]
        for group in range(len(groups))
    ]
    tail = high[::group_rows].astype("<u8").tobytes() + np.array(crcs, "<u4").tobytes() + bytes(footer)
    ends = f"{int(high[0]):016x}-{int(high[-1]):016x}"
    name = f"sorted-{level}-{ends}-{len(rows)}-{len(tail)}-{hash_bytes_to_hex(tail)}.parquet"
    return f"{VIDEOS}/{name}", bytes(body) + tail


class SortedFile:
    """An open sorted file whose tail has the hash in the file's name. Threads may share it.

    Attributes:
        made_with: the fingerprint of the rows' identity, or None.
        metadata: the key-value metadata in its footer.
        n_bytes: the size of the file.
        firsts: ``id_high`` of the first row of each row group.
        group_rows: the number of rows per row group; the last may have fewer.
    """

    def __init__(self, store: Store, file: TableFile) -> None:
        """Read the tail of the file in one request, and check it against the hash and row count in its name.

        Raises:
            CorruptShard: the tail does not match the name or cannot be parsed.
            FileNotFoundError: the file does not exist.
        """
        self.file = file
        self._store = store
        tail = store.read_slice(file.name, -file.n_tail)
        if hash_bytes_to_hex(tail.data) != file.tail_hash:
            raise self.make_corruption_error("its tail does not have the hash in its name")
        self.n_bytes = tail.size
        try:
            n_footer = parse_footer_length(tail.data[-FOOTER_TAIL:])
            self._metadata: pq.FileMetaData = parse_footer(tail.data[-n_footer:])
            if self._metadata.num_rows != self.file.rows:
                raise self.make_corruption_error(
                    f"it has {self._metadata.num_rows} rows, but its name says {self.file.rows}"
                )
            n_groups = self._metadata.num_row_groups
            self.group_rows: int = self._metadata.row_group(0).num_rows if n_groups else 0
            self.firsts: list[int] = np.frombuffer(tail.data, "<u8", n_groups).tolist()
            numbers: NDArray[np.uint32] = np.frombuffer(tail.data[8 * n_groups : -n_footer], "<u4")
            self._crcs = numbers.reshape(n_groups, self._metadata.num_columns)
            self.schema: pa.Schema = self._metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self.make_corruption_error(f"its tail cannot be parsed: {error}") from error
        self.metadata: dict[bytes, bytes] = self._metadata.metadata or {}
        self.made_with = _read_made_with(self.metadata)

    def make_corruption_error(self, damage: str) -> CorruptShard:
        """Build the error for this file; ``damage`` says what is damaged."""
        return CorruptShard(f"{self._store}/{self.file.name}: {damage}; restore the file", "commit")

    def find_row_groups(self, first: int, last: int) -> range:
        """Return the row groups that may have rows with ``id_high`` from ``first`` to ``last``, inclusive."""
        return range(max(0, bisect_left(self.firsts, first) - 1), bisect_right(self.firsts, last))

    def read(self, groups: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        """Read row groups, with one request per stretch of adjacent columns, and check their bytes against the CRCs.

        Args:
            columns: the columns to read; a later column that the file lacks is null. None reads all columns of the
                file.

        Raises:
            CorruptShard, FileNotFoundError: the file is damaged, lacks a column, or was deleted.
        """
        names = [name for name in self.schema.names if columns is None or name in columns]
        stretches = [stretch for group in groups for stretch in self._read_stretches(group, frozenset(names))]
        fetched = FetchedFile(stretches, self.n_bytes, _refuse_unfetched_bytes)
        try:
            check_unpacked(self._metadata, groups, find_leaves(self._metadata, names), fetched.view, self.n_bytes)
            file = open_parquet(pa.PythonFile(fetched, mode="r"), self._metadata)
            table = file.read_row_groups(list(groups), columns=names, use_threads=READ_THREADS)
        except (pa.ArrowException, ValueError) as error:
            raise self.make_corruption_error(f"it cannot be read: {error}") from error
        if columns is None:
            return table
        return complete_columns(table, columns, VIDEO_SCHEMA, LATER, f"{self._store}/{self.file.name}")

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows in order, 64 row groups per table; ``columns`` are those of ``read``.

        Raises:
            CorruptShard, FileNotFoundError: the file is damaged, lacks a column, or was deleted.
        """
        for start in range(0, len(self.firsts), _GROUPS_AT_ONCE):
            yield self.read(range(start, min(start + _GROUPS_AT_ONCE, len(self.firsts))), columns)

    def _read_stretches(self, group: int, names: frozenset[str]) -> Iterator[Stretch]:
        """Yield the checked bytes of columns of a row group; adjacent columns are one stretch and one request.

        Raises:
            CorruptShard: a column does not have its CRC.
        """
        meta = self._metadata.row_group(group)
        numbers = [i for i in range(meta.num_columns) if meta.column(i).path_in_schema.split(".")[0] in names]
        spans = _list_column_spans(self._metadata, group)
        run: list[int] = []
        for number in [*numbers, None]:
            if run and (number is None or spans[number][0] != spans[run[-1]][1]):
                data = self._store.read_slice(self.file.name, spans[run[0]][0], spans[run[-1]][1]).data
                stretch = Stretch(spans[run[0]][0], data)
                if any(zlib.crc32(stretch.view(*spans[i])) != self._crcs[group, i] for i in run):
                    raise self.make_corruption_error(f"row group {group} is not what was written")
                yield stretch
                run = []
            if number is not None:
                run.append(number)


def _refuse_unfetched_bytes(start: int, end: int) -> Stretch:
    """Raise ValueError: Arrow wants bytes outside the fetched columns, so the footer is wrong."""
    raise ValueError(f"bytes {start} to {end} are not in the columns that the footer names")


def _list_column_spans(metadata: pq.FileMetaData, group: int) -> list[tuple[int, int]]:
    """Return the byte range [start, end) of each column chunk of a row group."""
    return [find_span(metadata.row_group(group).column(i)) for i in range(metadata.num_columns)]


class VideosTable:
    """The reader of the videos table: small files, sorted files and single rows. Threads may share it.

    Reading raises CorruptShard for a file that is damaged or lacks a column, and FileNotFoundError for one that is
    gone.

    Attributes:
        foreign: the files of another identity that were met so far -> the fingerprint of that identity.
        group: called with (file, number), loads a row group of a sorted file in VIDEO_SCHEMA; the last ones stay in
            memory.
    """

    def __init__(self, store: Store, made_with: str | None = None, keep: int = 8) -> None:
        """Create the reader; no file is read yet.

        Args:
            made_with: the fingerprint of the identity whose files count; None for all files.
            keep: the number of small files, and of footers of sorted files, that stay in memory for single rows.
        """
        self.foreign: dict[str, str | None] = {}
        self.store = store
        self._made_with = made_with
        self._rows_of_small = LoadCache(partial(_load_rows, store), keep)
        self._sorted = LoadCache(partial(SortedFile, store), keep)
        self.group = LoadCache(partial(_load_group, self._sorted), _KEPT_GROUPS)

    def read_small(self, names: Sequence[str], columns: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
        """Yield (name, ``columns`` of the rows) for each small file, in the order of ``names``.

        Files are read and parsed ahead by threads. Files of another identity are skipped and added to ``foreign``.
        """
        contents = zip(names, self.store.read_all(names), strict=True)
        # A small file is checked and parsed on one core, for most of the time without the GIL.
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            while batch := list(islice(contents, _FILES_AT_ONCE)):
                tables = pool.map(lambda file: parse_small(self.store, file[0], file[1], columns), batch)
                for (name, _), (rows, made_with) in zip(batch, tables, strict=True):
                    if self._is_own(name, made_with):
                        yield name, rows

    def open_sorted(self, file: TableFile) -> SortedFile | None:
        """Open a sorted file, or take it from memory.

        A file of another identity is added to ``foreign``, and None is returned.
        """
        sorted_file = self._sorted(file)
        return sorted_file if self._is_own(file.name, sorted_file.made_with) else None

    def iter_open_sorted(self, files: Iterable[TableFile]) -> Iterator[SortedFile]:
        """Open the sorted files among ``files`` one by one, and yield those of this table's identity.

        Files of another identity are added to ``foreign``.
        """
        for file in files:
            if file.is_sorted and (sorted_file := self.open_sorted(file)) is not None:
                yield sorted_file

    def read_row(self, name: str, row: int) -> VideoRow:
        """Read row number ``row`` of a file, whatever its identity; the caller may modify the result."""
        file = parse_file_name(name)
        if file.is_sorted:
            number, row_in_group = divmod(row, self._sorted(file).group_rows)
            return cast(VideoRow, self.group(file, number).slice(row_in_group, 1).to_pylist()[0])
        values = self._rows_of_small(file)[row].items()
        # A copy of the row and its lists, so that a caller may change them.
        return cast(VideoRow, {key: list(value) if isinstance(value, list) else value for key, value in values})

    def read_rows(self, places: pa.Table) -> Iterator[VideoRow]:
        """Yield the row at each row location in ``places``, a table with ``file`` and ``row``.

        A row is read when it is reached.
        """
        return map(self.read_row, places["file"].to_pylist(), places["row"].to_pylist())

    def _is_own(self, name: str, made_with: str | None) -> bool:
        """Return True if a file has the identity of this table; otherwise add it to ``foreign`` and return False."""
        if is_same_identity(made_with, self._made_with):
            return True
        self.foreign[name] = made_with
        return False


def is_same_identity(made_with: str | None, other_fingerprint: str | None) -> bool:
    """Return True if two fingerprints are equal, or if one of them is None, as in files of old versions."""
    return made_with is None or other_fingerprint is None or made_with == other_fingerprint


def _load_rows(store: Store, file: TableFile) -> list[VideoRow]:
    """Read all rows of a small file as Python objects."""
    rows: list[VideoRow] = read_file(store, file).to_pylist()
    return rows


def _load_group(files: LoadCache[SortedFile], file: TableFile, number: int) -> pa.Table:
    """Read a row group of a sorted file in VIDEO_SCHEMA; raise CorruptShard if it is empty."""
    table = files(file).read([number], VIDEO_SCHEMA.names)
    if file.rows and len(table) == 0:
        raise CorruptShard(f"{file.name}: row group {number} is empty", "commit")
    return table


def read_file(store: Store, file: TableFile, columns: Sequence[str] = tuple(VIDEO_SCHEMA.names)) -> pa.Table:
    """Read ``columns`` of all rows of a small or sorted file, whatever its identity.

    Raises:
        CorruptShard, FileNotFoundError: the file is damaged, lacks a column, or is gone.
    """
    if file.is_sorted:
        return pa.concat_tables(SortedFile(store, file).parts(columns))
    return parse_small(store, file.name, store.read(file.name), columns)[0]


def build_table(rows: Sequence[VideoRecord] | Sequence[VideoRow]) -> pa.Table:
    """Build a table in VIDEO_SCHEMA from records, and compute its KEY_COLUMNS with ``add_keys``."""
    return add_keys(pa.Table.from_pylist(list(rows), schema=VIDEO_SCHEMA))


def add_keys(rows: pa.Table) -> pa.Table:
    """Return ``rows`` in VIDEO_SCHEMA with KEY_COLUMNS computed from the other columns.

    ``rewritten`` and ``earlier_attempts`` stay, with 0 for null.

    Args:
        rows: they have all columns of VIDEO_SCHEMA, and may be nullable where VIDEO_SCHEMA is not.
    """
    keys = hash_texts(rows["video_id"])
    columns = {
        **dict(zip(rows.schema.names, rows.columns, strict=True)),
        "id_high": pa.array(keys[:, 0]),
        "id_low": pa.array(keys[:, 1]),
        "clip_key": pa.array(hash_clips(rows)),
        "rewritten": pc.fill_null(rows["rewritten"], 0),
        "earlier_attempts": pc.fill_null(rows["earlier_attempts"], 0),
        "tie_break": pa.array(hash_ties(rows)),
    }
    return pa.table([columns[name] for name in VIDEO_SCHEMA.names], schema=VIDEO_SCHEMA).combine_chunks()


def add_row_locations(table: pa.Table, name: str) -> pa.Table:
    """Append the row locations to all rows of a file: the columns ``file`` (its ``name``) and ``row`` (0, 1, ...)."""
    table = table.append_column(_PLACE[0], pa.repeat(name, len(table)).cast(pa.string()))
    return table.append_column(_PLACE[1], pa.array(np.arange(len(table)), pa.int32()))


def make_empty_location_table(columns: Sequence[str]) -> pa.Table:
    """Return an empty table with ``columns``, ``file`` and ``row``, with which concatenations begin."""
    return pa.schema([*(VIDEO_SCHEMA.field(name) for name in columns), *_PLACE]).empty_table()


def sort_by_key(rows: pa.Table) -> pa.Table:
    """Sort rows by ``id_high`` and ``id_low``, the order of sorted files."""
    order = np.lexsort((rows["id_low"].to_numpy(), rows["id_high"].to_numpy()))
    return rows.take(pa.array(order))
