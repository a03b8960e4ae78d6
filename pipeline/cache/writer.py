"""Pruned videos to shards, all or nothing.

The videos of one call become one token shard; a driver then commits their records as a small file of the videos table.
Nothing is kept between calls. A token shard is named by its content: a repeated call that made the same bytes
overwrites its own file, and one that made others (on another kind of GPU) never replaces a committed one. The checksum
of a video's vectors is computed while Arrow serialises the shard.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gstep.evidence import is_per_frame
from pipeline.cache.codecs import BFLOAT16, TokenCodec
from pipeline.cache.schema import (
    TOKENS,
    digest,
    footer_of,
    hex_digest,
    tier_row_counts,
    token_schema,
    write_parquet,
)
from pipeline.cache.table import build_table, small_file
from pipeline.errors import RunFailed
from pipeline.rows import VideoRecord
from pipeline.storage.stores import Store, request_threads

SHARD_BYTES = 256 * 10**6  # of the stored tokens in a shard that is written anew, about
_AT_ONCE = 16  # requests to the store
_HASHERS = 2  # threads: one takes longer to hash a video than Arrow to serialise it
T = TypeVar("T")
Bits = NDArray[np.int16]  # numpy has no bfloat16; the bits are what counts


@dataclass(frozen=True)
class KeptTokens:
    """The tokens of a video as they are stored, in order of selection.

    Attributes:
        tokens: [B,D] bits of bfloat16.
        index: [B] int32, flat position t*N + i before pruning.
        rank: [B] int32, or None for a method without an order.
        merged: [B] bool, or None where the method never merges.
        density: [B] float32, or None for a method without one.
        deepstack: [B,D] bits of bfloat16 of each level.
        evidence: [B,width] bits of bfloat16 by label, [T,width] of evidence of frames.
    """

    tokens: Bits
    index: NDArray[np.int32]
    rank: NDArray[np.int32] | None = None
    merged: NDArray[np.bool_] | None = None
    density: NDArray[np.float32] | None = None
    deepstack: Sequence[Bits] = ()
    evidence: Mapping[str, Bits] = field(default_factory=dict)


@dataclass(frozen=True)
class VideoItem:
    """A video on its way through the stages: its record, and what the last stage made of it, unless it failed.

    Attributes:
        kept: its tokens, once it was encoded.
        frames: [t,h,w,3] uint8 on the way to encoding; the same bytes as a flat array once they were packed.
    """

    record: VideoRecord
    kept: KeptTokens | None = None
    frames: NDArray[np.uint8] | None = None

    def shaped(self) -> NDArray[np.uint8]:
        """Return the frames as [t,h,w,3]. Raise ValueError where they are not as many as the record says."""
        assert self.frames is not None
        return self.frames.reshape(len(self.record["frame_indices"]), self.record["height"], self.record["width"], 3)


def write_token_shard(
    videos: Sequence[VideoItem], *, store: Store, run_id: str, codec: TokenCodec = BFLOAT16
) -> list[VideoRecord]:
    """Write the tokens of the good videos as one shard of ``store``; returns every video's record, in their order.

    ``codec`` is that of the cache's identity.

    Raises OSError where the shard cannot be written.
    """
    started = time.perf_counter()
    rows: list[VideoRecord] = [{**video.record} for video in videos]
    good = [(row, video.kept) for row, video in zip(rows, videos, strict=True) if video.kept is not None]
    if good:
        _write(good, store, run_id, codec)
    seconds = (time.perf_counter() - started) / max(len(good), 1)
    for row, _ in good:
        row["write_s"] = seconds
    return rows


def commit(store: Store, run_id: str, number: int, rows: Sequence[VideoRecord], *, made_with: str) -> pa.Table:
    """Make the records visible: one small file of the videos table, put whole. Returns them as VIDEO_SCHEMA.

    ``made_with`` is the fingerprint of the cache's identity; it goes into the file's metadata, under MADE_WITH.

    Raises OSError where their tokens are not here: a node without the shared folder wrote them to a disk of its own;
    RunFailed where they were removed while this process was stopped.
    """
    needs = sorted({row["token_shard"] for row in rows if row["status"] == "ok"})
    if missing := _find_missing(store, needs):
        raise FileNotFoundError(
            errno.ENOENT,
            f"not in this --out {store}, which must be shared by all nodes: one wrote it elsewhere, or it was "
            "removed meanwhile",
            missing[0],
        )
    table = build_table([{**row, "run_id": run_id} for row in rows])
    name, data = small_file(run_id, number, table, made_with)
    store.put(name, data)
    # A process that was stopped in between finds out here that somebody cleaned up meanwhile.
    if missing := _find_missing(store, needs):
        store.delete(name)
        what = f"{store}: {missing[0]} was removed before its videos were committed"
        raise RunFailed(f"{what}; run the same command again")
    return table


def _find_missing(store: Store, names: Sequence[str]) -> list[str]:
    """Return which of these files the store lacks; a driver with many writers asks for many, which a store delays."""
    if len(names) <= 1:
        return [name for name in names if not store.exists(name)]
    with request_threads(min(_AT_ONCE, len(names))) as pool:
        return [name for name, exists in zip(names, pool.map(store.exists, names), strict=True) if not exists]


def _write(videos: Sequence[tuple[VideoRecord, KeptTokens]], store: Store, run_id: str, codec: TokenCodec) -> None:
    """Serialise the videos into one shard and note in their records where each one is."""
    first, kept = videos[0]
    widths = {name: values.shape[1] for name, values in kept.evidence.items()}
    schema = token_schema(first["hidden_size"], len(kept.deepstack), widths, codec)
    tables: list[pa.Table] = []
    checksums: list[Future[str]] = []
    with ThreadPoolExecutor(_HASHERS) as hashers:  # hashlib lets other threads run
        for record, kept in videos:
            vectors = _encode_vectors(kept, codec)
            # What the checksum means in the schema names no evidence: caches without any keep their bytes.
            checksums.append(hashers.submit(digest, *map(np.ascontiguousarray, vectors.values())))
            tables.append(_build_rows(record, kept, vectors, schema))
            if codec is not BFLOAT16:
                record["token_codec"], record["token_block"] = codec.name, codec.group
            record["row_counts"] = tier_row_counts(
                record["n_total"], record["n_tokens"], record["retention_ratio"], nested=record["nested"]
            )
        put_token_shard(store, run_id, [record for record, _ in videos], tables, checksums)


def put_token_shard(
    store: Store,
    run_id: str,
    records: Sequence[VideoRecord],
    tables: Sequence[pa.Table],
    checksums: Sequence[Future[str]] = (),
) -> None:
    """Write the token rows of videos as one shard, whose name is made of its content, and complete their records.

    Each record gets the shard, its first row group and the hash of the footer, and its checksum where ``checksums`` are
    still computed. Raises OSError.

    Args:
        records: have the rows of each of their row groups, ``row_counts``.
        tables: the rows of each video, in the order of ``records``.
    """
    groups: list[int] = []
    for record in records:
        record["first_row_group"] = len(groups)
        groups += record["row_counts"]
    data = write_parquet(pa.concat_tables(tables), groups)
    for record, checksum in zip(records, checksums, strict=bool(checksums)):
        record["checksum"] = checksum.result()
    ids = hex_digest(*(record["video_id"].encode() + b"\0" for record in records))
    # The first hash names the videos, the second the content, so that no other bytes ever replace these.
    name = f"{TOKENS}/{run_id}-{ids[:16]}-{hex_digest(data)}.parquet"
    store.put(name, data)
    footer = digest(footer_of(memoryview(data)))
    for record in records:
        record["token_shard"], record["footer_hash"] = name, footer


def make_bundles(
    items: Iterable[T], n_bytes: Callable[[T], float], limit: float = SHARD_BYTES, most: float = math.inf
) -> Iterator[list[T]]:
    """Yield items in order, as many at a time as make a shard of about ``limit`` bytes, and at most ``most``."""
    bundle: list[T] = []
    size = 0.0
    for item in items:
        bundle.append(item)
        size += n_bytes(item)
        if size >= limit or len(bundle) >= most:
            yield bundle
            bundle, size = [], 0.0
    if bundle:
        yield bundle


def _encode_vectors(kept: KeptTokens, codec: TokenCodec) -> dict[str, Bits]:
    """Return the columns of vectors by name, as the codec stores them, in the order that the checksum takes them in."""
    levels = {f"deepstack_{level}": values for level, values in enumerate(kept.deepstack)}
    coded = [codec.encode(name, values) for name, values in {"token": kept.tokens, **levels}.items()]
    return {**{name: values for columns in coded for name, values in columns.items()}, **kept.evidence}


def _build_rows(record: VideoRecord, kept: KeptTokens, vectors: Mapping[str, Bits], schema: pa.Schema) -> pa.Table:
    """Build the token rows of one video; the vectors are wrapped, not copied."""
    n = len(kept.index)
    columns: dict[str, pa.Array] = {
        "video_id": pa.repeat(record["video_id"], n).cast(pa.string()),
        "rank": _or_null(kept.rank, pa.int32(), n),
        "index": pa.array(kept.index),
        "frame": pa.array(kept.index // record["tokens_per_frame"]),
        "merged": _or_null(kept.merged, pa.bool_(), n),
        "density": _or_null(kept.density, pa.float32(), n),
    }
    for name, values in vectors.items():
        data = pa.py_buffer(np.ascontiguousarray(values))
        column = pa.FixedSizeBinaryArray.from_buffers(schema.field(name).type, len(values), [None, data])
        columns[name] = _beside_first(column, columns["frame"].to_numpy()) if is_per_frame(name) else column
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _beside_first(frames: pa.Array, frame_of_row: NDArray[np.int32]) -> pa.Array:
    """Place the [T] values of frames beside the first token of each, null beside the others."""
    known, first = np.unique(frame_of_row, return_index=True)
    if not np.array_equal(known, np.arange(len(frames))):
        raise ValueError("evidence of frames is stored with all tokens alone: a frame without a token has no place")
    others = np.ones(len(frame_of_row), dtype=bool)
    others[first] = False
    return frames.take(pa.array(frame_of_row, mask=others))


def _or_null(values: NDArray[np.generic] | None, kind: pa.DataType, n: int) -> pa.Array:
    """Return values as a column; ``n`` nulls for None."""
    return pa.nulls(n, kind) if values is None else pa.array(values, kind)
