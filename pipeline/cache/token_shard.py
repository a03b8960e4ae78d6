"""Read token shards so that every read returns the committed bytes or raises CorruptShard."""

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
from pipeline.cache.pages import copy_vectors_to_rows, find_plain_columns, get_plain_page_range
from pipeline.cache.schema import (
    FOOTER_TAIL,
    READ_THREADS,
    TOKENS,
    build_token_schema,
    hash_bytes,
    open_parquet,
    parse_footer,
    parse_footer_length,
)
from pipeline.errors import CorruptShard
from pipeline.rows import VideoRow
from pipeline.storage.random_access import FetchedFile, LocalFile, RangedObject
from pipeline.storage.stores import Store

Spans = list[tuple[int, int]]
_SHARD_NAME = re.compile(r".+-[0-9a-f]{16}-[0-9a-f]{32}\.parquet", re.DOTALL)


class TokenRequest(NamedTuple):
    """A request for the first ``keep`` token rows of a video.

    Attributes:
        keep: the number of rows; only the row groups that contain them are read.
        near: columns that are fetched too but not read, so that the byte ranges of adjacent videos join.
    """

    row: VideoRow
    keep: int
    columns: Sequence[str]
    near: Collection[str] = ()


class TokenShard:
    """An open token shard whose footer has the hash in the videos rows. Threads may share it.

    Its methods raise CorruptShard if the shard is damaged or missing, or contradicts a video's row.

    Attributes:
        name: the path of the file relative to the cache.
        n_bytes: the size of the file.
        n_footer: the size of the footer in bytes.
    """

    def __init__(self, store: Store, name: str, footer_hash: str) -> None:
        """Open the shard, and read and check its footer.

        Args:
            footer_hash: the hash of the footer, from a row of the videos table.

        Raises:
            CorruptShard: ``name`` is not a file directly in ``tokens/``, the file is missing or is not Parquet, or its
                footer has another hash.
        """
        self.name = name
        self._label = f"{store}/{name}"
        if not is_shard_name(name):  # the row may come from an untrusted cache
            raise CorruptShard(f"{store}: the videos row names {name!r}, which is no file in {TOKENS}/", "missing")
        try:
            self._source = store.open(name)
            footer = _read_footer(self._source)
        except FileNotFoundError:
            raise CorruptShard(f"{self._label}: the shard is missing", "missing") from None
        except ValueError as error:
            raise CorruptShard(f"{self._label}: {error}", "footer") from error
        if hash_bytes(footer) != footer_hash:
            raise CorruptShard(f"{self._label}: its footer is not the one that was committed", "footer")
        self.n_bytes, self.n_footer = self._source.size(), len(footer)
        self.metadata: pq.FileMetaData = parse_footer(footer)
        self.schema: pa.Schema = self.metadata.schema.to_arrow_schema()
        self._names = frozenset(self.schema.names)
        self._plain_columns = find_plain_columns(self.metadata)
        self._thread_local = local()  # a Parquet reader per thread: Arrow does not promise that threads may share one
        self._bounded: set[tuple[int, tuple[str, ...]]] = set()  # row groups and columns that passed _check_bounds
        self._widths: set[int] = set()  # the hidden sizes that passed check_width

    def spans(self, rows: TokenRequest) -> Spans:
        """Return the byte ranges [start, end) that a request needs, ascending; adjacent ranges are joined.

        For each row group the range reaches from the first to the last of ``rows.columns`` and ``rows.near``.
        """
        names = {*rows.columns, *rows.near}
        spans = Spans()
        for group in map(self.metadata.row_group, self._find_groups(rows)):
            columns = [c for c in map(group.column, range(group.num_columns)) if c.path_in_schema in names]
            end = max(column.data_page_offset + column.total_compressed_size for column in columns)
            spans.append((columns[0].data_page_offset, end))
        return join_spans(spans)

    def fetch_all(self, videos: Sequence[TokenRequest]) -> FetchedFile | None:
        """Fetch the bytes of several videos into memory for ``read``, with one request per contiguous range.

        Args:
            videos: requests in the order of their row groups.

        Returns:
            None for a local file, which is mapped and read in place.
        """
        spans = join_spans(span for rows in videos for span in self.spans(rows))
        with self._faults():
            return self._source.fetch(spans)

    def read(self, rows: TokenRequest, fetched: FetchedFile | None = None) -> pa.Table:
        """Read the requested rows as stored, in order of selection.

        Args:
            fetched: the bytes from ``fetch_all``; only one thread may use them at a time. None fetches them now.
        """
        fetched = fetched or self.fetch_all([rows])
        self._check_bounds(rows, fetched)
        return self._read_columns(rows, rows.columns, fetched)

    def read_by_index(
        self, rows: TokenRequest, fetched: FetchedFile | None = None
    ) -> tuple[pa.Table, NDArray[np.int64], dict[str, NDArray[np.int16]]]:
        """Read the requested rows, with the vectors already sorted by ``index``, which saves copies of large columns.

        Args:
            rows: the request; its columns must include ``index``.
            fetched: the bytes from ``fetch_all``; only one thread may use them at a time. None fetches them now.

        Returns:
            (table, order, vectors). ``table`` has the columns that may have nulls or are not vectors, as stored, in
            order of selection. ``order``, [K], has the row of ``table`` for each row by ascending index; equal indices
            stay in order of selection. ``vectors`` maps each other column to [K, width / 2] int16, in the order of
            ``order``.
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
        """Read all token rows of a video with all columns.

        Raises:
            CorruptShard: their video id or checksum is not that of ``row``, or the shard is damaged or missing.
        """
        table = self.read(TokenRequest(row, row["n_tokens"], self.schema.names))
        if (ids := table["video_id"].unique().to_pylist()) != [row["video_id"]]:
            raise CorruptShard(f"{self._label}: the rows belong to {', '.join(map(str, ids[:3]))}", "rows")
        if hash_vectors(table) != row["checksum"]:
            message = f"the token bytes of {row['video_id']} do not have the checksum of the videos row"
            raise CorruptShard(f"{self._label}: {message}", "checksum")
        return table

    def require(self, columns: Sequence[str]) -> None:
        """Raise CorruptShard if the shard lacks one of ``columns``."""
        if lacking := sorted(set(columns) - self._names):
            raise CorruptShard(f"{self._label}: it has no column {', '.join(lacking)}", "schema")

    def check_width(self, hidden_size: int, levels: int, codec: TokenCodec) -> None:
        """Raise CorruptShard if the shard lacks a column for tokens of this width and codec, or one has another type.

        A width that passed once is not checked again, whatever the levels and codec.

        Args:
            levels: the number of deepstack levels.
        """
        if hidden_size in self._widths:
            return
        schema = build_token_schema(hidden_size, levels, codec=codec)
        self.require(schema.names)
        for column in schema:
            kind = self.schema.field(column.name).type
            if kind != column.type:
                raise CorruptShard(f"{self._label}: {column.name} is {kind}, but its row needs {column.type}", "schema")
        self._widths.add(hidden_size)

    def _check_bounds(self, rows: TokenRequest, fetched: FetchedFile | None) -> None:
        """Raise CorruptShard if the rows would unpack to far more than the file can hold; nothing is unpacked.

        It is also raised if a row group does not have the number of rows that the video's row states. Row groups and
        columns that passed once are not checked again.
        """
        columns = tuple(rows.columns)
        groups = [group for group in self._find_groups(rows) if (group, columns) not in self._bounded]
        if not groups:
            return
        counts = rows.row["row_counts"]
        for group in groups:
            n_rows = self.metadata.row_group(group).num_rows
            n_due = counts[group - rows.row["first_row_group"]]
            if n_rows != n_due:
                raise CorruptShard(
                    f"{self._label}: row group {group} has {n_rows} rows, not {n_due} as in its row", "rows"
                )
        with self._faults():
            view = (fetched or self._source).view
            try:
                check_unpacked(self.metadata, groups, find_leaves(self.metadata, columns), view, self.n_bytes)
            except ValueError as error:
                raise CorruptShard(f"{self._label}: {error}") from error
        self._bounded.update((group, columns) for group in groups)

    def _read_columns(self, rows: TokenRequest, columns: Sequence[str], fetched: FetchedFile | None) -> pa.Table:
        """Read columns of the requested rows with Arrow, as stored; Arrow verifies the checksum of every page.

        Args:
            fetched: the bytes from ``fetch_all``; None for a local file.
        """
        groups = self._find_groups(rows)
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
        rows: TokenRequest,
        name: str,
        order: NDArray[np.int64],
        positions: NDArray[np.int64],
        fetched: FetchedFile | None,
    ) -> NDArray[np.int16]:
        """Read a column of vectors as [K, width / 2] int16 in the order of ``order``.

        Plain pages are copied directly into the result; if any page is not plain or is damaged, Arrow reads the whole
        column, and raises CorruptShard for damage.

        Args:
            order: [K] the stored row for each row of the result.
            positions: [K] the inverse: the row of the result for each stored row.
        """
        number, n_bytes = self._plain_columns[name]
        out = np.empty((len(positions), n_bytes // 2), np.int16)
        view = (fetched or self._source).view
        n_done = 0
        for group in self._find_groups(rows):
            pages = get_plain_page_range(self.metadata.row_group(group), number)
            if pages is None:
                break
            n_rows = self.metadata.row_group(group).num_rows
            part = positions[n_done : n_done + n_rows]
            with self._faults():
                data = view(*pages)
            if not copy_vectors_to_rows(data, n_rows, part, out):
                break
            n_done += len(part)
        else:
            return out
        column = self._read_columns(rows, [name], fetched)[name]
        bits: NDArray[np.int16] = np.frombuffer(join_vectors(column), np.int16).reshape(len(column), -1)
        return bits.take(order, axis=0)

    def _find_groups(self, rows: TokenRequest) -> range:
        """Return the numbers of the video's first row groups, as many as hold ``rows.keep`` rows.

        Raises:
            CorruptShard: the shard lacks a column, or does not have the row groups that the video's row states.
        """
        row = rows.row
        n_groups = 0
        n_rows = 0
        self.require(rows.columns)
        while n_rows < rows.keep and n_groups < len(row["row_counts"]):
            n_rows += row["row_counts"][n_groups]
            n_groups += 1
        groups = range(row["first_row_group"], row["first_row_group"] + n_groups)
        if n_rows < rows.keep or groups.start < 0 or groups.stop > self.metadata.num_row_groups:
            raise CorruptShard(
                f"{self._label}: it has {self.metadata.num_row_groups} row groups; the videos row needs "
                f"{groups.start} to {groups.stop - 1} with {rows.keep} rows",
                "rows",
            )
        return groups

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Convert a missing file, errors of Arrow and OSErrors without a file name to CorruptShard.

        OSErrors with a file name come from the store and pass unchanged.
        """
        try:
            yield
        except FileNotFoundError as error:  # the object was deleted after its footer was read
            raise CorruptShard(f"{self._label}: the shard is missing", "missing") from error
        except (OSError, pa.ArrowException) as error:
            if isinstance(error, OSError) and error.filename:
                raise  # an OSError with a file name comes from the store, not from damage
            raise CorruptShard(f"{self._label}: {error}") from error


