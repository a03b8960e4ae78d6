"""Checks of token shards: every byte is read, and every video's tokens are held against its row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from gstep.evidence import is_per_frame
from pipeline.cache.cached_video import ONE_NUMBER
from pipeline.cache.codecs import codec_of
from pipeline.cache.header import CacheHeader, deepstack_levels
from pipeline.cache.method import declared_method
from pipeline.cache.schema import token_schema
from pipeline.cache.token_shard import Rows, TokenShard, checksum_of
from pipeline.errors import CorruptShard
from pipeline.rows import VideoRow
from pipeline.storage.stores import Store
from pipeline.verify.report import Kind, Problem
from pipeline.verify.rows import method_of

_MAGIC = 4  # bytes of "PAR1" before the first row group


@dataclass(frozen=True)
class CheckedShard:
    """The result of checking one token shard.

    Attributes:
        problems: what is wrong.
        n_bytes: of the file; 0 where it cannot be opened.
        widths: numbers a token of each evidence that is stored.
        n_tokens: token rows that were read.
    """

    problems: list[Problem]
    n_bytes: int = 0
    widths: dict[str, int] = field(default_factory=dict)
    n_tokens: int = 0


def check_token_shard(
    store: Store, name: str, rows: Sequence[tuple[str, VideoRow]], header: CacheHeader
) -> CheckedShard:
    """Read one token shard, a video at a time, and check it against the rows that name it.

    ``rows`` are (file of the table, row) of every video in it whose row is there; a later attempt may have superseded
    others.
    """
    commit, first = rows[0]
    try:
        shard = TokenShard(store, name, first["footer_hash"])
    except CorruptShard as error:
        return CheckedShard([Problem(Kind(error.kind), str(error), name, videos_shard=commit)])
    except OSError as error:
        return CheckedShard([Problem(Kind.UNREADABLE, f"{store}/{name}: {error}", name, videos_shard=commit)])
    schema = shard.schema
    if wrong := list(_schema_faults(schema, first["hidden_size"], header)):
        what = f"{store}/{name}: {'; '.join(wrong)}"
        return CheckedShard([Problem(Kind.SCHEMA, what, name, videos_shard=commit)], shard.n_bytes)
    problems = [
        Problem(Kind.ROWS, f"{store}/{name}: {fault}", name, videos_shard=commit)
        for fault in _layout_faults(shard, [row for _, row in rows])
    ]
    n_tokens = 0
    for videos_shard, row in rows:
        for kind, what in _video_faults(shard, row, header):
            problems.append(Problem(kind, f"{what} ({name})", name, row["video_id"], videos_shard))
        n_tokens += row["n_tokens"]
    widths = {key: schema.field(key).type.byte_width // 2 for key in header["identity"].get("evidence", {})}
    return CheckedShard(problems, shard.n_bytes, widths, n_tokens)


def _schema_faults(schema: pa.Schema, hidden_size: int, header: CacheHeader) -> Iterator[str]:
    """Yield the columns of a token shard that differ from what the header demands."""
    evidence = header["identity"].get("evidence", {})
    plain = token_schema(hidden_size, deepstack_levels(header), codec=codec_of(header["identity"]))
    if sorted(schema.names) != sorted([*plain.names, *evidence]):
        yield f"its columns are {', '.join(schema.names)}, not {', '.join([*plain.names, *evidence])}"
        return
    for expected in plain:
        found = schema.field(expected.name)
        if not found.type.equals(expected.type) or found.nullable != expected.nullable:
            yield f"{expected.name} is {found.type}, not {expected.type}"
    for name in evidence:
        kind = schema.field(name).type
        width = kind.byte_width if pa.types.is_fixed_size_binary(kind) else 0
        if not width or width % 2 or (name.startswith(ONE_NUMBER) and width != 2):
            yield f"{name} is {kind}, which holds no evidence of bfloat16 numbers"


def _layout_faults(shard: TokenShard, rows: Sequence[VideoRow]) -> Iterator[str]:
    """Yield faults of the file's layout: bytes beside row groups and footer, or a row group of two videos."""
    metadata = shard.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    n_pages = sum(group.column(i).total_compressed_size for group in groups for i in range(group.num_columns))
    if shard.n_bytes != _MAGIC + n_pages + shard.n_footer:
        yield f"{shard.n_bytes} bytes, where its pages and footer take {_MAGIC + n_pages + shard.n_footer}"
    claims = np.zeros(len(groups), dtype=np.int64)
    for row in rows:
        first, counts = row["first_row_group"], row["row_counts"]
        claims[first : first + len(counts)] += 1
        if [group.num_rows for group in groups[first : first + len(counts)]] != counts:
            yield f"{row['video_id']}: its row groups do not have the {counts} rows of its row"
    if (claims > 1).any():
        yield f"{int((claims > 1).sum())} row groups belong to several videos"


