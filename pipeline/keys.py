"""Ids and clips as short hashes, so that the driver's memory holds millions of them, and how they are found again."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
ROWS_AT_ONCE = 2**16  # rows that are Python objects at a time


def keys_of(texts: pa.Array | pa.ChunkedArray) -> Keys:
    """Hash each text to 128 bits, [n,2]; of 10^8 texts two collide with a probability of 10^-23."""
    digests = [blake2b(text, digest_size=16).digest() for text in texts.cast(pa.binary()).to_pylist()]
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


def clip_keys(rows: pa.Table | pa.RecordBatch) -> Keys:
    """Hash each row's ``uri``, ``start_s`` and ``end_s`` to 64 bits, [n]."""
    times = np.stack([_seconds(rows[name]) for name in ("start_s", "end_s")], axis=1).tobytes()
    uris = rows["uri"].cast(pa.binary()).to_pylist()
    digests = [blake2b(uri + times[16 * i : 16 * i + 16], digest_size=8).digest() for i, uri in enumerate(uris)]
    return np.frombuffer(b"".join(digests), np.uint64)


def tie_keys(rows: pa.Table) -> Keys:
    """Hash run, token shard and error to 64 bits, [n]: the tie-breaker among rows of one video and attempt."""
    columns = [rows[name].cast(pa.binary()).to_pylist() for name in ("run_id", "token_shard", "error_message")]
    digests = [
        blake2b(b"\0".join(part or b"" for part in row), digest_size=8).digest() for row in zip(*columns, strict=True)
    ]
    return np.frombuffer(b"".join(digests), np.uint64)


def _seconds(column: pa.Array | pa.ChunkedArray) -> NDArray[np.float64]:
    """Convert seconds to float64 with one bit pattern each for null (NaN) and zero."""
    filled = pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy(zero_copy_only=False)
    return np.asarray(filled, np.float64) + 0.0


def find(keys: Keys, high: Keys, low: Keys) -> NDArray[np.int64]:
    """Find each of ``keys`` [m,2] in the sorted keys with halves ``high`` and ``low``: [m] places, -1 if absent."""
    found = np.full(len(keys), -1, np.int64)
    place = np.searchsorted(high, keys[:, 0])
    left = np.arange(len(keys))
    while len(left):  # one pass, unless two keys share their first half
        left = left[place[left] < len(high)]
        left = left[high[place[left]] == keys[left, 0]]
        hit = low[place[left]] == keys[left, 1]
        found[left[hit]] = place[left[hit]]
        left = left[~hit]
        place[left] += 1
    return found


def repeated(texts: pa.ChunkedArray) -> list[str]:
    """List the texts that occur in an earlier row already, in row order."""
    halves = [keys_of(part)[:, 0].copy() for part in parts_of(texts)]
    half = np.concatenate(halves) if halves else np.empty(0, np.uint64)
    order = np.argsort(half, kind="stable")
    alike = half[order[1:]] == half[order[:-1]]
    suspects = np.unique(np.concatenate([order[1:][alike], order[:-1][alike]]))
    seen: set[str] = set()
    again = []
    for text in (texts[place].as_py() for place in suspects.tolist()):
        again += [text] if text in seen else []
        seen.add(text)
    return again


def parts_of(column: pa.ChunkedArray) -> Iterator[pa.Array]:
    """Yield a column in pieces of at most ROWS_AT_ONCE rows, without a copy."""
    for chunk in column.chunks:
        yield from (chunk.slice(start, ROWS_AT_ONCE) for start in range(0, len(chunk), ROWS_AT_ONCE))
