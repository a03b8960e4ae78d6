"""The files of a table: a set that only grows, in which the order, repetition and lateness of files change nothing.

A *small* file is one commit of a run, named by the run, a number and the hash of its content. A *sorted* file is
merged from others (``pipeline.cache.merging``): its rows are in the order of ``id_high`` and ``id_low``, and its name
has the level, the first and the last ``id_high``, the rows, and the length and hash of its tail. No file is ever
changed, and which row of a video counts is a rule about rows (``pipeline.cache.live_rows``), so nothing is locked.

The tail of a sorted file is the Parquet footer behind a block that no Parquet reader looks at: the first ``id_high`` of
each row group, and the CRC-32 of each column's bytes in it. So one listing opens a table, a video is found with two
reads of a sorted file, and what is read is what was written, or CorruptShard.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.cache.schema import (
    FOOTER_TAIL,
    MADE_WITH,
    READ_THREADS,
    footer_length,
    hex_digest,
    open_parquet,
    parse_footer,
    write_parquet,
)
from pipeline.errors import CorruptShard, ShardFault
from pipeline.storage.random_access import Fetched, Stretch
from pipeline.storage.stores import Store

GROUP_ROWS = 4096  # rows of a row group of a sorted file: what finding one of them reads
FILE_ROWS = 2**18  # the most rows of a sorted file
_SORTED = re.compile(r"sorted-(\d+)-([0-9a-f]{16})-([0-9a-f]{16})-(\d+)-(\d+)-([0-9a-f]{32})\.parquet")


class TableFile(NamedTuple):
    """The facts about a file of a table that its name tells.

    Attributes:
        name: below the store's root.
        level: of a sorted file, by the rows of the merge that made it; 0 for a small file.
        first, last: ``id_high`` of its first and its last row; of a small file, the whole range.
        rows: how many; 0 where the name does not tell.
        n_tail: bytes of a sorted file's tail.
        tail_hash: hex of its hash.
    """

    name: str
    level: int = 0
    first: int = 0
    last: int = 2**64 - 1
    rows: int = 0
    n_tail: int = 0
    tail_hash: str = ""

    def holds(self, high: int) -> bool:
        """Return whether a row with this ``id_high`` may be in the file."""
        return self.first <= high <= self.last


def table_files(store: Store, folder: str) -> list[TableFile]:
    """Return the Parquet files of a table, sorted by name. One listing. Raises OSError."""
    return [file_named(name) for name in store.names(folder, ".parquet")]


def file_named(name: str) -> TableFile:
    """Parse a file's name to a TableFile."""
    found = _SORTED.fullmatch(PurePosixPath(name).name)
    if found is None:
        return TableFile(name)
    level, first, last, rows, n_tail, tail_hash = found.groups()
    return TableFile(name, int(level), int(first, 16), int(last, 16), int(rows), int(n_tail), tail_hash)


def made_with_of(metadata: Mapping[bytes, bytes] | None) -> str | None:
    """Return the fingerprint of the identity of its rows that a file carries in its metadata; None for one without."""
    held = (metadata or {}).get(MADE_WITH.encode())
    return None if held is None else held.decode()


def small_name(folder: str, run_id: str, number: int, data: bytes | pa.Buffer, suffix: str = ".parquet") -> str:
    """Name a commit with the hash of its content, so that no flipped bit goes unseen."""
    return f"{folder}/{run_id}-{number:06d}-{hex_digest(data)}{suffix}"


def check_content(store: Store, name: str, data: bytes, kind: ShardFault = "commit") -> None:
    """Raise CorruptShard of this ``kind`` where a small file or token shard does not have the hash in its name."""
    if hex_digest(data) != PurePosixPath(name).stem.rpartition("-")[2]:
        message = f"{store}/{name}: its content does not have the hash in its name; restore the file"
        raise CorruptShard(message, kind)


