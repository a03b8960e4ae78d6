"""Short hashes of ids, clips and files, with which the driver can hold millions of videos in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
ROWS_AT_ONCE = 2**16  # rows that are converted to Python objects at a time
_SAMPLE_BYTES = 2**14  # bytes of each of the three pieces that stand for a file


def hash_texts(texts: pa.Array | pa.ChunkedArray) -> Keys:
    """Hash each text to 128 bits, [n, 2] uint64. The probability of two equal keys is 10^-23 among 10^8 texts."""
    return _hash_texts(texts.cast(pa.binary()).to_pylist(), 16).reshape(-1, 2)


def _hash_texts(texts: Iterable[bytes], n_bytes: int) -> Keys:
    """Hash each text to ``n_bytes`` bytes (a multiple of 8) with BLAKE2b, [n * n_bytes / 8] uint64."""
    return np.frombuffer(b"".join(blake2b(text, digest_size=n_bytes).digest() for text in texts), np.uint64)


def hash_clips(rows: pa.Table | pa.RecordBatch) -> Keys:
    """Hash ``uri``, ``start_s`` and ``end_s`` of each row to 64 bits, [n]. A null time differs from every number."""
    times = np.stack([_convert_seconds(rows[name]) for name in ("start_s", "end_s")], axis=1).tobytes()
    uris = rows["uri"].cast(pa.binary()).to_pylist()
    return _hash_texts((uri + times[16 * i : 16 * i + 16] for i, uri in enumerate(uris)), 8)


def hash_ties(rows: pa.Table) -> Keys:
    """Hash the run, token shard and error message of each row to 64 bits, [n], to order rows of the same attempt."""
    columns = [rows[name].cast(pa.binary()).to_pylist() for name in ("run_id", "token_shard", "error_message")]
    return _hash_texts((b"\0".join(part or b"" for part in row) for row in zip(*columns, strict=True)), 8)


def hash_mark(text: str) -> int | None:
    """Hash a store's or archive's mark of a file, such as an ETag, to 64 bits other than 0; None if it is empty.

    Quotes and the prefix of a weak ETag are ignored.
    """
    text = text.removeprefix("W/").strip('"')
    return _hash_nonzero(text.encode()) if text else None


def list_sample_spans(size: int) -> list[tuple[int, int]]:
    """Return up to three ranges (start, end) of at most 16 KiB, by which files of ``size`` bytes are told apart.

    They lie at the start, middle and end, in ascending order. In a small file they overlap or coincide.
    """
    starts = (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES)
    return [(start, min(start + _SAMPLE_BYTES, size)) for start in sorted({max(0, start) for start in starts})]


def hash_sample(size: int, pieces: Iterable[bytes]) -> int:
    """Hash a file's size and the contents of its ``list_sample_spans`` to 64 bits, never 0."""
    return _hash_nonzero(b"".join([size.to_bytes(8, "big"), *pieces]))


def _hash_nonzero(text: bytes) -> int:
    """Hash a text to 64 bits, never 0, which stands for "not known" in the videos table."""
    return int(_hash_texts([text], 8)[0]) or 1


def _convert_seconds(column: pa.Array | pa.ChunkedArray) -> NDArray[np.float64]:
    """Convert a column of seconds to float64 with equal bits for equal values: null is NaN, and -0.0 becomes 0.0."""
    seconds = pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy(zero_copy_only=False)
    return np.asarray(seconds, np.float64) + 0.0


def find(keys: Keys, high: Keys, low: Keys) -> NDArray[np.int64]:
    """Look up keys in a sorted array of keys.

    Args:
        keys: [m, 2], the keys to look up.
        high: [n], the first halves of the array, ascending.
        low: [n], its second halves.

    Returns:
        [m] int64: the index of each key in the array, or -1 if it is absent.
    """
    rows = np.full(len(keys), -1, np.int64)
    place = np.searchsorted(high, keys[:, 0])
    open_rows = np.arange(len(keys))
    while len(open_rows):  # one pass, unless two keys share their first half
        open_rows = open_rows[place[open_rows] < len(high)]
        open_rows = open_rows[high[place[open_rows]] == keys[open_rows, 0]]
        hit = low[place[open_rows]] == keys[open_rows, 1]
        rows[open_rows[hit]] = place[open_rows[hit]]
        open_rows = open_rows[~hit]
        place[open_rows] += 1
    return rows


def hash_column(texts: pa.ChunkedArray) -> Keys:
    """Hash each text of a chunked column to 128 bits, [n, 2] uint64."""
    return np.concatenate([np.empty((0, 2), np.uint64), *map(hash_texts, iter_column_slices(texts))])


def find_repeated(keys: Keys, is_late: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    """Find the keys that have occurred before, [n] bool. The first of several equal keys is not marked.

    Args:
        keys: [n, 2].
        is_late: [n]; marked keys count as later than all other keys.
    """
    high = keys[:, 0].copy()  # two of 10^8 texts share it with a probability of 3e-4, and may hide a repeat
    # Both sorts are stable: among equal keys the earliest comes first.
    order = np.argsort(high, kind="stable") if is_late is None else np.lexsort((is_late, high))
    is_repeated = np.zeros(len(keys), np.bool_)
    is_repeated[order[1:]] = (keys[order[1:]] == keys[order[:-1]]).all(axis=1)
    return is_repeated


def iter_column_slices(column: pa.ChunkedArray) -> Iterator[pa.Array]:
    """Yield a column in zero-copy slices of at most ``ROWS_AT_ONCE`` rows."""
    for chunk in column.chunks:
        yield from (chunk.slice(start, ROWS_AT_ONCE) for start in range(0, len(chunk), ROWS_AT_ONCE))
