"""Vectors from their pages: placed bit for bit, and anything unusual is left to Arrow."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cache.pages import copy_vectors_to_rows, find_plain_columns, get_plain_page_range
from pipeline.cache.schema import write_parquet

N, WIDTH = 3000, 6  # Arrow ends a page where 1,024 rows have gone into it, and it has enough
BITS = np.random.default_rng(0).integers(-(2**15), 2**15, (N, WIDTH // 2), np.int16)


def table(nullable: bool = False) -> pa.Table:
    kind = pa.binary(WIDTH)
    column = pa.FixedSizeBinaryArray.from_buffers(kind, N, [None, pa.py_buffer(BITS)])
    field = pa.field("token", kind, nullable=nullable)
    return pa.table({"n": pa.array(range(N)), "token": column}, schema=pa.schema([pa.field("n", pa.int64()), field]))


def put(data: bytes, places: np.ndarray, rows: int) -> np.ndarray | None:
    """What ``copy_vectors_to_rows`` makes of the column in the file's only row group."""
    metadata = pq.read_metadata(io.BytesIO(data))
    number, width = find_plain_columns(metadata)["token"]
    pages = get_plain_page_range(metadata.row_group(0), number)
    if pages is None:
        return None
    out = np.zeros((rows, width // 2), np.int16)
    n_rows = metadata.row_group(0).num_rows
    return out if copy_vectors_to_rows(memoryview(data)[slice(*pages)], n_rows, places, out) else None


def written(**more) -> bytes:
    file = io.BytesIO()
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": True, "write_statistics": False}
    pq.write_table(table(more.pop("nullable", False)), file, **options | more)
    return file.getvalue()


PAGES = {
    "as-written-here": write_parquet(table()).to_pybytes(),
    "several": written(data_page_size=100),
    "with-statistics": written(write_statistics=True),
}


@pytest.mark.parametrize("data", PAGES.values(), ids=PAGES)
def test_rows_go_to_their_places(data):
    order = np.random.default_rng(1).permutation(N)
    places = np.argsort(order)
    assert np.array_equal(put(data, places, N), BITS[order])
    assert np.array_equal(put(data, np.arange(1500)[::-1], 1500), BITS[:1500][::-1])  # the first ones of more


@pytest.mark.parametrize(
    "more",
    [
        {"compression": "zstd"},
        {"use_dictionary": True},
        {"write_page_checksum": False},
        {"data_page_version": "2.0"},
        {"column_encoding": {"token": "BYTE_STREAM_SPLIT", "n": "PLAIN"}},
    ],
    ids=str,
)
def test_other_pages_are_left_to_arrow(more):
    assert put(written(**more), np.arange(N), N) is None


def test_a_column_that_may_have_nulls_is_none_of_these():
    assert find_plain_columns(pq.read_metadata(io.BytesIO(written(nullable=True)))) == {}


def test_no_flipped_bit_of_header_or_page_goes_unseen():
    data = bytearray(written())
    column = pq.read_metadata(io.BytesIO(bytes(data))).row_group(0).column(1)
    start, end = column.data_page_offset, column.data_page_offset + column.total_compressed_size
    whole, refused = np.arange(N), 0
    assert copy_vectors_to_rows(memoryview(bytes(data))[start:end], N, whole, np.zeros_like(BITS))
    for bit in [*range(8 * start, 8 * (start + 40)), *range(8 * (start + 40), 8 * end, 997)]:
        data[bit // 8] ^= 1 << bit % 8
        pages, out = memoryview(data)[start:end], np.zeros_like(BITS)
        done = copy_vectors_to_rows(pages, N, whole, out)
        assert not done or np.array_equal(out, BITS), bit
        refused += not done
        data[bit // 8] ^= 1 << bit % 8
    assert refused > 250
    for cut in (0, 1, 30, end - start - 1):
        assert not copy_vectors_to_rows(memoryview(data)[start : start + cut], N, whole, np.zeros_like(BITS))