def _read_footer(source: LocalFile | RangedObject) -> bytes:
    """Read the footer of an open Parquet file, including the length and magic at its end.

    Raises:
        ValueError: the file does not end in PAR1.
    """
    size = source.size()
    n_footer = parse_footer_length(bytes(source.view(max(0, size - FOOTER_TAIL), size)))
    return bytes(source.view(max(0, size - n_footer), size))


def sort_by_index(table: pa.Table) -> NDArray[np.int64]:
    """Return the order [K] that sorts token rows by ascending ``index``; rows with equal index keep their order."""
    index = table["index"].to_numpy()
    if len(index) and index.min() >= 0 and index.max() < 2**16:
        index = index.astype(np.uint16)  # numpy sorts 16-bit numbers by radix, in a third of the time
    return np.argsort(index, kind="stable")


def join_vectors(column: pa.ChunkedArray) -> pa.Buffer:
    """Return the bytes of a fixed-size binary column in one buffer, without a copy if the column has one chunk."""
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    width = array.type.byte_width
    return array.buffers()[1].slice(array.offset * width, len(array) * width)


def hash_vectors(table: pa.Table) -> str:
    """Compute a video's ``checksum`` from its token rows: the hash of all vector columns in the order of the table.

    Nulls, as in evidence of frames, are skipped.
    """
    vectors = [field.name for field in table.schema if pa.types.is_fixed_size_binary(field.type)]
    # Evidence per frame is null in most rows, and the bytes of nulls are undefined.
    return hash_bytes(*(join_vectors(table[name].drop_null()) for name in vectors))


