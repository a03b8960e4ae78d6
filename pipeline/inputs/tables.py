"""Reading rows that a user wrote (.parquet, .jsonl, .csv, or in memory), with their positions for error messages."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from numbers import Integral, Real
from typing import BinaryIO, SupportsFloat
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import UsageError, make_printable
from pipeline.inputs.arrow_files import RecordBatches
from pipeline.inputs.listings import find_suffix

_Scalar = str | int | float | bool | bytes | date | time | timedelta | Decimal | os.PathLike[str] | None
#: A value in a row that a user wrote: a JSON value, or one of the other types that Parquet and tables in memory have.
UserValue = _Scalar | Sequence["UserValue"] | Mapping[str, "UserValue"]
#: A row of a file that a user wrote, by column.
UserRow = Mapping[str, UserValue]
TABLE_SUFFIXES = frozenset({".parquet", ".jsonl", ".csv"})
_PART_ROWS = 2**16  # rows per batch
_SHOWN = 200  # bytes of a header that a message shows
_MAX_CELL_CHARS = 2**26  # of a cell of a .csv; an unclosed quote makes one cell of the rest of the file
_MAX_WHOLE_FLOAT = 2**53
_MAX_DEPTH = 100  # nested lists and objects; Python fails at a few hundred, or fewer if its stack is full
_TOO_DEEP = f"it has lists or objects that are nested more than {_MAX_DEPTH} deep"
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_null)
_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer)
# Errors of reading a table that are caused by the file.
UNREADABLE = (OSError, UnicodeDecodeError, OverflowError, pa.ArrowException)


class BadRow(ValueError):  # noqa: N818
    """A row or header of a user's file is invalid. The message begins with its position."""


@contextmanager
def convert_row_errors(name: str, content: str, error_class: type[UsageError]) -> Iterator[None]:
    """Raise ``error_class`` for a BadRow, and for rows that cannot be read.

    Args:
        name: the name of the file or table, for the message about rows that cannot be read.
        content: what the rows should be, such as "a manifest", for the same message.
    """
    try:
        yield
    except BadRow as error:
        raise error_class(str(error)) from error
    except UNREADABLE as error:
        raise error_class(f"{name}: cannot be read as {content}: {error}") from error


