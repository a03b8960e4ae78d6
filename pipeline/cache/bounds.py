"""Limit the memory that the files of a cache may take, before Arrow decompresses them.

A Parquet file of some kilobytes can claim gigabytes: by zstd, by a dictionary, or by a run of one list value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.cache.pages import iter_page_sizes
from pipeline.cache.schema import READ_THREADS, open_parquet
from pipeline.rows import VideoRow

_MIN_LIMIT: Final = 2**26  # bytes that every file may unpack to
_BYTES_PER_STORED_BYTE: Final = 256  # in addition; real rows have hashes, so they compress thirtyfold at most
_LEVEL_BYTES: Final = 4  # per value, for Arrow's definition and repetition levels
_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
_RATIOS: Final = {"UNCOMPRESSED": 1, "ZSTD": 2**15}  # a zstd block of 4 bytes unpacks to 128 KiB at most
_MAX_HIDDEN_SIZE: Final = 2**24
# Columns that are needed to read and check the tokens of an ok video.
_NEEDED_COLUMNS = (
    *("token_shard", "first_row_group", "row_counts", "footer_hash", "checksum", "retention_ratio", "nested"),
    *("n_tokens", "n_total", "n_frames", "tokens_per_frame", "hidden_size"),
    *("frame_indices", "timestamps", "kept_per_frame"),
)
_LISTS = ("row_counts", "frame_indices", "timestamps", "kept_per_frame")

View = Callable[[int, int], memoryview]


def check_unpacked(
    metadata: pq.FileMetaData, groups: Iterable[int], numbers: Sequence[int], view: View, n_bytes: int
) -> None:
    """Raise ValueError if columns of row groups would unpack to more than 64 MiB plus 256 times ``n_bytes``.

    The headers of pages are read only for texts, lists and compressions other than zstd; if the sum is then too large,
    for all compressed columns too.

    Args:
        groups: the row groups that are to be read; empty ones are skipped.
        numbers: the Parquet columns that are to be read, from ``find_leaves``.
        view: returns the bytes [start, end) of the file.

    Raises:
        ValueError: also for a page header that cannot be parsed, and for negative sizes in the footer.
    """
    limit = _MIN_LIMIT + _BYTES_PER_STORED_BYTE * n_bytes
    chunks = [
        (group.column(number), metadata.schema.column(number))
        for group in map(metadata.row_group, groups)
        if group.num_rows  # Arrow reads nothing of an empty row group
        for number in numbers
    ]
    for estimate in (
        _estimate_unpacked_sizes,
        _measure_unpacked_sizes,
    ):  # page headers are read only if the footer does not suffice
        total = largest = 0
        for chunk, schema in chunks:
            stays, passes = estimate(chunk, schema, view)
            total, largest = total + stays, max(largest, passes)
        if total + largest <= limit:
            return
    raise ValueError(f"it unpacks to {total + largest:,} bytes, too many for a file of {n_bytes:,} bytes")


def find_leaves(metadata: pq.FileMetaData, names: Collection[str]) -> list[int]:
    """Return the numbers of the Parquet columns of the top-level columns ``names``, ascending; ignore missing ones."""
    paths = (metadata.schema.column(number).path for number in range(metadata.num_columns))
    return [number for number, path in enumerate(paths) if path.partition(".")[0] in names]


def read_bounded(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a whole Parquet file from memory, verifying page checksums, after ``check_unpacked`` has limited its size.

    Args:
        columns: the columns to read; those that the file lacks are left out. None reads all columns.

    Raises:
        ValueError: it would unpack to too many bytes, or its sizes cannot be read.
        ArrowException, OSError: it is not a Parquet file or is damaged.
    """
    file = open_parquet(pa.BufferReader(data))
    metadata = file.metadata  # each access builds it again
    own_names = file.schema_arrow.names
    names = own_names if columns is None else [name for name in columns if name in own_names]
    is_flat = metadata.num_columns == len(own_names)  # then each column has one Parquet column
    numbers = [own_names.index(name) for name in names] if is_flat else find_leaves(metadata, names)
    whole = memoryview(data)
    check_unpacked(metadata, range(metadata.num_row_groups), numbers, lambda start, end: whole[start:end], len(data))
    return file.read(columns=names, use_threads=READ_THREADS)


