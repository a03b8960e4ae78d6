"""A token shard, opened so that reads return the committed bytes, or raise."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from threading import local
from typing import NamedTuple, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.cache.bounds import check_unpacked, find_leaves, read_bounded
from pipeline.cache.codecs import TokenCodec
from pipeline.cache.pages import plain_columns, plain_pages, put_rows
from pipeline.cache.schema import (
    FOOTER_TAIL,
    READ_THREADS,
    TOKENS,
    digest,
    open_parquet,
    parse_footer,
    parse_footer_length,
    token_schema,
)
from pipeline.errors import CorruptShard
from pipeline.rows import VideoRow
from pipeline.storage.random_access import Fetched, LocalFile, RangedObject
from pipeline.storage.stores import Store

Spans = list[tuple[int, int]]
_SHARD_NAME = re.compile(r".+-[0-9a-f]{16}-[0-9a-f]{32}\.parquet", re.DOTALL)


class TokenRows(NamedTuple):
    """The first ``keep`` token rows of a video, as a request to read them.

    Attributes:
        row: the video's row of the videos table.
        keep: the number of rows; only the row groups with these rows are read.
        columns: the columns to read.
        near: columns between ``columns`` that are fetched with them if that saves a request.
    """

    row: VideoRow
    keep: int
    columns: Sequence[str]
    near: Collection[str] = ()


class TokenShard:
    """An opened token shard, whose footer was compared with the hash in the videos rows. Threads may share it.

    Attributes:
        name: file below the cache.
        metadata: the Parquet metadata.
        schema: the Arrow schema.
        n_bytes: bytes of the whole file.
        n_footer: bytes of the footer.

    Raises CorruptShard, and OSError where the store fails.
    """

    def __init__(self, store: Store, name: str, footer_hash: str) -> None:
        """Open the shard and read its footer.

        Raises CorruptShard if the shard is missing, or if the footer's hash is not ``footer_hash``.
        """
        self.name = name
        self._label = f"{store}/{name}"
        if not is_shard_name(name):  # a row of someone's cache
            raise CorruptShard(f"{store}: the videos row names {name!r}, which is no file in {TOKENS}/", "missing")
        try:
            self._source = store.open(name)
            footer = _footer(self._source)
        except FileNotFoundError:
            raise CorruptShard(f"{self._label}: the shard is missing", "missing") from None
        except ValueError as error:
            raise CorruptShard(f"{self._label}: {error}", "footer") from error
        if digest(footer) != footer_hash:
            raise CorruptShard(f"{self._label}: its footer is not the one that was committed", "footer")
        self.n_bytes, self.n_footer = self._source.size(), len(footer)
        self.metadata: pq.FileMetaData = parse_footer(footer)
        self.schema: pa.Schema = self.metadata.schema.to_arrow_schema()
        self._names = frozenset(self.schema.names)
        self._plain_columns = plain_columns(self.metadata)
        self._thread_local = local()  # a Parquet reader of each thread: Arrow does not promise that they may share one
        self._bounded: set[tuple[int, tuple[str, ...]]] = set()  # row groups and columns that fit in memory
        self._widths: set[int] = set()  # the hidden sizes that the columns have

    def spans(self, rows: TokenRows) -> Spans:
        """Return the byte ranges [start, end) of the rows: one range, unless other columns lie between.

        The range of a row group is from the first to the last of the columns. Raises CorruptShard.
        """
        names, spans = {*rows.columns, *rows.near}, Spans()
        for group in map(self.metadata.row_group, self._groups(rows)):
            columns = [c for c in map(group.column, range(group.num_columns)) if c.path_in_schema in names]
            end = max(column.data_page_offset + column.total_compressed_size for column in columns)
            spans.append((columns[0].data_page_offset, end))
        return join_spans(spans)

    def fetch_all(self, videos: Sequence[TokenRows]) -> Fetched | None:
        """Fetch the bytes of several videos, in the order of their row groups, for ``read``; one request a span.

        Returns None for a local file, which is read in place. Raises CorruptShard, OSError.
        """
        spans = join_spans(span for rows in videos for span in self.spans(rows))
        with self._faults():
            return self._source.fetch(spans)

    def read(self, rows: TokenRows, fetched: Fetched | None = None) -> pa.Table:
        """Read the rows as stored, in order of selection. Raises CorruptShard, OSError.

        ``fetched`` has their bytes already, and belongs to one thread.
        """
        fetched = fetched or self.fetch_all([rows])
        self._check_bounds(rows, fetched)
        return self._read_columns(rows, rows.columns, fetched)

    def read_by_index(
        self, rows: TokenRows, fetched: Fetched | None = None
    ) -> tuple[pa.Table, NDArray[np.int64], dict[str, NDArray[np.int16]]]:
        """Read the rows in order of selection, and their columns of vectors in order of ``index``.

        Returns (the rows without the columns of vectors; [K] their places in order of index, where rows of equal index
        stay in order of selection; vectors: column -> [K,width] in order of index). The columns must include ``index``.

        Raises CorruptShard, OSError.
        """
        fetched = fetched or self.fetch_all([rows])
        self._check_bounds(rows, fetched)
        table = self._read_columns(rows, [name for name in rows.columns if name not in self._plain_columns], fetched)
        order = sort_by_index(table)
        positions = np.empty_like(order)
        positions[order] = np.arange(len(order))
        large = [name for name in rows.columns if name in self._plain_columns]
        return table, order, {name: self._read_vectors(rows, name, order, positions, fetched) for name in large}

    def read_checked(self, row: VideoRow) -> pa.Table:
        """Read all of a video's token rows with all columns, and compare their id and checksum with its ``row``.

        Raises CorruptShard, OSError.
        """
        table = self.read(TokenRows(row, row["n_tokens"], self.schema.names))
        if (ids := table["video_id"].unique().to_pylist()) != [row["video_id"]]:
            raise CorruptShard(f"{self._label}: the rows belong to {', '.join(map(str, ids[:3]))}", "rows")
        if hash_vectors(table) != row["checksum"]:
            message = f"the token bytes of {row['video_id']} do not have the checksum of the videos row"
            raise CorruptShard(f"{self._label}: {message}", "checksum")
        return table

    def require(self, columns: Sequence[str]) -> None:
        """Raise CorruptShard if the shard lacks one of the columns."""
        if lacking := sorted(set(columns) - self._names):
            raise CorruptShard(f"{self._label}: it has no column {', '.join(lacking)}", "schema")

    def check_width(self, hidden_size: int, levels: int, codec: TokenCodec) -> None:
        """Raise CorruptShard unless the columns have the types of tokens of ``hidden_size`` numbers by a codec."""
        if hidden_size in self._widths:
            return
        schema = token_schema(hidden_size, levels, codec=codec)
        self.require(schema.names)
        for column in schema:
            kind = self.schema.field(column.name).type
            if kind != column.type:
                raise CorruptShard(f"{self._label}: {column.name} is {kind}, where the row has {column.type}", "schema")
        self._widths.add(hidden_size)

    def _check_bounds(self, rows: TokenRows, fetched: Fetched | None) -> None:
        """Raise CorruptShard if the rows would unpack to far more than the file can hold, before they are unpacked."""
        columns = tuple(rows.columns)
        groups = [group for group in self._groups(rows) if (group, columns) not in self._bounded]
        if not groups:
            return
        counts = rows.row["row_counts"]
        for group in groups:
            n_rows, n_due = self.metadata.row_group(group).num_rows, counts[group - rows.row["first_row_group"]]
            if n_rows != n_due:
                raise CorruptShard(f"{self._label}: row group {group} has {n_rows} rows, its row says {n_due}", "rows")
        with self._faults():
            view = (fetched or self._source).view
            try:
                check_unpacked(self.metadata, groups, find_leaves(self.metadata, columns), view, self.n_bytes)
            except ValueError as error:
                raise CorruptShard(f"{self._label}: {error}") from error
        self._bounded.update((group, columns) for group in groups)

    def _read_columns(self, rows: TokenRows, columns: Sequence[str], fetched: Fetched | None) -> pa.Table:
        """Read the rows with Arrow, which checks every page's checksum, as stored. Raises CorruptShard, OSError."""
        groups = self._groups(rows)
        with self._faults():
            if fetched is not None:
                reader = open_parquet(pa.PythonFile(fetched, "r"), self.metadata)
            elif (reader := getattr(self._thread_local, "parquet", None)) is None:
                reader = self._thread_local.parquet = open_parquet(self._source.mapped, self.metadata)
            table = reader.read_row_groups(groups, columns=list(columns), use_threads=READ_THREADS)
        n_rows = sum(rows.row["row_counts"][: len(groups)])
        if len(table) != n_rows:
            raise CorruptShard(f"{self._label}: {len(table)} rows instead of {n_rows}", "rows")
        return table.slice(0, rows.keep)

    def _read_vectors(
        self,
        rows: TokenRows,
        name: str,
        order: NDArray[np.int64],
        positions: NDArray[np.int64],
        fetched: Fetched | None,
    ) -> NDArray[np.int16]:
        """Read a column of vectors in ``order``, [K,width]: without a copy from plain pages, else by Arrow.

        ``positions`` is the position of each row in that order.
        """
        number, n_bytes = self._plain_columns[name]
        out = np.empty((len(positions), n_bytes // 2), np.int16)
        view, n_done = (fetched or self._source).view, 0
        for group in self._groups(rows):
            pages = plain_pages(self.metadata.row_group(group), number)
            if pages is None:
                break
            n_rows = self.metadata.row_group(group).num_rows
            part = positions[n_done : n_done + n_rows]
            with self._faults():
                data = view(*pages)
            if not put_rows(data, n_rows, part, out):
                break
            n_done += len(part)
        else:
            return out
        column = self._read_columns(rows, [name], fetched)[name]
        bits: NDArray[np.int16] = np.frombuffer(join_vectors(column), np.int16).reshape(len(column), -1)
        return bits.take(order, axis=0)

    def _groups(self, rows: TokenRows) -> range:
        """Return the row groups of the rows. Raises CorruptShard if row groups or columns are missing."""
        row, n_groups, n_rows = rows.row, 0, 0
        self.require(rows.columns)
        while n_rows < rows.keep and n_groups < len(row["row_counts"]):
            n_rows += row["row_counts"][n_groups]
            n_groups += 1
        groups = range(row["first_row_group"], row["first_row_group"] + n_groups)
        if n_rows < rows.keep or groups.start < 0 or groups.stop > self.metadata.num_row_groups:
            raise CorruptShard(
                f"{self._label}: {self.metadata.num_row_groups} row groups, not {groups.start} to {groups.stop - 1} "
                f"of {rows.keep} rows, which the videos row asks for",
                "rows",
            )
        return groups

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Convert errors of Arrow and a missing file to CorruptShard; errors of the store stay as they are."""
        try:
            yield
        except FileNotFoundError as error:  # an object whose footer is in memory was deleted
            raise CorruptShard(f"{self._label}: the shard is missing", "missing") from error
        except (OSError, pa.ArrowException) as error:
            if isinstance(error, OSError) and error.filename:
                raise  # an OSError with a file name comes from the store, not from damage
            raise CorruptShard(f"{self._label}: {error}") from error


def _footer(source: LocalFile | RangedObject) -> bytes:
    """Read the footer of an open Parquet file, its tail included. Raises OSError, ValueError without a footer."""
    size = source.size()
    n_footer = parse_footer_length(bytes(source.view(max(0, size - FOOTER_TAIL), size)))
    return bytes(source.view(max(0, size - n_footer), size))


def sort_by_index(table: pa.Table) -> NDArray[np.int64]:
    """Return the order [K] that sorts token rows by flat index; rows of equal index stay as stored."""
    index = table["index"].to_numpy()
    if len(index) and index.min() >= 0 and index.max() < 2**16:
        index = index.astype(np.uint16)  # numpy sorts 16-bit numbers by radix, in a third of the time
    return np.argsort(index, kind="stable")


def join_vectors(column: pa.ChunkedArray) -> pa.Buffer:
    """Return the values of a column of vectors in one buffer, without a copy if the column is one chunk."""
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    width = array.type.byte_width
    return array.buffers()[1].slice(array.offset * width, len(array) * width)


def hash_vectors(table: pa.Table) -> str:
    """Compute the checksum of a video's token rows, over all vector columns, as in its row of the videos table."""
    vectors = [field.name for field in table.schema if pa.types.is_fixed_size_binary(field.type)]
    # Evidence of frames is null beside most tokens; the bytes of nulls are undefined.
    return digest(*(join_vectors(table[name].drop_null()) for name in vectors))


def join_spans(spans: Iterable[tuple[int, int]]) -> Spans:
    """Join adjacent spans; the input is ascending."""
    runs: Spans = []
    for start, end in spans:
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]  # noqa: PLW2901
        runs.append((start, end))
    return runs


def list_videos(store: Store, token_shard: str) -> list[str]:
    """List the ids of the videos in a token shard. Raises OSError, ValueError, ArrowException if it cannot be read."""
    return list(read_bounded(store.read(token_shard), ["video_id"]).column(0).unique().to_pylist())


def read_videos(store: Store, rows: Sequence[VideoRow]) -> list[pa.Table]:
    """Read all token rows of each video, checked against its row, in the order of ``rows``.

    Neighbouring rows that name one shard open it once. Raises CorruptShard, OSError.
    """
    tables: list[pa.Table] = []
    shard: TokenShard | None = None
    for row in rows:
        if shard is None or shard.name != row["token_shard"]:
            shard = TokenShard(store, row["token_shard"], row["footer_hash"])
        tables.append(shard.read_checked(row))
    return tables


def read_footer_ids(store: Store, token_shard: str) -> list[str]:
    """List the ids of the videos in a token shard by the statistics of its row groups, each of one video.

    Reads the footer alone, without a checksum: for counts and messages. Ids of more than 4 KB have no statistics; such
    a shard is read whole. Raises OSError, CorruptShard.
    """
    source = store.open(token_shard)
    try:
        footer = parse_footer(_footer(source))
        column = footer.schema.to_arrow_schema().get_field_index("video_id")
        if column < 0:
            raise ValueError("it has no column video_id")
        groups = [footer.row_group(number).column(column).statistics for number in range(footer.num_row_groups)]
        if all(group is not None and group.has_min_max for group in groups):
            return sorted({group.min for group in groups})
        return sorted(list_videos(store, token_shard))
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.filename:
            raise  # of the store; an OSError of Arrow names no file
        raise CorruptShard(f"{store}/{token_shard}: {error}", "footer") from error


def is_shard_name(name: object) -> TypeGuard[str]:
    """Return True if ``name`` is a path of a file right in the folder of token shards: names come from files."""
    return isinstance(name, str) and name.startswith(f"{TOKENS}/") and "/" not in name[len(TOKENS) + 1 :]


def has_shard_form(name: str) -> bool:
    """Return True if a file's name has the form of a token shard's: it ends in two hashes, whatever the content is."""
    return _SHARD_NAME.fullmatch(PurePosixPath(name).name) is not None


def parse_run_id(token_shard: str) -> str:
    """Return the id of the run that wrote a token shard, by the shard's name."""
    return PurePosixPath(token_shard).stem.rsplit("-", 2)[0]


def parse_shard_id(name: str) -> str:
    """Return the id in a token shard's name, which differs between the shards of a run; "" in a name of no shard."""
    return ("", *name.rsplit("-", 2))[-2]