def read_rows(name: str, file: BinaryIO, needs: str, key: str | None = None) -> Iterator[tuple[str, UserRow]]:
    """Yield the position of each row ("row 0" of a .parquet, "line 1" of other files), and the row as a dict.

    Empty cells of a .csv are left out; null values of other files are kept. A file with any other suffix is read as
    .jsonl, without its blank lines.

    Args:
        needs: what a row must have, for error messages.
        key: a column that the header of a .csv must have.

    Raises:
        BadRow: a line is not a JSON object, a .csv or its header is invalid, or two columns of a table have one name.
        OSError, UnicodeDecodeError, OverflowError, ArrowException: the file cannot be read (UNREADABLE).
    """
    suffix = find_suffix(name)
    if suffix == ".parquet":
        for part in read_row_batches(name, file, needs):
            yield from part
    elif suffix == ".csv":
        yield from _read_csv_rows(name, file, needs, key)
    else:
        for number, line in enumerate(io.TextIOWrapper(file, "utf-8-sig"), 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise BadRow(f"{name}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise BadRow(f"{name}, line {number}: expected an object with {needs}, got {type(row).__name__}")
            yield f"line {number}", row


def read_parquet_types(name: str, file: BinaryIO) -> dict[str, pa.DataType]:
    """Return the column types of a .parquet, and rewind the file; {} for other files."""
    if find_suffix(name) != ".parquet":
        return {}
    schema = pq.read_schema(file)
    file.seek(0)
    return dict(zip(schema.names, schema.types, strict=True))


def simplify_type(kind: pa.DataType) -> pa.DataType:
    """Return a column's type with dictionaries, extension types, and text and binary views replaced by what they hold.

    This is also done within structs and in the items of lists. Maps, fixed-size lists and list views stay as they are,
    with all that they contain.
    """
    if pa.types.is_dictionary(kind):
        return simplify_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return simplify_type(kind.storage_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(simplify_type(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make_list = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make_list(kind.value_field.with_type(simplify_type(kind.value_type)))
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def simplify_column(column: pa.Array) -> pa.Array:
    """Return a column without its extension type or dictionary; nested ones stay."""
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary.cast(simplify_type(column.dictionary.type)).take(column.indices)
    return column


def convert_batch_to_dicts(batch: pa.RecordBatch) -> list[UserRow]:
    """Return the rows of a batch as dicts.

    If Python cannot represent a time, such as a database's infinity, all times of the batch become text.

    Raises:
        OverflowError: the time is in a nested column.
        UnicodeDecodeError: text is not UTF-8.
    """
    try:
        rows: list[UserRow] = batch.to_pylist()
    except OverflowError:
        columns = [column.cast(pa.string()) if pa.types.is_temporal(column.type) else column for column in batch]
        rows = pa.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist()
    return rows


def read_row_batches(
    name: str, file: BinaryIO, needs: str, key: str | None = None, paths: str | None = None
) -> Iterator[TableRows]:
    """Yield the rows of a file, as ``read_rows`` does, in batches of up to 65,536 rows.

    The rows of a .parquet stay in Arrow. With ``paths``, the column of this name, which must exist, serves as ``uri``,
    and as ``video_id`` if the file has none; a file that is not a .parquet is then an Arrow file, which is opened by
    its ``name``.

    Args:
        needs: what a row must have, for error messages.
        key: a column that the header of a .csv must have.

    Raises:
        BadRow: two columns have one name, or a line of a .jsonl or .csv is invalid.
        ManifestError: an Arrow file is in a store.
        OSError, UnicodeDecodeError, OverflowError, ArrowException: the file cannot be read (UNREADABLE).
    """
    if find_suffix(name) == ".parquet":
        with pq.ParquetFile(file) as shard:
            _refuse_repeated_columns(name, shard.schema_arrow.names)
            batches = shard.iter_batches(batch_size=_PART_ROWS, use_threads=False)
            yield from _iter_arrow_batches(
                batches if paths is None else (_rename_path_column(batch, paths) for batch in batches)
            )
    elif paths is not None:
        shard = RecordBatches(name)
        names = shard.schema.names
        _refuse_repeated_columns(name, names)
        batches = (part for piece in range(len(shard.lengths)) for part in shard.read(piece, names, _PART_ROWS))
        yield from _iter_arrow_batches(_rename_path_column(batch, paths) for batch in batches)
    else:
        yield from _iter_dict_batches(read_rows(name, file, needs, key))


def _iter_arrow_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[TableRows]:
    """Yield each batch that has rows as _ArrowRows."""
    start = 0
    for batch in batches:
        if len(batch):
            yield _ArrowRows(batch, start)
        start += len(batch)


def _iter_dict_batches(rows: Iterator[tuple[str, UserRow]]) -> Iterator[TableRows]:
    """Yield rows with their positions, 8,192 at a time."""
    while part := list(islice(rows, _PART_ROWS // 8)):
        yield _DictRows(part)


def _rename_path_column(batch: pa.RecordBatch, paths: str) -> pa.RecordBatch:
    """Return a batch with its column ``paths`` renamed to ``uri``, and copied to ``video_id`` if it has none.

    Another column ``uri`` is dropped.
    """
    columns = {name: batch.column(name) for name in batch.schema.names if name != "uri" or name == paths}
    columns["uri"] = columns.pop(paths)
    return pa.RecordBatch.from_pydict({"video_id": columns["uri"], **columns})


def iter_given_batches(name: str, source: object, needs: str) -> Iterator[TableRows]:
    """Yield batches of the rows that a caller passes: dicts, or a table that Arrow accepts (its own, pandas', Polars').

    Raises:
        BadRow: ``source`` is neither, a row is not a dict, or two columns have one name.
    """
    if hasattr(source, "__arrow_c_stream__"):
        yield from _iter_arrow_batches(convert_given_table(name, source, needs).to_batches(max_chunksize=_PART_ROWS))
    else:
        yield from _iter_dict_batches(iter_given_rows(name, source, needs))


def iter_given_rows(name: str, source: object, needs: str) -> Iterator[tuple[str, UserRow]]:
    """Yield the position ("row 0") and the dict of each row that a caller passes, without its nulls.

    Args:
        source: dicts, or a table that Arrow accepts.
        needs: the columns that a row must have, for error messages.

    Raises:
        BadRow: ``source`` is neither, a row is not a dict, or two columns have one name.
    """
    if hasattr(source, "__arrow_c_stream__"):
        source = [
            row
            for batch in convert_given_table(name, source, needs).to_batches()
            for row in convert_batch_to_dicts(batch)
        ]
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise _make_no_rows_error(name, source, needs)
    for number, row in enumerate(source):
        if not isinstance(row, Mapping):
            raise BadRow(f"{name}, row {number}: expected a dict with {needs}, got {type(row).__name__}")
        yield f"row {number}", {key: value for key, value in row.items() if value is not None}


def convert_given_table(name: str, source: object, needs: str) -> pa.Table:
    """Convert an object of the caller to an Arrow table; ``name`` and ``needs`` (the columns of a row) are for errors.

    Raises:
        BadRow: Arrow cannot convert it, or two columns have one name.
    """
    try:
        table = pa.table(source)
    except (TypeError, pa.ArrowException) as error:  # pa.table refuses a single column, for example
        raise _make_no_rows_error(name, source, needs) from error
    _refuse_repeated_columns(name, table.column_names)
    return table


def _refuse_repeated_columns(name: str, columns: Sequence[str]) -> None:
    """Raise BadRow if two columns have one name, unless that is empty."""
    repeated_names = [column for column, count in Counter(columns).items() if column and count > 1]
    if repeated_names:
        raise BadRow(
            f"{name}: two columns have the name {make_printable(repeated_names[0], _SHOWN)}; rename one of them"
        )


def _make_no_rows_error(name: str, source: object, needs: str) -> BadRow:
    """Return the error for a ``source`` that is neither a list of dicts nor a table."""
    return BadRow(f"{name}: expected a list of dicts or a table with {needs}, got {type(source).__name__}")


class _ArrowRows:
    """The rows of an Arrow batch, as columns or one by one; ``start`` is the number of the first row.

    Iterating yields the position of each row ("row 7") and the row as a dict.
    """

    def __init__(self, batch: pa.RecordBatch, start: int) -> None:
        self._batch = batch
        self._start = start

    def __iter__(self) -> Iterator[tuple[str, UserRow]]:
        return ((f"row {i}", row) for i, row in enumerate(convert_batch_to_dicts(self._batch), self._start))

    def _find_column(self, name: str) -> pa.Array | None:
        """Return a column, or None if there is none, or more than one, of this name."""
        index = self._batch.schema.get_field_index(name)
        return None if index < 0 else self._batch.column(index)

    def texts(self, name: str) -> pa.Array | None:
        """Return a column of text or integers as text; None if it is missing, of another type, or has a null.

        Raises:
            ArrowInvalid: text is not UTF-8.
        """
        column = self._find_column(name)
        if column is None or column.null_count or not any(check(simplify_type(column.type)) for check in _TEXTS):
            return None
        column = simplify_column(column).cast(pa.string())
        if column.null_count:  # the values of a dictionary may include a null
            return None
        column.validate(full=True)  # Parquet readers do not check that text is UTF-8
        return column

    def numbers(self, name: str) -> pa.Array | None:
        """Return a column as float64, all null if it is missing; None if it is not numeric or a value is not finite."""
        column = self._find_column(name)
        if column is None:
            return pa.nulls(len(self._batch), pa.float64())
        if not any(check(column.type) for check in _NUMBERS):
            return None
        column = column.cast(pa.float64(), safe=False)
        return column if pc.all(pc.is_finite(column), min_count=0).as_py() else None

    def carried(self, own_columns: Collection[str]) -> pa.Array:
        """Return the other columns of each row as JSON; null for a row without values there."""
        carried_places = [i for i, name in enumerate(self._batch.schema.names) if name not in own_columns]
        if not carried_places:
            return pa.nulls(len(self._batch), pa.string())
        return _serialize_rows(convert_batch_to_dicts(self._batch.select(carried_places)))


class _DictRows:
    """Rows as dicts with their positions, with the interface of _ArrowRows."""

    def __init__(self, rows: list[tuple[str, UserRow]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[tuple[str, UserRow]]:
        return iter(self._rows)

    def texts(self, name: str) -> pa.Array | None:
        """Return a column as text; None if a row lacks it, or a value is not a str or int, or not valid text."""
        values = [row.get(name) for _, row in self._rows]
        if not all(type(value) is str or type(value) is int for value in values):
            return None
        try:
            return pa.array([str(value) for value in values], pa.string())
        except ValueError:  # a lone surrogate, which is not valid text, or an int with too many digits
            return None

    def numbers(self, name: str) -> pa.Array | None:
        """Return a column as float64, null where it is missing, with text parsed; None if a value is not finite."""
        values = [None if row.get(name) is None else parse_number(row[name]) for _, row in self._rows]
        finite = all(value is None or math.isfinite(value) for value in values)
        return pa.array(values, pa.float64()) if finite else None

    def carried(self, own_columns: Collection[str]) -> pa.Array:
        return _serialize_rows([{name: row[name] for name in row if name not in own_columns} for _, row in self._rows])


#: A batch of rows of a user's file or table.
TableRows = _ArrowRows | _DictRows


def _serialize_rows(rows: list[UserRow]) -> pa.Array:
    """Return each row as JSON without its null cells; null for a row without other cells."""
    values = ({name: value for name, value in row.items() if value is not None} for row in rows)
    return pa.array([serialize_carried(row) if row else None for row in values], pa.string())


def _read_csv_rows(name: str, file: BinaryIO, needs: str, key: str | None) -> Iterator[tuple[str, UserRow]]:
    """Yield ("line n", row) for each row of a .csv, without its empty cells.

    A row that spans several lines has the number of its last line. This raises the cell limit of the csv module in this
    process to 64 Mi characters.

    Raises:
        BadRow: the header lacks ``key`` or repeats a name, a row has more cells than the header, a cell is too long, or
            the .csv is malformed.
    """
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL_CHARS))  # of the whole process; 128 Ki by default
    reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
    try:
        if key is not None and reader.fieldnames and key not in reader.fieldnames:
            column_names = make_printable(", ".join(reader.fieldnames), _SHOWN)
            raise BadRow(
                f"{name}, line 1: a .csv begins with the names of its columns, {needs} among them, not {column_names}"
            )
        _refuse_repeated_columns(f"{name}, line 1", reader.fieldnames or ())
        for row in reader:
            where = f"line {reader.line_num}"
            if None in row:  # dropping extra cells would cut a text at its first comma
                raise BadRow(f"{name}, {where}: more cells than the header names; quote a text that holds commas")
            yield where, {column: text for column, text in row.items() if text != ""}
    except csv.Error as error:
        raise BadRow(f"{name}, line {reader.line_num + 1}: {error}") from error  # the row begins on the next line


def parse_json(text: str) -> UserValue:
    """Parse JSON that a user wrote.

    Raises:
        ValueError: it is not JSON, a number has too many digits, or lists and objects are nested more than 100 deep.
    """
    try:
        value: UserValue = json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    layer = [value]
    for _ in range(_MAX_DEPTH):
        inner = [part.values() if isinstance(part, dict) else part for part in layer if isinstance(part, dict | list)]
        layer = [part for parts in inner for part in parts]
        if not layer:
            return value
    raise ValueError(_TOO_DEEP)


def parse_text_cell(row: UserRow, name: str, where: str) -> str:
    """Return a cell as text: text itself, a whole number (1.0 is "1"), a path, a UUID, or UTF-8 bytes.

    Raises:
        BadRow: the cell is missing or of another type, or has a NUL or invalid Unicode; the message begins with
            ``where``.
    """
    try:
        text = convert_to_text(row.get(name), f"the {name}")
    except ValueError as error:
        raise BadRow(f"{where}: {error}") from error
    if not is_text(text) or "\0" in text:
        raise BadRow(f"{where}: the {name} is not valid text: {text!r}")
    return text


def convert_to_text(value: object, name: str) -> str:
    """Return an id or an address as text: text itself, a whole number (1.0 is "1"), a path, a UUID, or UTF-8 bytes.

    Raises:
        ValueError: the value is of another type, a fraction, bytes that are not UTF-8, or an int of too many digits;
            the message begins with ``name``.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is {value!r}, bytes that are not UTF-8") from error
    # pandas turns whole numbers into floats in a column with gaps. Beyond 2**53, a float has lost digits.
    if isinstance(value, Decimal):
        value = int(value) if value.is_finite() and value == int(value) else value
    elif isinstance(value, Real) and not isinstance(value, Integral):
        number = float(value)
        value = int(number) if number.is_integer() and abs(number) < _MAX_WHOLE_FLOAT else value
    if isinstance(value, bool) or not isinstance(value, str | Integral | UUID):
        raise ValueError(f"{name} is {value!r}, of type {type(value).__name__}: expected text, or a whole number")
    try:
        return str(value)
    except ValueError as error:
        raise ValueError(f"{name} is a number of too many digits") from error


def parse_number(value: UserValue) -> float:
    """Return a number or text as a float, which may be infinite; NaN for other values, including True and False."""
    if isinstance(value, bool) or not isinstance(value, str | bytes | SupportsFloat):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def is_nan(value: UserValue) -> bool:
    """Return True for a NaN, which pandas writes for an empty cell."""
    return isinstance(value, float) and math.isnan(value)


def is_text(name: str) -> bool:
    """Return True for valid Unicode, which has no lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def serialize_carried(columns: UserRow, *, ensure_ascii: bool = True) -> str:
    """Serialize columns that are only carried along as strict JSON.

    NaN and infinity become null, a lone surrogate becomes a question mark, and values of other types become text.
    """
    try:
        text = json.dumps(columns, default=format_value, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:
        strict = json.loads(json.dumps(columns, default=format_value), parse_constant=lambda name: None)
        text = json.dumps(strict, ensure_ascii=ensure_ascii)
    if "\\ud" not in text:  # complete pairs have it too
        return text
    plain = json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace")
    return json.dumps(json.loads(plain), ensure_ascii=ensure_ascii)


def format_value(value: object) -> str:
    """Return a value as text for a message or for JSON; bytes that are not UTF-8 become backslash escapes."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
