"""Rows to shards, all or nothing.

A write call turns the videos it received into one token shard and returns their records; the driver, which holds the
cache's lock, commits those records as a videos shard. Nothing is kept between calls, and a retried call overwrites its
own file.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.cache.live_rows import TOKENS, VIDEOS, shard_name
from pipeline.cache.schema import (
    MADE_WITH,
    VIDEO_SCHEMA,
    digest,
    footer_of,
    tier_row_counts,
    token_schema,
    write_parquet,
)
from pipeline.rows import WRITTEN, Record, payload, records
from pipeline.storage.stores import LocalStore, Store


def write_token_shard(batch: pa.Table, *, store: Store, run_id: str) -> pa.Table:
    """Write the tokens of the batch's good videos as one shard of ``store``; return every video's record.

    Where the shard cannot be written, the only row is {"write_error": why}: that ends the run, it is no video's fault,
    and Ray would bury an exception in texts of its own.
    """
    started = time.perf_counter()
    rows = records(batch)
    good = [i for i, record in enumerate(rows) if record["status"] == "ok"]
    try:
        if good:
            _write(batch, [rows[i] for i in good], good, store, run_id)
    except OSError as error:
        rows, good = [{"write_error": f"{type(error).__name__}: {error}"}], []
    seconds = (time.perf_counter() - started) / max(len(good), 1)
    for i in good:
        rows[i]["write_s"] = seconds
    return pa.table([pa.array([json.dumps(r) for r in rows], pa.string())], schema=WRITTEN)


def commit(store: Store, run_id: str, number: int, rows: Sequence[Record], *, made_with: str | None = None) -> pa.Table:
    """Make the records visible: one videos shard, in one atomic step. Returns them as VIDEO_SCHEMA.

    ``made_with`` is the fingerprint of the cache's identity; it goes into the file's metadata, under MADE_WITH.

    Raises OSError where their tokens are not here: a node without the shared folder wrote them to a disk of its own.
    """
    for name in sorted({row["token_shard"] for row in rows if row["status"] == "ok"}):
        if isinstance(store, LocalStore) and not store.exists(name):
            raise FileNotFoundError(
                errno.ENOENT, f"written by a node, but not to this --out {store}, which must be shared by all", name
            )
    table = pa.Table.from_pylist([{"run_id": run_id, **row} for row in rows], schema=VIDEO_SCHEMA)
    data = write_parquet(table if made_with is None else table.replace_schema_metadata({MADE_WITH: made_with}))
    store.put(shard_name(VIDEOS, run_id, number, data), data)
    return table


def _write(batch: pa.Table, rows: list[Record], places: list[int], store: Store, run_id: str) -> None:
    """Serialise the videos at ``places`` of the batch into one shard and note in ``rows`` where each one is."""
    first = payload(batch, "tokens", places[0], np.uint8)
    assert first is not None
    levels = len(_deepstack(batch, places[0], len(first)))
    schema = token_schema(rows[0]["hidden_size"], levels, rows[0].get("evidence", {}))
    tables: list[pa.Table] = []
    groups: list[int] = []
    for record, place in zip(rows, places, strict=True):
        tables.append(_token_rows(batch, place, record, schema))
        counts = tier_row_counts(
            record["n_total"], record["n_tokens"], record["retention_ratio"], nested=record["nested"]
        )
        record |= {"first_row_group": len(groups), "row_counts": counts}
        groups += counts
    data = write_parquet(pa.concat_tables(tables), groups)
    ids = digest(*(record["video_id"].encode() + b"\0" for record in rows)).partition(":")[2]
    name = f"{TOKENS}/{run_id}-{ids}.parquet"
    store.put(name, data)
    footer = digest(footer_of(memoryview(data)))
    for record in rows:
        record |= {"token_shard": name, "footer_hash": footer}


def _token_rows(batch: pa.Table, place: int, record: Record, schema: pa.Schema) -> pa.Table:
    """One video as token rows; the vectors are wrapped, not copied."""
    tokens = payload(batch, "tokens", place, np.uint8)
    index = payload(batch, "index", place, np.int32)
    assert tokens is not None and index is not None
    levels = {f"deepstack_{i}": data for i, data in enumerate(_deepstack(batch, place, len(tokens)))}
    n = len(index)
    evidence = _evidence(batch, place, n, record.pop("evidence", {}))
    # Its meaning in the schema names no evidence: caches without any keep their bytes.
    record["checksum"] = digest(tokens, *levels.values(), *evidence.values())

    def vectors(name: str, data: np.ndarray) -> pa.Array:
        return pa.FixedSizeBinaryArray.from_buffers(schema.field(name).type, n, [None, pa.py_buffer(data)])

    columns: dict[str, Any] = {
        "video_id": pa.repeat(record["video_id"], n).cast(pa.string()),
        "rank": _or_null(payload(batch, "rank", place, np.int32), pa.int32(), n),
        "index": pa.array(index),
        "frame": pa.array(index // record["tokens_per_frame"]),
        "token": vectors("token", tokens),
        "merged": _or_null(payload(batch, "merged", place, np.bool_), pa.bool_(), n),
        "density": _or_null(payload(batch, "density", place, np.float32), pa.float32(), n),
        **{name: vectors(name, data) for name, data in (levels | evidence).items()},
    }
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _deepstack(batch: pa.Table, place: int, n_bytes: int) -> list[np.ndarray]:
    """The bytes of each deepstack level of a video whose tokens have ``n_bytes``."""
    data = payload(batch, "deepstack", place, np.uint8)
    return [] if data is None else [data[start : start + n_bytes] for start in range(0, len(data), n_bytes)]


def _evidence(batch: pa.Table, place: int, n: int, widths: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The bytes of each evidence of a video with ``n`` tokens, name -> numbers a token saying how they lie."""
    data = payload(batch, "evidence", place, np.uint8)
    ends = np.cumsum([2 * n * width for width in widths.values()]).tolist()
    assert (0 if data is None else len(data)) == (ends[-1] if ends else 0)
    return {} if data is None else dict(zip(widths, np.split(data, ends[:-1]), strict=True))


def _or_null(values: np.ndarray | None, kind: pa.DataType, n: int) -> pa.Array:
    return pa.nulls(n, kind) if values is None else pa.array(values, kind)
