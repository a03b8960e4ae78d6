"""Copy vectors from the pages of a token shard into the result array, without Arrow's intermediate copies."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

_HEADER = 256  # bytes that are enough for the header of a page of vectors; those written here take about 32
_VARINT = 10  # maximum bytes of a varint
_MAX_DEPTH = 4  # nested structs; a page header has three
# Kinds of values in Thrift's compact protocol, and the fields of Parquet's PageHeader and DataPageHeader.
_TRUE, _FALSE, _INTS, _BINARY, _STRUCT = 1, 2, (4, 5, 6), 8, 12
_KIND, _SIZE, _STORED_SIZE, _CRC, _DATA_PAGE, _DATA_PAGE_2 = 1, 2, 3, 4, 5, 8
_ROWS, _ENCODING, _ENCODING_2 = 1, 2, 4
_IS_DATA_PAGE, _IS_PLAIN = 0, 0


class PageSize(NamedTuple):
    """The sizes that the header of a Parquet page states, unchecked.

    Attributes:
        n_bytes: the uncompressed size.
        n_values: the number of values, including nulls and empty lists; 0 for a dictionary page.
        is_plain: True if the values are stored one after the other, so that they take at most ``n_bytes``.
    """

    n_bytes: int
    n_values: int
    is_plain: bool


def find_plain_columns(metadata: pq.FileMetaData) -> dict[str, tuple[int, int]]:
    """Map the name of each fixed-size binary column that is not nullable to (its number, the bytes of a vector).

    Columns whose vectors have an odd number of bytes are left out, since ``copy_vectors_to_rows`` writes int16.
    """
    columns = ((i, metadata.schema.column(i)) for i in range(metadata.num_columns))
    return {
        column.name: (i, column.length)
        for i, column in columns
        if column.physical_type == "FIXED_LEN_BYTE_ARRAY"
        and column.max_definition_level == 0
        and column.length % 2 == 0
    }


def get_plain_page_range(group: pq.RowGroupMetaData, number: int) -> tuple[int, int] | None:
    """Return the byte range [start, end) of a column chunk's pages, or None if it is compressed or has a dictionary."""
    column = group.column(number)
    if column.compression != "UNCOMPRESSED" or column.has_dictionary_page:
        return None
    start = column.data_page_offset
    return start, start + column.total_compressed_size


def copy_vectors_to_rows(data: memoryview, n_rows: int, targets: NDArray[np.int64], out: NDArray[np.int16]) -> bool:
    """Copy the first ``len(targets)`` vectors of a column chunk into the given rows of ``out``; return True on success.

    If it returns False, the content of ``out`` is undefined and the caller must read the column with Arrow: a page
    fails its checksum, has no checksum, is cut short or is not a PLAIN page, or the rows of the pages do not add up.

    Args:
        data: the pages of the column chunk, from their first header on.
        n_rows: the number of rows in the chunk.
        targets: [n] the row of ``out`` for each of the first n vectors; pages after these vectors are not read.
        out: [K, width / 2] int16 with the width of a vector in bytes; modified in place.
    """
    at = n_done = 0
    while n_done < n_rows:
        header, n_header = read_page_header(data[at : at + _HEADER])
        rows = header.get((_DATA_PAGE, _ROWS), 0)
        size = header.get((_SIZE,), 0)
        kind = header.get((_KIND,))
        encoding = header.get((_DATA_PAGE, _ENCODING))
        page = data[at + n_header : at + n_header + size]
        plain = (kind, encoding) == (_IS_DATA_PAGE, _IS_PLAIN) and size == header.get((_STORED_SIZE,))
        fits = 0 < rows <= n_rows - n_done and size == rows * out.shape[1] * out.itemsize == len(page)
        if not (plain and fits and (_CRC,) in header) or zlib.crc32(page) != header[_CRC,] & 0xFFFFFFFF:
            return False
        part = targets[n_done : n_done + rows]
        out[part] = np.frombuffer(page, out.dtype).reshape(rows, out.shape[1])[: len(part)]
        at, n_done = at + n_header + size, n_done + rows
        if n_done >= len(targets):
            return True
    return False


def iter_page_sizes(data: memoryview) -> Iterator[PageSize]:
    """Yield a PageSize per page of a column chunk from its header (uncompressed size, number of values, plain or not).

    Raises:
        ValueError: a header cannot be parsed, or states no packed or unpacked size.
    """
    at = 0
    while at < len(data):
        header, n_header = read_page_header(data[at:])
        n_bytes = header.get((_SIZE,), -1)
        n_stored = header.get((_STORED_SIZE,), -1)
        if n_bytes < 0 or n_stored < 0:
            raise ValueError("a page header cannot be parsed or does not state the size")
        n_values = header.get((_DATA_PAGE, _ROWS), header.get((_DATA_PAGE_2, _ROWS), 0))
        encoding = header.get((_DATA_PAGE, _ENCODING), header.get((_DATA_PAGE_2, _ENCODING_2)))
        yield PageSize(n_bytes, n_values, encoding == _IS_PLAIN)
        at += n_header + n_stored


def read_page_header(data: memoryview) -> tuple[dict[tuple[int, ...], int], int]:
    """Parse the Thrift header at the beginning of ``data``.

    Returns:
        (its integer fields by their path of field numbers, the length of the header in bytes), or ({}, 0) if ``data``
        does not begin with a complete header of the expected form.
    """
    numbers: dict[tuple[int, ...], int] = {}
    try:
        return numbers, _parse_struct(data.cast("B"), 0, (), numbers)  # Arrow gives views of signed bytes
    except (IndexError, ValueError):
        return {}, 0


def _parse_struct(data: memoryview, at: int, path: tuple[int, ...], numbers: dict[tuple[int, ...], int]) -> int:
    """Read the struct of Thrift's compact protocol at offset ``at``, and return the offset after it.

    The integer fields are added to ``numbers``, with ``path`` as the prefix of their keys. Texts and booleans are
    skipped.

    Raises:
        ValueError: a list, another unexpected type or form of a field, or too many nested structs.
        IndexError: the data ends within the struct.
    """
    if len(path) > _MAX_DEPTH:
        raise ValueError("structs inside structs, which no header has")
    field = 0
    while (head := data[at]) != 0:
        field, kind, at = field + (head >> 4), head & 15, at + 1
        if head < 16:
            raise ValueError("a field whose number does not follow from the one before")
        if kind in _INTS:
            zigzag, at = _decode_varint(data, at)
            numbers[*path, field] = (zigzag >> 1) ^ -(zigzag & 1)
        elif kind == _BINARY:
            n_bytes, at = _decode_varint(data, at)
            at += n_bytes
        elif kind == _STRUCT:
            at = _parse_struct(data, at, (*path, field), numbers)
        elif kind not in (_TRUE, _FALSE):
            raise ValueError(f"a field of kind {kind}")
    return at + 1


def _decode_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Decode the unsigned varint at offset ``at``; return (its value, the offset after it)."""
    value = 0
    for i in range(_VARINT):
        byte = data[at + i]
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, at + i + 1
    raise ValueError("a number without an end")
