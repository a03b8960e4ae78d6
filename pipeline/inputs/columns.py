"""Tables with videos in a column of bytes: Parquet, read by row group, and Arrow, read by record batch.

The uri of a video contains a hash of the table's size and last 64 KiB. A row of the datasets library ({bytes, path})
with a path and no bytes is a separate file.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import ManifestError, VideoFault
from pipeline.inputs.archive import (
    CLIP_COLUMNS,
    Archive,
    ArchiveOptions,
    Member,
    RandomFile,
    SeekableFile,
    format_fault,
    merge_spans,
)
from pipeline.inputs.arrow_files import RecordBatches
from pipeline.inputs.listings import find_suffix
from pipeline.inputs.tables import (
    UNREADABLE,
    UserRow,
    convert_batch_to_dicts,
    format_value,
    serialize_carried,
    simplify_column,
    simplify_type,
)
from pipeline.storage.location import Location

_ROWS = 2**12  # rows of the small columns that are read at once
_MAX_GROUP_BYTES = 2**26  # row groups up to this size are buffered whole
_TAIL = 2**16  # bytes at the end that are hashed: a footer, or most of it
_KEY = "video_id"  # the column with the id of a row's video, if there is one
_BYTES, _PATH = "bytes", "path"  # the fields of the structs of the datasets library


class Table(Archive):
    """An open table of videos. The offset of a video is its row number.

    A piece is a row group of a Parquet file or a record batch of an Arrow file.
    """

    def __init__(self, file: RandomFile) -> None:
        """Hash the end of the file for the names of the videos; the table is opened when it is first read."""
        self._file = file
        self.rows_per_group = 1
        tail = file.read(max(0, file.size - _TAIL), file.size)
        self._hash = hashlib.blake2b(tail + str(file.size).encode(), digest_size=6).hexdigest()
        self._pieces: _RowGroups | RecordBatches | None = None
        self._position: tuple[str, int, int] = "", -1, 0  # column, piece and next row of ``_convert_rows_to_dicts``
        self._rows: Iterator[pa.Scalar] = iter(())

    def members(self, options: ArchiveOptions) -> Iterator[Member]:
        """Yield a member for each row in order, also for a row without bytes; set ``rows_per_group`` before the first.

        The names are HASH/COLUMN/NUMBER. Damage of the table or a piece ends the rows with a last member "@0" that has
        a fault.

        Raises:
            ManifestError: ``options.column`` is missing, repeated or not of bytes, or an Arrow file is in a store.
        """
        number = 0
        try:
            batches = self._open_pieces()
            names = self._names(batches.schema, options)
            self.rows_per_group = max([1, *batches.lengths])
            for piece in range(len(batches.lengths)):
                for row, path in self._read_rows(piece, names, str(options.column)):
                    name = f"{self._hash}/{options.column}/{number}"
                    yield _make_member(name, number, row, path, options.clips_from)
                    number += 1
        except UNREADABLE as error:
            if not _is_damage(error):
                raise
            yield Member("@0", number, fault=format_fault("corrupt", f"the table cannot be read: {error}"))

    def _read_rows(self, piece: int, names: Sequence[str], column: str) -> Iterator[tuple[UserRow, str | None]]:
        """Yield, for each row of a piece, the columns ``names``, and the path of its video, or None if it has bytes."""
        batches = self._open_pieces()
        kind = simplify_type(batches.schema.field(column).type)
        paths_column = list[str]()
        at_once = _ROWS
        if pa.types.is_struct(kind) and kind.get_field_index(_PATH) >= 0:
            paths_column = [column]
            if isinstance(batches, _RowGroups):
                paths_column, at_once = batches.plan_paths(piece, column)
        for batch in batches.read(piece, [*names, *paths_column], at_once):
            if paths_column:
                yield from zip(
                    _convert_rows_to_dicts(batch.drop_columns([column])), _list_paths(batch.column(column)), strict=True
                )
            else:
                yield from ((row, None) for row in _convert_rows_to_dicts(batch))

    def span(self, location: Location) -> tuple[int, int]:
        return 0, 0  # ``read`` plans its own requests, by row group

    def read(self, location: Location) -> Iterator[bytes]:
        """Yield the bytes of a row at once. Rows of a piece that are requested in ascending order are read once.

        Raises:
            VideoFault: "io" if the table has changed, "corrupt" if the row is damaged or missing, "unsupported" if it
                has no bytes.
        """
        stamp, _, column = str(location.member).partition("/")
        if stamp != self._hash:
            raise VideoFault("io", f"{self._file.uri} has changed since it was listed; rerun the command")
        try:
            value = self._value(column.rpartition("/")[0], location.offset)
        except (*UNREADABLE, StopIteration, LookupError) as error:
            if not _is_damage(error):
                raise
            raise VideoFault("corrupt", f"row {location.offset} of the table cannot be read: {error}") from error
        value = _unwrap_scalar(value)
        if isinstance(value, pa.StructScalar) and value.is_valid:
            value = _unwrap_scalar(value[_BYTES]) if _BYTES in value else pa.scalar(None)
        if not value.is_valid:
            raise VideoFault("unsupported", f"row {location.offset} of the table holds neither bytes nor a path")
        yield value.as_buffer().to_pybytes()

    def _value(self, column: str, row: int) -> pa.Scalar:
        """Return a cell; if the previous one was before it, in the same piece and column, reading continues there.

        Raises:
            StopIteration, LookupError: there is no such row.
        """
        batches = self._open_pieces()
        starts = [*accumulate(batches.lengths, initial=0)]
        piece = bisect_right(starts, row) - 1
        if self._position[:2] != (column, piece) or row < self._position[2]:
            at_once = 1 if isinstance(batches, _RowGroups) else _ROWS  # a record batch is in memory anyway
            self._rows = (value for part in batches.read(piece, [column], at_once) for value in part.column(0))
            self._position = column, piece, starts[piece]
        for _ in range(row - self._position[2]):
            next(self._rows)
        self._position = column, piece, row + 1
        return next(self._rows)

    def _open_pieces(self) -> _RowGroups | RecordBatches:
        """Return the row groups or record batches of the table; the first call opens it."""
        if self._pieces is None:
            is_parquet = find_suffix(self._file.uri) == ".parquet"
            self._pieces = _RowGroups(self._file) if is_parquet else RecordBatches(self._file.uri)
        return self._pieces

    def _names(self, schema: pa.Schema, options: ArchiveOptions) -> list[str]:
        """Return the columns that the index reads: those that ``_is_small`` accepts, and ``video_id``.

        A ``video_id`` that is nested or ``options.column`` is left out.

        Raises:
            ManifestError: the column of videos is missing, repeated, or not of bytes.
        """
        if schema.names.count(options.column) > 1:
            raise ManifestError(f"{self._file.uri}: two columns have the name {options.column}; rename one of them")
        if options.column is None or options.column not in schema.names:
            candidates = [field.name for field in schema if _has_video_bytes(field.type)]
            raise ManifestError(
                f"{self._file.uri}: no column {options.column}; columns of bytes: {', '.join(candidates) or 'none'} "
                "(--column NAME)"
            )
        if not _has_video_bytes(kind := schema.field(options.column).type):
            raise ManifestError(
                f"{self._file.uri}: the column {options.column} has {kind}, not bytes; paths are read if the first "
                "table has them"
            )
        return [
            field.name
            for field in schema
            if _is_small(field.type) or (field.name == _KEY != options.column and not pa.types.is_nested(field.type))
        ]


class _RowGroups:
    """The row groups of a Parquet file, with the interface of RecordBatches."""

    def __init__(self, file: RandomFile) -> None:
        self._file = file
        self._table = pq.ParquetFile(SeekableFile(file), pre_buffer=False, buffer_size=2**20)
        self.schema = self._table.schema_arrow
        self.lengths = [self._table.metadata.row_group(group).num_rows for group in range(self._table.num_row_groups)]

    def read(self, piece: int, columns: Sequence[str], at_once: int = 1) -> Iterator[pa.RecordBatch]:
        """Yield the named columns of row group ``piece``, ``at_once`` rows each; without columns, all rows at once.

        This replaces the planned requests of the file.
        """
        group = self._table.metadata.row_group(piece)
        spans = list[tuple[int, int]]()
        for chunk in map(group.column, range(group.num_columns)):
            if any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns):
                start = chunk.dictionary_page_offset or chunk.data_page_offset
                spans.append((start, start + chunk.total_compressed_size))
        spans.sort()
        # Arrow reads the columns alternately, each in ascending order.
        small = sum(end - start for start, end in spans) <= _MAX_GROUP_BYTES
        self._file.plan(merge_spans(spans) if small else spans, keep=small)
        if columns:
            yield from self._table.iter_batches(at_once, row_groups=[piece], columns=columns, use_threads=False)
        else:
            yield pa.RecordBatch.from_struct_array(pa.array([{}] * group.num_rows, pa.struct([])))

    def plan_paths(self, piece: int, column: str) -> tuple[list[str], int]:
        """Return the columns to read for the paths of rows without bytes, and the number of rows to read at a time.

        There are no columns if the statistics say that every row has bytes, and only the paths if none has. Otherwise,
        the bytes are read too, one row at a time.
        """
        group = self._table.metadata.row_group(piece)
        chunks = {chunk.path_in_schema: chunk for chunk in map(group.column, range(group.num_columns))}
        chunk = chunks.get(f"{column}.{_BYTES}")
        n_empty = group.num_rows if chunk is None else None
        if chunk is not None and chunk.statistics is not None and chunk.statistics.has_null_count:
            n_empty = chunk.statistics.null_count
        if n_empty == 0:
            return [], _ROWS
        return ([f"{column}.{_PATH}"], _ROWS) if n_empty == group.num_rows else ([column], 1)


def _list_paths(column: pa.Array) -> list[str | None]:
    """Return the path of each row of a column of structs; None for a row with bytes, or a null or empty path."""
    column = simplify_column(column)
    fields = dict(zip((field.name for field in column.type), column.flatten(), strict=True))
    rows = _convert_rows_to_dicts(pa.RecordBatch.from_arrays([fields[_PATH]], [_PATH]))
    paths = [format_value(path) if (path := row[_PATH]) is not None else None for row in rows]
    empty = pc.is_null(fields[_BYTES]).to_pylist() if _BYTES in fields else [True] * len(rows)
    return [path if is_empty and path else None for path, is_empty in zip(paths, empty, strict=True)]


def _unwrap_scalar(value: pa.Scalar) -> pa.Scalar:
    """Return the value inside a dictionary or extension scalar; any other scalar as it is."""
    while isinstance(value, pa.DictionaryScalar | pa.ExtensionScalar):
        value = pa.scalar(None) if value.value is None else value.value
    return value


def _convert_rows_to_dicts(batch: pa.RecordBatch) -> list[UserRow]:
    """Return the rows of a batch as dicts; if any text is not UTF-8, all text is returned as bytes."""
    try:
        rows = convert_batch_to_dicts(batch)
    except UnicodeDecodeError:  # Parquet readers do not check that text is UTF-8
        plain = map(simplify_column, batch.columns)
        raw = [column.cast(pa.large_binary()) if _is_text(simplify_type(column.type)) else column for column in plain]
        rows = convert_batch_to_dicts(pa.RecordBatch.from_arrays(raw, batch.schema.names))
    return rows


def _make_member(name: str, number: int, row: UserRow, path: str | None, clips_from: tuple[str, str] | None) -> Member:
    """Return the member of a row, with its columns that are not null, except ``video_id``, carried as JSON.

    A NaN or infinite clip time and a path with a NUL become a fault.
    """
    video_id = row.get(_KEY)
    values = {
        key: float(value) if isinstance(value, Decimal) else value  # JSON has no decimals
        for key, value in row.items()
        if key != _KEY and value is not None
    }
    text = serialize_carried(values) if values else None
    faults = [
        format_fault("unsupported", f"the clip's {key} is {value}, not a number of seconds")
        for key in clips_from or CLIP_COLUMNS
        if isinstance(value := row.get(key), float) and not math.isfinite(value)
    ]
    if path is not None and "\0" in path:
        faults.append(format_fault("policy", "its path has a NUL"))
        path = None
    return Member(
        name,
        number,
        carried=text,
        video_id=None if video_id is None else format_value(video_id),
        fault=next(iter(faults), None),
        path=path,
    )


def _is_damage(error: Exception) -> bool:
    """Return True if an error concerns the table's content."""
    return not isinstance(error, OSError) or error.errno is None