def join_spans(spans: Iterable[tuple[int, int]]) -> Spans:
    """Join adjacent byte ranges; ``spans`` must be ascending."""
    runs: Spans = []
    for start, end in spans:
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]  # noqa: PLW2901
        runs.append((start, end))
    return runs


def read_shard_video_ids(store: Store, token_shard: str) -> list[str]:
    """Read a whole token shard, and return the distinct ids of its videos in stored order.

    Raises:
        OSError, ValueError, ArrowException: the file is missing, damaged or not a Parquet file.
    """
    return list(read_bounded(store.read(token_shard), ["video_id"]).column(0).unique().to_pylist())


def read_videos(store: Store, rows: Sequence[VideoRow]) -> list[pa.Table]:
    """Read all token rows of each video, checked against its row; return a table per row, in the order of ``rows``.

    A shard is opened once for consecutive rows that name it.

    Raises:
        CorruptShard: a shard is damaged or missing, or a video's id or checksum differs.
    """
    tables: list[pa.Table] = []
    shard: TokenShard | None = None
    for row in rows:
        if shard is None or shard.name != row["token_shard"]:
            shard = TokenShard(store, row["token_shard"], row["footer_hash"])
        tables.append(shard.read_checked(row))
    return tables


def read_footer_ids(store: Store, token_shard: str) -> list[str]:
    """Return the sorted ids of the videos in a token shard, from the statistics in its footer.

    The footer is not checked against a hash, so the result is for counts and messages only. Ids of more than 4 KB have
    no statistics; a shard with such an id is read whole.

    Raises:
        CorruptShard: the file cannot be read as a token shard. The kind is "footer".
        OSError: the file is missing, or the store failed.
    """
    source = store.open(token_shard)
    try:
        footer = parse_footer(_read_footer(source))
        column = footer.schema.to_arrow_schema().get_field_index("video_id")
        if column < 0:
            raise ValueError("it has no column video_id")
        groups = [footer.row_group(number).column(column).statistics for number in range(footer.num_row_groups)]
        if all(group is not None and group.has_min_max for group in groups):
            return sorted({group.min for group in groups})
        return sorted(read_shard_video_ids(store, token_shard))
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.filename:
            raise  # an OSError with a file name comes from the store, not from Arrow
        raise CorruptShard(f"{store}/{token_shard}: {error}", "footer") from error


def is_shard_name(name: object) -> TypeGuard[str]:
    """Return True if ``name`` is a text that names a file directly in ``tokens/``; names come from untrusted files."""
    return isinstance(name, str) and name.startswith(f"{TOKENS}/") and "/" not in name[len(TOKENS) + 1 :]


def has_shard_form(name: str) -> bool:
    """Return True if a path's base name has the form of a token shard's, which ends in two hashes."""
    return _SHARD_NAME.fullmatch(PurePosixPath(name).name) is not None


def parse_run_id(token_shard: str) -> str:
    """Return the id of the run that wrote a token shard, from the shard's name."""
    return PurePosixPath(token_shard).stem.rsplit("-", 2)[0]


def parse_shard_id(name: str) -> str:
    """Return the hash of the video ids in a token shard's name, which identifies a shard of a run; "" without "-"."""
    return ("", *name.rsplit("-", 2))[-2]
