"""Vectors from the pages of a token shard straight to their places, without Arrow's copy of them in between.

Arrow copies what it reads into memory of its own, and putting 11 MB of it in another order is one copy more. A column
of vectors as this project writes them (PLAIN, not compressed, without nulls) needs none of Arrow's decoding: behind a
short header a page is the vectors themselves. What is not exactly that is left to Arrow, which also says what is
damaged.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

_HEADER = 256  # bytes in which the header of a page of vectors ends: those written here take some 32
_VARINT = 10  # bytes of the longest number
_MAX_DEPTH = 4  # structs inside structs; a page's header has three
# Kinds of values in Thrift's compact protocol, and the fields of Parquet's PageHeader and DataPageHeader.
_TRUE, _FALSE, _INTS, _BINARY, _STRUCT = 1, 2, (4, 5, 6), 8, 12
_KIND, _SIZE, _STORED_SIZE, _CRC, _DATA_PAGE, _DATA_PAGE_2 = 1, 2, 3, 4, 5, 8
_ROWS, _ENCODING, _ENCODING_2 = 1, 2, 4
_IS_DATA_PAGE, _IS_PLAIN = 0, 0


class PageSize(NamedTuple):
    """The claims of a page's header.

    Attributes:
        n_bytes: the bytes that it unpacks to.
        n_values: its values, nulls and empty lists too; 0 for a page without data.
        is_plain: whether its values are stored one after the other, so that they take no more than ``n_bytes``.
    """

    n_bytes: int
    n_values: int
    is_plain: bool


def plain_columns(metadata: pq.FileMetaData) -> dict[str, tuple[int, int]]:
    """Map the names of vector columns without nulls to (column number, bytes of a vector).

    Vectors of an odd number of bytes are left out. The caller has checked ``metadata``.
    """
    columns = ((i, metadata.schema.column(i)) for i in range(metadata.num_columns))
    return {
        column.name: (i, column.length)
        for i, column in columns
        if column.physical_type == "FIXED_LEN_BYTE_ARRAY"
        and column.max_definition_level == 0
        and column.length % 2 == 0
    }


def plain_pages(group: pq.RowGroupMetaData, number: int) -> tuple[int, int] | None:
    """Return the bytes [start, end) of such a column in a row group; None if it is compressed or has a dictionary."""
    column = group.column(number)
    if column.compression != "UNCOMPRESSED" or column.has_dictionary_page:
        return None
    start = column.data_page_offset
    return start, start + column.total_compressed_size


def put_rows(data: memoryview, n_rows: int, targets: NDArray[np.int64], out: NDArray[np.int16]) -> bool:
    """Put the first vectors of a column into their rows of ``out``; return True on success.

    After False the content of ``out`` is undefined, and Arrow must read the column: a page does not have the checksum
    of its header, is cut short, or is no plain page.

    Args:
        data: the column's pages.
        n_rows: the column's rows.
        targets: row of ``out`` for each of the column's first vectors; later vectors are not read.
        out: [K,D] bits of bfloat16.
    """
    at = n_done = 0
    while n_done < n_rows:
        header, n_header = read_page_header(data[at : at + _HEADER])
        rows, size = header.get((_DATA_PAGE, _ROWS), 0), header.get((_SIZE,), 0)
        kind, encoding = header.get((_KIND,)), header.get((_DATA_PAGE, _ENCODING))
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
    """Yield what the header of each page in a column chunk claims. Raises ValueError for a header of another form."""
    at = 0
    while at < len(data):
        header, n_header = read_page_header(data[at:])
        n_bytes, n_stored = header.get((_SIZE,), -1), header.get((_STORED_SIZE,), -1)
        if n_bytes < 0 or n_stored < 0:
            raise ValueError("a page without a header that says its size")
        n_values = header.get((_DATA_PAGE, _ROWS), header.get((_DATA_PAGE_2, _ROWS), 0))
        encoding = header.get((_DATA_PAGE, _ENCODING), header.get((_DATA_PAGE_2, _ENCODING_2)))
        yield PageSize(n_bytes, n_values, encoding == _IS_PLAIN)
        at += n_header + n_stored


def read_page_header(data: memoryview) -> tuple[dict[tuple[int, ...], int], int]:
    """Parse a page's header: (its numbers by path of fields, its bytes); ({}, 0) where it holds anything else."""
    numbers: dict[tuple[int, ...], int] = {}
    try:
        return numbers, _struct(data.cast("B"), 0, (), numbers)  # Arrow's views are of signed bytes
    except (IndexError, ValueError):
        return {}, 0


def _struct(data: memoryview, at: int, path: tuple[int, ...], numbers: dict[tuple[int, ...], int]) -> int:
    """Read a struct of Thrift's compact protocol into ``numbers``, by path of fields; return the offset behind it.

    Texts, as in statistics, are skipped. Raises ValueError and IndexError.
    """
    if len(path) > _MAX_DEPTH:
        raise ValueError("structs inside structs, which no header has")
    field = 0
    while (head := data[at]) != 0:
        field, kind, at = field + (head >> 4), head & 15, at + 1
        if head < 16:
            raise ValueError("a field whose number does not follow from the one before")
        if kind in _INTS:
            zigzag, at = _varint(data, at)
            numbers[*path, field] = (zigzag >> 1) ^ -(zigzag & 1)
        elif kind == _BINARY:
            n_bytes, at = _varint(data, at)
            at += n_bytes
        elif kind == _STRUCT:
            at = _struct(data, at, (*path, field), numbers)
        elif kind not in (_TRUE, _FALSE):
            raise ValueError(f"a field of kind {kind}")
    return at + 1


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Decode a varint: (value, where it ends). Raises ValueError, IndexError."""
    value = 0
    for i in range(_VARINT):
        byte = data[at + i]
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, at + i + 1
    raise ValueError("a number without an end")
