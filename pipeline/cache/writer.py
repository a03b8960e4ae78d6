"""Write the tokens of pruned videos to token shards, and commit their records to the videos table, all or nothing.

A token shard is named by its content, so that a retry never replaces a committed shard by other bytes.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gstep.evidence import is_frame_evidence
from pipeline.cache.codecs import BFLOAT16, TokenCodec
from pipeline.cache.live import select_ok, sort_by_shard
from pipeline.cache.schema import (
    TOKENS,
    VIDEO_SCHEMA,
    build_token_schema,
    compute_tier_row_counts,
    hash_bytes,
    hash_bytes_to_hex,
    slice_footer,
    write_parquet,
)
from pipeline.cache.table import VideosTable, add_keys, serialize_small
from pipeline.cache.token_shard import read_videos
from pipeline.errors import RunFailed
from pipeline.rows import VideoRecord, VideoRow
from pipeline.storage.stores import Store, request_threads

if TYPE_CHECKING:  # a driver commits records without torch
    from torch import Tensor

    from gstep.types import PrunedTokens
    from pipeline.cache.cached_video import CachedVideo

SHARD_BYTES = 256 * 10**6  # approximate bytes of tokens in a rewritten shard
_MAX_REQUESTS = 16  # requests to the store
_HASHERS = 2  # threads that hash: hashing a video takes longer than serializing it
T = TypeVar("T")
Bits = NDArray[np.int16]  # bits of bfloat16, which numpy lacks


@dataclass(frozen=True)
class KeptTokens:
    """The kept tokens of a video as arrays with the types of a token shard, to be stored in order of selection.

    Attributes:
        tokens: [B, D] bits of bfloat16.
        index: [B] int32, the flat position t*N + i before pruning.
        rank: [B] int32; None for methods without an order.
        merged: [B] bool; None for methods that never merge.
        density: [B] float32; None for methods without one.
        deepstack: [B, D] bits of bfloat16 per level.
        evidence: label -> bits of bfloat16, [B, width] per token or [T, width] per frame.
    """

    tokens: Bits
    index: NDArray[np.int32]
    rank: NDArray[np.int32] | None = None
    merged: NDArray[np.bool_] | None = None
    density: NDArray[np.float32] | None = None
    deepstack: Sequence[Bits] = ()
    evidence: Mapping[str, Bits] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        video: PrunedTokens | CachedVideo,
        deepstack: Iterable[Tensor],
        evidence: Mapping[str, Tensor],
        order: Tensor | slice = slice(None),
    ) -> Self:
        """Convert tensors on any device to arrays in the memory of this process.

        CPU tensors that already have the type and order of the result are not copied: the arrays share their memory.

        Args:
            video: the kept tokens of a method or of a cached video.
            deepstack: [B, D] per level, already in the order of the result.
            evidence: label -> [B, ...] in the order of the result, or [T, ...] per frame.
            order: [B] the row of ``video`` for each row of the result; by default the order of ``video`` stays.
        """
        import torch  # noqa: PLC0415 - a driver commits records without torch

        def to_array(values: Tensor | None, dtype: torch.dtype) -> Any:
            return None if values is None else values[order].to(dtype).cpu().numpy()

        def to_bits(values: Tensor) -> Bits:
            width = math.prod(values.shape[1:])  # torch cannot infer the width of a tensor without rows
            bits = values.reshape(len(values), width).to(torch.bfloat16).contiguous().view(torch.int16)
            return np.asarray(bits.cpu().numpy())

        return cls(
            tokens=to_bits(video.tokens[order]),
            index=to_array(video.index, torch.int32),
            rank=to_array(video.rank, torch.int32),
            merged=to_array(video.merged, torch.bool),
            density=to_array(video.density, torch.float32),
            deepstack=[to_bits(level) for level in deepstack],
            evidence={name: to_bits(values) for name, values in evidence.items()},
        )


@dataclass(frozen=True)
class VideoItem:
    """A video on its way between two stages of a run.

    Attributes:
        record: the video's record, so far.
        kept: the kept tokens, after encoding; None before, and if the video failed.
        frames: [t, h, w, 3] uint8, before encoding; the same bytes as a flat array after ``unpack``.
    """

    record: VideoRecord
    kept: KeptTokens | None = None
    frames: NDArray[np.uint8] | None = None

    def reshape_frames(self) -> NDArray[np.uint8]:
        """Return the frames as [t, h, w, 3]; raise ValueError if their number contradicts the record."""
        assert self.frames is not None
        return self.frames.reshape(len(self.record["frame_indices"]), self.record["height"], self.record["width"], 3)


def write_token_shard(
    videos: Sequence[VideoItem], *, store: Store, run_id: str, codec: TokenCodec = BFLOAT16
) -> list[VideoRecord]:
    """Write the tokens of all videos that have tokens as one shard; return a copy of every video's record, in order.

    The copies of these videos get ``row_counts``, ``first_row_group``, ``checksum``, ``token_shard``, ``footer_hash``,
    an equal share of the wall time as ``write_s``, and, unless the codec is bfloat16, ``token_codec`` and
    ``token_block``. No shard is written if no video has tokens.

    Raises:
        ValueError: the codec cannot store a token, or evidence of a frame has no token beside it.
    """
    start = time.perf_counter()
    rows: list[VideoRecord] = [{**video.record} for video in videos]
    ok_videos = [(row, video.kept) for row, video in zip(rows, videos, strict=True) if video.kept is not None]
    if not ok_videos:
        return rows
    first, tokens = ok_videos[0]
    widths = {name: values.shape[1] for name, values in tokens.evidence.items()}
    schema = build_token_schema(first["hidden_size"], len(tokens.deepstack), widths, codec)
    tables: list[pa.Table] = []
    checksums: list[Future[str]] = []
    with ThreadPoolExecutor(_HASHERS) as hashers:  # hashlib releases the GIL
        for row, tokens in ok_videos:
            levels = {f"deepstack_{level}": values for level, values in enumerate(tokens.deepstack)}
            vectors = dict[str, Bits]()  # in the order of the checksum
            for name, values in {"token": tokens.tokens, **levels}.items():
                vectors |= codec.encode(name, values)
            vectors |= tokens.evidence
            # The checksum covers evidence too. Its stored description does not say so, to keep the bytes of old caches.
            checksums.append(hashers.submit(hash_bytes, *map(np.ascontiguousarray, vectors.values())))
            tables.append(_build_rows(row, tokens, vectors, schema))
            if codec is not BFLOAT16:
                row["token_codec"] = codec.name
                row["token_block"] = codec.group
            row["row_counts"] = compute_tier_row_counts(
                row["n_total"], row["n_tokens"], row["retention_ratio"], nested=row["nested"]
            )
        put_token_shard(store, run_id, [row for row, _ in ok_videos], tables, checksums)
    seconds = (time.perf_counter() - start) / len(ok_videos)
    for row, _ in ok_videos:
        row["write_s"] = seconds
    return rows


def commit_records(store: Store, run_id: str, number: int, records: Sequence[VideoRecord], *, made_with: str) -> None:
    """Make records visible in the videos table: write them as one small file, in which ``run_id`` replaces theirs.

    Args:
        number: the number of this commit in the run.

    Raises:
        FileNotFoundError: a token shard that they name is missing.
        RunFailed: a token shard was removed meanwhile; the new file is deleted again.
    """
    commit_rows(store, run_id, number, pa.Table.from_pylist(list(records), schema=VIDEO_SCHEMA), made_with=made_with)


def commit_rows(store: Store, run_id: str, number: int, rows: pa.Table, *, made_with: str) -> None:
    """Make rows visible in the videos table: write them as one small file, which appears only once it is complete.

    Args:
        run_id: the run; it replaces the ``run_id`` of every row.
        number: the number of this commit in the run, for the file's name.
        rows: they have the columns of VIDEO_SCHEMA, which may all be nullable; KEY_COLUMNS are computed here.
        made_with: the fingerprint of the cache's identity, for the file's metadata.

    Raises:
        FileNotFoundError: a token shard of an ok row is missing, for example because a node without the shared folder
            wrote it to its local disk.
        RunFailed: a token shard was removed while this process was stopped; the new file is deleted again.
    """
    needs = sorted(set(select_ok(rows)["token_shard"].to_pylist()))
    if missing_shards := _find_missing(store, needs):
        raise FileNotFoundError(
            errno.ENOENT,
            f"the token shard is not in --out {store}: use a folder that all nodes share; if they do, the shard was "
            "removed meanwhile, so rerun the command",
            missing_shards[0],
        )
    rows = rows.set_column(rows.schema.get_field_index("run_id"), "run_id", pa.repeat(run_id, len(rows)))
    name, data = serialize_small(run_id, number, add_keys(rows), made_with)
    store.put(name, data)
    # If this process was stopped since the first check, a cleanup may have deleted the shards.
    if missing_shards := _find_missing(store, needs):
        store.delete(name)
        message = f"{store}: {missing_shards[0]} was removed before its videos were committed"
        raise RunFailed(f"{message}. Rerun the command")


def _find_missing(store: Store, names: Sequence[str]) -> list[str]:
    """Return the files that the store lacks, in the order of ``names``; several are looked up in parallel."""
    if len(names) <= 1:
        return [name for name in names if not store.exists(name)]
    with request_threads(min(_MAX_REQUESTS, len(names))) as pool:
        return [name for name, exists in zip(names, pool.map(store.exists, names), strict=True) if not exists]


def put_token_shard(
    store: Store,
    run_id: str,
    records: Sequence[VideoRecord],
    tables: Sequence[pa.Table],
    checksums: Sequence[Future[str]] = (),
) -> None:
    """Write the token rows of videos as one shard, named by run and content, and complete their records in place.

    Each record gets ``first_row_group``, ``token_shard``, ``footer_hash`` and, if ``checksums`` are given,
    ``checksum``.

    Args:
        records: each has ``row_counts``, the rows of its row groups.
        tables: the rows of each video, in the order of ``records``.
        checksums: futures of the videos' checksums, awaited after the shard is serialized; empty keeps those in
            ``records``.
    """
    groups: list[int] = []
    for record in records:
        record["first_row_group"] = len(groups)
        groups += record["row_counts"]
    data = write_parquet(pa.concat_tables(tables), groups)
    for record, checksum in zip(records, checksums, strict=bool(checksums)):
        record["checksum"] = checksum.result()
    ids = hash_bytes_to_hex(*(record["video_id"].encode() + b"\0" for record in records))
    # The first hash names the videos, the second the content, so that no other bytes ever replace these.
    name = f"{TOKENS}/{run_id}-{ids[:16]}-{hash_bytes_to_hex(data)}.parquet"
    store.put(name, data)
    footer = hash_bytes(slice_footer(memoryview(data)))
    for record in records:
        record["token_shard"] = name
        record["footer_hash"] = footer


def copy_videos(store: Store, run_id: str, rows: Sequence[VideoRow]) -> list[VideoRow]:
    """Copy the tokens of videos to one new token shard; return new rows that name it, for the caller to commit.

    ``rewritten`` of each row is one higher, so that the new row will be the live one.

    Raises:
        CorruptShard: a video is damaged.
    """
    new_rows: list[VideoRow] = [{**row, "rewritten": (row["rewritten"] or 0) + 1} for row in rows]
    put_token_shard(store, run_id, new_rows, read_videos(store, rows))
    return new_rows


def move_videos(table: VideosTable, run_id: str, number: int, places: pa.Table, made_with: str) -> list[VideoRow]:
    """Copy the tokens of videos to one new token shard, commit their new rows, and return these rows.

    The old token shards stay. After a kill both copies may exist; the live row names one.

    Args:
        places: token_shard, first_row_group, ``file`` and ``row`` of each video.

    Raises:
        CorruptShard: a video is damaged.
        RunFailed: the new shard was removed meanwhile.
        FileNotFoundError: the new shard, or a file of the table, is missing.
    """
    rows = copy_videos(table.store, run_id, list(table.read_rows(sort_by_shard(places))))
    commit_records(table.store, run_id, number, rows, made_with=made_with)
    return rows


def make_batches(
    items: Iterable[T], n_bytes: Callable[[T], float], limit: float = SHARD_BYTES, max_items: float = math.inf
) -> Iterator[list[T]]:
    """Yield batches of consecutive items, in order.

    A batch ends with the item that brings it to ``limit`` bytes (by ``n_bytes``) or to ``max_items`` items.
    """
    bundle: list[T] = []
    size = 0.0
    for item in items:
        bundle.append(item)
        size += n_bytes(item)
        if size >= limit or len(bundle) >= max_items:
            yield bundle
            bundle = []
            size = 0.0
    if bundle:
        yield bundle


def _build_rows(record: VideoRecord, tokens: KeptTokens, vectors: Mapping[str, Bits], schema: pa.Schema) -> pa.Table:
    """Build the token rows of one video; contiguous vectors are wrapped without a copy.

    ``frame`` is computed from ``index``. rank, merged and density are null if ``tokens`` has none.

    Args:
        vectors: column -> values per token, in the order of ``tokens``. For evidence per frame, values per frame, which
            are copied into the row of the frame's first token.

    Raises:
        ValueError: evidence is per frame and a frame has no token.
    """
    n = len(tokens.index)
    columns: dict[str, pa.Array] = {
        "video_id": pa.repeat(record["video_id"], n).cast(pa.string()),
        "rank": _build_nullable_column(tokens.rank, pa.int32(), n),
        "index": pa.array(tokens.index),
        "frame": pa.array(tokens.index // record["tokens_per_frame"]),
        "merged": _build_nullable_column(tokens.merged, pa.bool_(), n),
        "density": _build_nullable_column(tokens.density, pa.float32(), n),
    }
    for name, values in vectors.items():
        data = pa.py_buffer(np.ascontiguousarray(values))
        column = pa.FixedSizeBinaryArray.from_buffers(schema.field(name).type, len(values), [None, data])
        columns[name] = (
            _spread_over_first_rows(column, columns["frame"].to_numpy()) if is_frame_evidence(name) else column
        )
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _spread_over_first_rows(frames: pa.Array, frame_of_row: NDArray[np.int32]) -> pa.Array:
    """Spread a value per frame, [T], over the token rows: it goes to the frame's first row, the others get null.

    Raises:
        ValueError: a frame has no token.
    """
    frame_numbers, first = np.unique(frame_of_row, return_index=True)
    if not np.array_equal(frame_numbers, np.arange(len(frames))):
        raise ValueError("evidence per frame can only be stored with all tokens: a frame has no kept token")
    is_null = np.ones(len(frame_of_row), dtype=bool)
    is_null[first] = False
    return frames.take(pa.array(frame_of_row, mask=is_null))


def _build_nullable_column(values: NDArray[np.generic] | None, kind: pa.DataType, n: int) -> pa.Array:
    """Convert values to a column, or return ``n`` nulls if they are None."""
    return pa.nulls(n, kind) if values is None else pa.array(values, kind)