def _has_video_bytes(kind: pa.DataType) -> bool:
    """Return True for a column of bytes, or of datasets' structs with a field ``bytes`` or a text field ``path``.

    A field ``bytes`` of any type other than bytes or null gives False.
    """
    kind = simplify_type(kind)
    if not pa.types.is_struct(kind):
        return _is_binary(kind)
    fields = {field.name: simplify_type(field.type) for field in kind}
    in_bytes, in_path = fields.get(_BYTES), fields.get(_PATH)
    if in_bytes is not None and not (_is_binary(in_bytes) or pa.types.is_null(in_bytes)):
        return False
    return in_bytes is not None or (in_path is not None and _is_text(in_path))


def has_path_column(file: RandomFile, column: str) -> bool:
    """Return True if a table has exactly one column ``column``, and it is text.

    Raises:
        OSError, ArrowException: the table cannot be read or is damaged.
        ManifestError: an Arrow file is in a store.
    """
    is_parquet = find_suffix(file.uri) == ".parquet"
    schema = pq.read_schema(SeekableFile(file)) if is_parquet else RecordBatches(file.uri).schema
    return schema.names.count(column) == 1 and _is_text(simplify_type(schema.field(column).type))


def _is_binary(kind: pa.DataType) -> bool:
    """Return True for types of bytes."""
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))


def _is_small(kind: pa.DataType) -> bool:
    """Return True for types that are carried: text, numbers, booleans and times."""
    kind = simplify_type(kind)
    return bool(pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or _is_text(kind))


def _is_text(kind: pa.DataType) -> bool:
    """Return True for types of text, except views."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