def read_small(store: Store, name: str, data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Parse a small file; of ``columns`` those that it has. Raises CorruptShard."""
    check_content(store, name, data)
    file = open_parquet(pa.BufferReader(data))
    held = file.schema_arrow.names  # built anew by each access
    wanted = None if columns is None else [name for name in columns if name in held]
    return file.read(columns=wanted, use_threads=READ_THREADS)


def small_file(folder: str, run_id: str, number: int, rows: pa.Table, made_with: str | None) -> tuple[str, pa.Buffer]:
    """Serialise rows as a commit: (its name, its content). ``made_with`` is the fingerprint of their identity."""
    data = write_parquet(rows if made_with is None else rows.replace_schema_metadata({MADE_WITH: made_with}))
    return small_name(folder, run_id, number, data), data


def sorted_file(
    folder: str,
    level: int,
    rows: pa.Table,
    metadata: Mapping[bytes, str],
    made_with: str | None,
    group_rows: int = GROUP_ROWS,
) -> tuple[str, bytes]:
    """Serialise rows of videos that are sorted by ``id_high`` as a sorted file: (its name, its content)."""
    rows = rows.replace_schema_metadata({**metadata, **({} if made_with is None else {MADE_WITH.encode(): made_with})})
    groups = [min(group_rows, len(rows) - start) for start in range(0, len(rows), group_rows)]
    data = memoryview(write_parquet(rows, groups, indexed="video_id"))  # for the queries of other tools
    n_footer = footer_length(bytes(data[-FOOTER_TAIL:]))
    body, footer = data[: len(data) - n_footer], data[len(data) - n_footer :]
    parsed = parse_footer(bytes(footer))
    high = rows["id_high"].to_numpy()
    crcs = [[zlib.crc32(body[slice(*span)]) for span in _spans(parsed, group)] for group in range(len(groups))]
    tail = high[::group_rows].astype("<u8").tobytes() + np.array(crcs, "<u4").tobytes() + bytes(footer)
    ends = f"{int(high[0]):016x}-{int(high[-1]):016x}"
    name = f"sorted-{level}-{ends}-{len(rows)}-{len(tail)}-{hex_digest(tail)}.parquet"
    return f"{folder}/{name}", bytes(body) + tail


class SortedFile:
    """A sorted file whose tail is the one that its name tells. Threads may share it.

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
        self.file = file
        self._store = store
        tail = store.read_slice(file.name, -file.n_tail)
        if hex_digest(tail.data) != file.tail_hash:
            raise self.corrupt("its end is not the one that its name tells")
        n_footer = footer_length(tail.data[-FOOTER_TAIL:])
        self._metadata: pq.FileMetaData = parse_footer(tail.data[-n_footer:])
        self.n_bytes = tail.size
        if self._metadata.num_rows != file.rows:
            raise self.corrupt(f"it has {self._metadata.num_rows} rows, where its name has {file.rows}")
        n_groups = self._metadata.num_row_groups
        self.group_rows: int = self._metadata.row_group(0).num_rows if n_groups else 0
        self.firsts: list[int] = np.frombuffer(tail.data, "<u8", n_groups).tolist()
        numbers: NDArray[np.uint32] = np.frombuffer(tail.data[8 * n_groups : -n_footer], "<u4")
        self._crcs = numbers.reshape(n_groups, self._metadata.num_columns)
        self.schema: pa.Schema = self._metadata.schema.to_arrow_schema()
        self.metadata: dict[bytes, bytes] = self._metadata.metadata or {}
        self.made_with = made_with_of(self.metadata)

    def corrupt(self, what: str) -> CorruptShard:
        """Return the error that this file is damaged; ``what`` says how."""
        return CorruptShard(f"{self._store}/{self.file.name}: {what}; restore the file", "commit")

    def groups_of(self, first: int, last: int) -> range:
        """Return the row groups that may hold rows whose ``id_high`` is from ``first`` to ``last``."""
        return range(max(0, bisect_left(self.firsts, first) - 1), bisect_right(self.firsts, last))

    def read(self, groups: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        """Read row groups, each a stretch of the file; of ``columns`` those that the file has. Raises CorruptShard."""
        held: list[str] = self.schema.names
        names = held if columns is None else [name for name in columns if name in held]
        stretches = [stretch for group in groups for stretch in self._fetched(group, frozenset(names))]
        source = pa.PythonFile(Fetched(stretches, self.n_bytes, _unfetched), mode="r")
        try:
            file = open_parquet(source, self._metadata)
            return file.read_row_groups(list(groups), columns=names, use_threads=READ_THREADS)
        except (pa.ArrowException, ValueError) as error:
            raise self.corrupt(f"it cannot be read: {error}") from error

    def parts(self, columns: Sequence[str] | None = None, groups: int = 64) -> Iterator[pa.Table]:
        """Yield all rows in order, ``groups`` row groups at a time."""
        for start in range(0, len(self.firsts), groups):
            yield self.read(range(start, min(start + groups, len(self.firsts))), columns)

    def _fetched(self, group: int, names: frozenset[str]) -> Iterator[Stretch]:
        """Yield the checked bytes of columns of a row group, neighbours in one read."""
        meta = self._metadata.row_group(group)
        wanted = [i for i in range(meta.num_columns) if meta.column(i).path_in_schema.split(".")[0] in names]
        spans = _spans(self._metadata, group)
        run: list[int] = []
        for number in [*wanted, None]:
            if run and (number is None or spans[number][0] != spans[run[-1]][1]):
                data = self._store.read_slice(self.file.name, spans[run[0]][0], spans[run[-1]][1]).data
                stretch = Stretch(spans[run[0]][0], data)
                if any(zlib.crc32(stretch.view(*spans[i])) != self._crcs[group, i] for i in run):
                    raise self.corrupt(f"row group {group} is not what was written")
                yield stretch
                run = []
            if number is not None:
                run.append(number)


def _unfetched(start: int, end: int) -> Stretch:
    """Raise ValueError: the bytes of all columns that are read were fetched."""
    raise ValueError(f"bytes {start} to {end} are no part of the columns that the footer names")


def _spans(metadata: pq.FileMetaData, group: int) -> list[tuple[int, int]]:
    """Return the bytes [start, end) of each column of a row group."""
    columns = (metadata.row_group(group).column(i) for i in range(metadata.num_columns))
    spans = []
    for column in columns:
        start = column.data_page_offset
        if column.has_dictionary_page and column.dictionary_page_offset is not None:
            start = min(start, column.dictionary_page_offset)
        spans.append((start, start + column.total_compressed_size))
    return spans


def in_key_order(rows: pa.Table) -> pa.Table:
    """Return rows sorted by ``id_high`` and ``id_low``."""
    order = np.lexsort((rows["id_low"].to_numpy(), rows["id_high"].to_numpy()))
    return rows.take(pa.array(order))


def with_high(rows: pa.Table, first: int, last: int) -> pa.Table:
    """Return the rows whose ``id_high`` is from ``first`` to ``last``."""
    high = rows["id_high"]
    within = pc.and_(
        pc.greater_equal(high, pa.scalar(first, pa.uint64())), pc.less_equal(high, pa.scalar(last, pa.uint64()))
    )
    return rows.filter(within)