def iter_row_count_faults(row: VideoRow) -> Iterator[str]:
    """Yield a message for each count or list of an ok row that is missing, out of range or contradicts another.

    If it yields none, the counts are bounded by the lengths of lists that are already in memory, so that readers can
    allocate arrays by them. Nulls in needed columns or lists, and an ``n_total`` that is not ``n_frames`` x
    ``tokens_per_frame``, end the check early. Otherwise it also checks, for example, that row groups hold ``n_tokens``
    rows and that the hidden size is at most 2^24.
    """
    if lacking := [name for name, value in row.items() if name in _NEEDED_COLUMNS and value is None]:
        yield f"an ok video without {', '.join(lacking)}"
        return
    if nulls := [name for name in _LISTS if None in row[name]]:  # type: ignore[literal-required]
        yield f"nulls in {', '.join(nulls)}"
        return
    n_tokens, n_total, n_frames = row["n_tokens"], row["n_total"], row["n_frames"]
    if n_total < 1 or n_frames < 1 or n_total != n_frames * row["tokens_per_frame"]:
        yield f"n_total is {n_total}, not {n_frames} x {row['tokens_per_frame']}"
        return
    if not 1 <= n_tokens <= n_total:
        yield f"n_tokens is {n_tokens} of {n_total}"
    if min(row["row_counts"], default=0) < 1 or sum(row["row_counts"]) != n_tokens:
        yield f"its row groups of {row['row_counts']} rows do not hold {n_tokens} tokens"
    if row["first_row_group"] < 0:
        yield f"its first row group is {row['first_row_group']}"
    if not 1 <= row["hidden_size"] <= _MAX_HIDDEN_SIZE:
        yield f"its tokens have {row['hidden_size']} numbers"
    yield from _iter_list_faults(row)


def _iter_list_faults(row: VideoRow) -> Iterator[str]:
    """Yield a message for each list whose length or sum contradicts ``n_tokens``, ``n_frames`` or another list.

    The lists are kept_per_frame, temporal_density (if not null), frame_indices and timestamps; the last two must not be
    empty.
    """
    n_tokens, n_frames = row["n_tokens"], row["n_frames"]
    if len(row["kept_per_frame"]) != n_frames or sum(row["kept_per_frame"]) != n_tokens:
        yield f"kept_per_frame does not sum to {n_tokens} tokens in {n_frames} frames"
    if row["temporal_density"] is not None and len(row["temporal_density"]) != n_frames:
        yield f"{len(row['temporal_density'])} temporal densities of {n_frames} frames"
    n_sampled = len(row["frame_indices"])
    n_seconds = len(row["timestamps"])
    if n_sampled != n_seconds or not n_sampled:
        yield f"{n_sampled} frame_indices and {n_seconds} timestamps"
    elif (
        math.ceil(n_sampled / math.ceil(n_sampled / n_frames)) != n_frames
    ):  # on Qwen two per step, perhaps one in the last
        yield f"{n_sampled} sampled frames cannot make {n_frames} of the model's"


def find_span(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Return the bytes [start, end) of a column chunk in its file, including its dictionary page."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        start = min(start, chunk.dictionary_page_offset)
    return start, start + chunk.total_compressed_size


def _estimate_unpacked_sizes(chunk: pq.ColumnChunkMetaData, schema: pq.ColumnSchema, view: View) -> tuple[int, int]:
    """Return upper limits on (the bytes of a chunk's values in Arrow, the bytes of its decompressed pages).

    For columns of fixed width without lists that are uncompressed or zstd, only the footer is used: the number of
    values times their width plus 4 bytes, and the stored bytes times the largest possible ratio of the compression (1,
    or 32,768 for zstd). Others are measured with ``_measure_unpacked_sizes``. Arrow holds the pages of one column at a
    time.

    Raises:
        ValueError: the footer has a size below 0, or a page header cannot be parsed.
    """
    width = _WIDTHS.get(schema.physical_type, schema.length)
    ratio = _RATIOS.get(chunk.compression)
    if not width or schema.max_repetition_level or ratio is None:
        return _measure_unpacked_sizes(chunk, schema, view)
    n_values, n_packed = _read_chunk_sizes(chunk)
    return n_values * (width + _LEVEL_BYTES), n_packed * ratio


def _measure_unpacked_sizes(chunk: pq.ColumnChunkMetaData, schema: pq.ColumnSchema, view: View) -> tuple[int, int]:
    """Return the limits of ``_estimate_unpacked_sizes`` by the headers of the chunk's pages, which ``view`` reads.

    For texts the second limit is 0, since the first includes their pages. Uncompressed columns of fixed width without
    lists need no page headers.
    """
    width = _WIDTHS.get(schema.physical_type, schema.length)
    n_values, n_packed = _read_chunk_sizes(chunk)
    if width and not schema.max_repetition_level and chunk.compression == "UNCOMPRESSED":
        return n_values * (width + _LEVEL_BYTES), n_packed
    pages = list(iter_page_sizes(view(*find_span(chunk))))
    n_bytes, n_values = sum(page.n_bytes for page in pages), max(n_values, sum(page.n_values for page in pages))
    if width:
        return n_values * (width + _LEVEL_BYTES), n_bytes
    # Every row may refer to the longest text of a dictionary.
    text = 0 if all(page.is_plain for page in pages) else max(page.n_bytes for page in pages)
    return n_bytes + n_values * (4 + text + _LEVEL_BYTES), 0


def _read_chunk_sizes(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Return (the number of values, the stored bytes) of a chunk from the footer; ValueError if one is below 0."""
    n_values = int(chunk.num_values)
    n_packed = int(chunk.total_compressed_size)
    if min(n_values, n_packed) < 0:
        raise ValueError(f"its footer has a column of {n_values} values in {n_packed} bytes")
    return n_values, n_packed