def _video_faults(shard: TokenShard, row: VideoRow, header: CacheHeader) -> Iterator[tuple[Kind, str]]:
    """Yield (kind, description) of each fault in one video's tokens."""
    try:
        table = shard.read(Rows(row, row["n_tokens"], shard.schema.names))
    except CorruptShard as error:
        yield Kind(error.kind), str(error)
        return
    except OSError as error:
        yield Kind.UNREADABLE, str(error)
        return
    ids = table["video_id"].unique().to_pylist()
    if ids != [row["video_id"]]:
        yield Kind.ROWS, f"the rows are those of {', '.join(map(str, ids[:3]))}"
        return
    vectors = [f.name for f in table.schema if pa.types.is_fixed_size_binary(f.type)]
    if checksum_of(table) != row["checksum"]:
        yield Kind.CHECKSUM, "the token bytes do not have the checksum of the videos row"
    yield from ((Kind.TOKENS, fault) for fault in token_faults(table, row, header))
    for name in filter(is_per_frame, vectors):
        if len(table) - table[name].null_count != row["n_frames"]:
            yield Kind.TOKENS, f"{name} is not there once for each of {row['n_frames']} frames"


def token_faults(table: pa.Table, row: VideoRow, header: CacheHeader) -> Iterator[str]:
    """Yield a description of each fault in a video's positions, order and numbers."""
    index, frame = table["index"].to_numpy(), table["frame"].to_numpy()
    if index.min() < 0 or index.max() >= row["n_total"]:
        yield f"positions outside 0 to {row['n_total'] - 1}"
        return
    if not np.array_equal(frame, index // row["tokens_per_frame"]):
        yield f"frames that are not index // {row['tokens_per_frame']}"
    elif np.bincount(frame, minlength=row["n_frames"]).tolist() != row["kept_per_frame"]:
        yield "not as many tokens of each frame as kept_per_frame says"
    merged = _values(table["merged"], False)
    if merged is None:
        yield "merged is null for some tokens and not for others"
        return
    order = np.argsort(index, kind="stable")
    # A merged token stands at its target's index, which may be kept besides.
    twice = (np.diff(index[order]) == 0) & ~(merged[order][1:] | merged[order][:-1])
    if twice.any():
        yield f"position {index[order][1:][twice][0]} is there twice"
    declared = declared_method(header["identity"])
    if declared is not None and (table["merged"].null_count == 0) != declared.merges:
        yield f"merged is {'null' if declared.merges else 'set'}, against {method_of(header)}"
    if declared is not None and not (declared.nested or declared.reorders) and (np.diff(index) < 0).any():
        yield "rows that are not in ascending index"
    yield from _rank_faults(table, nested=row["nested"])


def _rank_faults(table: pa.Table, nested: bool) -> Iterator[str]:
    """Yield faults of ranks and densities."""
    rank, density = table["rank"], _values(table["density"], 0.0)
    if density is None or not np.isfinite(density).all():
        yield "densities that are not all there, or not finite"
    if not nested:
        if rank.null_count != len(rank):
            yield "a rank, of a method without an order"
    elif rank.null_count or not np.array_equal(rank.to_numpy(), np.arange(len(rank))):
        yield "ranks that are not 0, 1, 2, ... in the order of the rows"


def _values(column: pa.ChunkedArray, fill: object) -> np.ndarray | None:
    """Return a column's values, ``fill`` if all are null, or None if only some are."""
    if column.null_count not in (0, len(column)):
        return None
    return np.asarray(column.fill_null(fill).to_numpy(zero_copy_only=False))
