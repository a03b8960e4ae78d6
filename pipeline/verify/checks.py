"""Checks of single files of a cache: files of the videos table row by row, and token shards video by video."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import pyarrow as pa

from gstep.evidence import is_frame_evidence
from gstep.types import budget_for
from pipeline.cache.bounds import iter_row_count_faults
from pipeline.cache.cached_video import ONE_NUMBER
from pipeline.cache.header import (
    CacheHeader,
    compute_fingerprint,
    get_codec,
    get_deepstack_levels,
    get_method_declarations,
)
from pipeline.cache.live import INDEX_COLUMNS
from pipeline.cache.schema import LATER, VIDEO_SCHEMA, build_token_schema, complete_columns, compute_tier_row_counts
from pipeline.cache.table import (
    SortedFile,
    TableFile,
    add_row_locations,
    is_same_identity,
    parse_file_name,
    parse_small,
)
from pipeline.cache.token_shard import TokenShard
from pipeline.errors import CorruptShard, FaultClass
from pipeline.rows import JSON_COLUMNS, VideoRow
from pipeline.storage.stores import Store
from pipeline.verify.report import Kind, Problem

_MAGIC = 4  # bytes of "PAR1" before the first row group
RowKey = tuple[str, int]  # a file of the videos table and a row in it
JUDGED_COLUMNS = (*INDEX_COLUMNS, "run_id", "token_shard")  # columns of every row that stay in memory


@dataclass(frozen=True)
class Checked:
    """The result of checking one file.

    Attributes:
        problems: the problems of the file, its rows and its tokens.
        n_bytes: the size of the file; 0 if it was not read or cannot be opened.
        is_gone: True if the file itself, or a table file with the rows that name it, was gone.
    """

    problems: list[Problem]
    n_bytes: int = 0
    is_gone: bool = False


@dataclass(frozen=True)
class CheckedCommit(Checked):
    """The result of checking one file of the videos table.

    Attributes:
        rows: JUDGED_COLUMNS of every row, with ``file`` and ``row``; None if the file cannot be read, lacks columns or
            has another identity.
        bad: the numbers of rows that contradict themselves or the header, so that their tokens cannot be checked.
    """

    rows: pa.Table | None = None
    bad: frozenset[int] = frozenset()


@dataclass(frozen=True)
class CheckedShard(Checked):
    """The result of checking one token shard.

    Attributes:
        widths: values per token of each stored evidence, by column.
        n_tokens: the number of token rows of the checked videos.
    """

    widths: dict[str, int] = field(default_factory=dict)
    n_tokens: int = 0


def get_recorded_method(header: CacheHeader) -> str:
    """Return the name of the pruning method in the header; "None" if there is none."""
    return str(header["identity"].get("pruner", {}).get("method"))


def check_commit(store: Store, name: str, header: CacheHeader) -> CheckedCommit:
    """Check one file of the videos table: its content, its columns, and each row against itself and the header.

    Nothing is raised for the file: one that is gone, damaged or unreadable, lacks columns or has another identity gives
    one problem and no rows. Otherwise each fault of a row gives a problem, and the rows are returned.
    """
    file = parse_file_name(name)
    try:
        if file.is_sorted:
            sorted_file = SortedFile(store, file)
            table, made_with = pa.concat_tables(sorted_file.parts()), sorted_file.made_with
            n_bytes = sorted_file.n_bytes
        else:
            data = store.read(name)
            table, made_with = parse_small(store, name, data)
            n_bytes = len(data)
    except (CorruptShard, pa.ArrowException, OSError) as error:
        problem = Problem(*_judge_error(error, f"{store}/{name}: "), name)
        return CheckedCommit([problem], is_gone=isinstance(error, FileNotFoundError))
    types = dict(zip(table.schema.names, table.schema.types, strict=True))
    late = LATER.keys() - types.keys()
    if wrong := sorted(due.name for due in VIDEO_SCHEMA if due.name not in late and types.get(due.name) != due.type):
        message = f"{store}/{name}: columns are missing or of another type: {', '.join(wrong)}"
        return CheckedCommit([Problem(Kind.SCHEMA, message, name)], n_bytes)
    if not is_same_identity(made_with, compute_fingerprint(header["identity"])):
        message = f"{store}/{name}: its rows were made with other settings, and no reader takes them"
        return CheckedCommit([Problem(Kind.FINGERPRINT, message, name)], n_bytes)
    problems = []
    table = complete_columns(table, VIDEO_SCHEMA.names, VIDEO_SCHEMA, LATER, f"{store}/{name}")
    if file.is_sorted and (fault := _find_sorted_fault(table, file)):
        problems.append(Problem(Kind.COMMIT, f"{store}/{name}: {fault}", name))
    bad = set()
    for number, row in enumerate(table.to_pylist()):
        faults = list(iter_row_faults(row, header))
        problems += [Problem(Kind.ROW, f"{fault} ({name})", name, row["video_id"]) for fault in faults]
        if faults:
            bad.add(number)
    rows = add_row_locations(table.select(JUDGED_COLUMNS), name)
    return CheckedCommit(problems, n_bytes, rows=rows, bad=frozenset(bad))


def _judge_error(error: Exception, label: str = "") -> tuple[Kind, str]:
    """Return the kind and the description of an error of reading a file.

    A CorruptShard brings its kind and text. An Arrow error has the kind COMMIT, and any other error UNREADABLE.

    Args:
        label: put before the text of an error that does not name the file.
    """
    if isinstance(error, CorruptShard):
        return Kind(error.kind), str(error)
    return Kind.COMMIT if isinstance(error, pa.ArrowException) else Kind.UNREADABLE, f"{label}{error}"


def _find_sorted_fault(table: pa.Table, file: TableFile) -> str | None:
    """Describe how a sorted file's rows contradict its name (count, first and last key, order); None if they agree."""
    high, low = table["id_high"].to_numpy(), table["id_low"].to_numpy()
    if len(table) != file.rows:
        return f"{len(table)} rows, where its name has {file.rows}"
    if (int(high[0]), int(high[-1])) != (file.first, file.last):
        return "its first or last key is not the one in its name"
    ascends = (high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] >= low[:-1]))
    return None if ascends.all() else "its rows are not in the order of their keys"


def iter_row_faults(row: VideoRow, header: CacheHeader) -> Iterator[str]:
    """Yield a description of each contradiction inside a row of the videos table, or between the row and the header.

    The counts of an ok row are checked first; if they are wrong, its ratio and frames are not checked. The columns with
    JSON are checked for every status.
    """
    if row["status"] == "removed":
        if row["token_shard"] is not None:
            yield "a removed video with a token shard"
    elif row["status"] == "failed":
        if row["error_class"] not in get_args(FaultClass):
            yield f"a failed video of no known error class: {row['error_class']!r}"
        if row["token_shard"] is not None:
            yield "a failed video with a token shard"
    elif row["status"] != "ok":
        yield f"its status is {row['status']!r}, neither ok, failed nor removed"
    elif faults := list(iter_row_count_faults(row)):
        yield from faults
    else:
        yield from _iter_ratio_faults(row, header)
        yield from _iter_frame_faults(row)
    for name in JSON_COLUMNS:
        if row[name] is not None and not is_json(row[name]):
            yield f"{name} is not JSON"


def _iter_ratio_faults(row: VideoRow, header: CacheHeader) -> Iterator[str]:
    """Yield contradictions between an ok row and the header: ratio, token count, nesting, row groups, hidden size.

    Another ratio than the cache's ends the check. The number of tokens (only of an ``exact`` method, which keeps the
    budget) and nesting are checked only if the method is known here or declared in the header. The row groups must end
    at the tiers of the ratio.
    """
    n_tokens, n_total, ratio = row["n_tokens"], row["n_total"], row["retention_ratio"]
    stored_ratio = header["identity"].get("retention_ratio")
    if not 0 < ratio <= 1 or abs(ratio - stored_ratio) > 1e-9:
        yield f"it is stored at retention ratio {ratio}, the cache at {stored_ratio}"
        return
    method = get_method_declarations(header["identity"])
    if method is not None and method.exact and n_tokens != budget_for(ratio, n_total):
        yield f"{n_tokens} tokens, where {get_recorded_method(header)} keeps {budget_for(ratio, n_total)} of {n_total}"
    if method is not None and row["nested"] != method.nested:
        yield f"nested is {row['nested']}, which {get_recorded_method(header)} is not"
    if row["row_counts"] != compute_tier_row_counts(n_total, n_tokens, ratio, nested=row["nested"]):
        yield f"its row groups of {row['row_counts']} rows do not end at the tiers of {n_tokens} tokens"
    if row["hidden_size"] != header.get("hidden_size", row["hidden_size"]):
        yield f"tokens of {row['hidden_size']} numbers, in a cache of {header['hidden_size']}"


def _iter_frame_faults(row: VideoRow) -> Iterator[str]:
    """Yield contradictions between a row's frame indices, timestamps, source length and number of repeated frames.

    Frame indices must not descend, and lie below ``source_frames`` if that is known. Timestamps must be finite, not
    descend, and be equal for repeated frames. ``n_repeated`` must be null or the number of repetitions. The lists are
    not empty and of equal length, which ``iter_row_count_faults`` checks before.
    """
    frames, seconds = np.asarray(row["frame_indices"]), np.asarray(row["timestamps"], dtype=np.float64)
    end = row["source_frames"] if row["source_frames"] is not None else math.inf
    if frames[0] < 0 or frames[-1] >= end or (np.diff(frames) < 0).any():
        yield f"frame_indices do not ascend within the source's {end} frames"
    steps = np.diff(seconds)
    if not np.isfinite(seconds).all() or (steps < 0).any() or (steps[np.diff(frames) == 0] != 0).any():
        yield "timestamps do not ascend with the frames"
    n_repeated = len(frames) - len(np.unique(frames))
    if row["n_repeated"] not in (None, n_repeated):
        yield f"n_repeated is {row['n_repeated']}, {n_repeated} frames repeat"


def is_json(text: str) -> bool:
    """Return True if a text parses as JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def check_token_shard(
    store: Store, name: str, rows: Sequence[tuple[str, VideoRow]], header: CacheHeader
) -> CheckedShard:
    """Read one token shard video by video, and check it against the rows that name it; damage becomes problems.

    A shard that cannot be opened, or whose columns do not match the header, gives one problem, and its tokens are not
    read.

    Args:
        rows: for each video to check, the file of the videos table and the row; at least one. The first row's footer
            hash and hidden size apply to the whole shard. Superseded rows may be among them.
    """
    commit, first = rows[0]
    try:
        shard = TokenShard(store, name, first["footer_hash"])
    except (CorruptShard, OSError) as error:
        return CheckedShard([Problem(*_judge_error(error, f"{store}/{name}: "), name, videos_shard=commit)])
    schema = shard.schema
    if wrong := list(_iter_schema_faults(schema, first["hidden_size"], header)):
        message = f"{store}/{name}: {'; '.join(wrong)}"
        return CheckedShard([Problem(Kind.SCHEMA, message, name, videos_shard=commit)], shard.n_bytes)
    problems = [
        Problem(Kind.ROWS, f"{store}/{name}: {fault}", name, videos_shard=commit)
        for fault in _iter_layout_faults(shard, [row for _, row in rows])
    ]
    n_tokens = 0
    for videos_shard, row in rows:
        for kind, message in _iter_video_faults(shard, row, header):
            problems.append(Problem(kind, f"{message} ({name})", name, row["video_id"], videos_shard))
        n_tokens += row["n_tokens"]
    widths = {key: schema.field(key).type.byte_width // 2 for key in header["identity"].get("evidence", {})}
    return CheckedShard(problems, shard.n_bytes, widths=widths, n_tokens=n_tokens)


def _iter_schema_faults(schema: pa.Schema, hidden_size: int, header: CacheHeader) -> Iterator[str]:
    """Yield the differences between a token shard's columns and the columns that the header demands.

    If the names differ, only that is yielded. Columns of evidence may have any width of bfloat16 values, except that
    kinds with one number per token must have exactly one value.
    """
    evidence = header["identity"].get("evidence", {})
    plain = build_token_schema(hidden_size, get_deepstack_levels(header), codec=get_codec(header["identity"]))
    if sorted(schema.names) != sorted([*plain.names, *evidence]):
        yield f"its columns are {', '.join(schema.names)}, not {', '.join([*plain.names, *evidence])}"
        return
    for column in plain:
        actual = schema.field(column.name)
        if not actual.type.equals(column.type) or actual.nullable != column.nullable:
            yield f"{column.name} is {actual.type}, not {column.type}"
    for name in evidence:
        kind = schema.field(name).type
        width = kind.byte_width if pa.types.is_fixed_size_binary(kind) else 0
        if not width or width % 2 or (name.startswith(ONE_NUMBER) and width != 2):
            yield f"{name} is {kind}, which holds no evidence of bfloat16 numbers"


def _iter_layout_faults(shard: TokenShard, rows: Sequence[VideoRow]) -> Iterator[str]:
    """Yield faults of a token shard's layout.

    These are bytes outside of row groups and footer, row groups whose lengths differ from those in a row, and row
    groups that several rows claim.
    """
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


def _iter_video_faults(shard: TokenShard, row: VideoRow, header: CacheHeader) -> Iterator[tuple[Kind, str]]:
    """Read one video's tokens, and yield (kind, description) of each fault.

    If the tokens cannot be read, belong to another video, or do not match the row's checksum, that is the only fault.
    """
    try:
        table = shard.read_checked(row)
    except (CorruptShard, OSError) as error:
        yield _judge_error(error)
        return
    yield from ((Kind.TOKENS, fault) for fault in iter_token_faults(table, row, header))
    for name in filter(is_frame_evidence, table.column_names):
        if len(table) - table[name].null_count != row["n_frames"]:
            yield Kind.TOKENS, f"{name} is not there once for each of {row['n_frames']} frames"


def iter_token_faults(table: pa.Table, row: VideoRow, header: CacheHeader) -> Iterator[str]:
    """Yield a description of each fault in a video's positions, frames, merged flags, ranks and densities.

    Positions must lie in the video, and must not repeat except by a merged token; frames must follow from the
    positions, and their counts be those of ``kept_per_frame``. Positions outside the video, and merged flags that are
    null for some tokens only, end the check. What depends on the method (whether it merges, and ascending positions if
    it neither nests nor reorders) is checked only if the method is known here or declared in the header.

    Args:
        table: the tokens of the video in the order of the shard, at least one.
    """
    index, frame = table["index"].to_numpy(), table["frame"].to_numpy()
    if index.min() < 0 or index.max() >= row["n_total"]:
        yield f"positions outside 0 to {row['n_total'] - 1}"
        return
    if not np.array_equal(frame, index // row["tokens_per_frame"]):
        yield f"frames that are not index // {row['tokens_per_frame']}"
    elif np.bincount(frame, minlength=row["n_frames"]).tolist() != row["kept_per_frame"]:
        yield "not as many tokens of each frame as kept_per_frame says"
    is_merged = _convert_values(table["merged"], False)
    if is_merged is None:
        yield "merged is null for some tokens and not for others"
        return
    order = np.argsort(index, kind="stable")
    # A merged token has its target's index, and the target may be kept too.
    twice = (np.diff(index[order]) == 0) & ~(is_merged[order][1:] | is_merged[order][:-1])
    if twice.any():
        yield f"position {index[order][1:][twice][0]} is there twice"
    method = get_method_declarations(header["identity"])
    if method is not None and (table["merged"].null_count == 0) != method.merges:
        yield f"merged is {'null' if method.merges else 'set'}, against {get_recorded_method(header)}"
    if method is not None and not (method.nested or method.reorders) and (np.diff(index) < 0).any():
        yield "rows that are not in ascending index"
    yield from _iter_rank_faults(table, is_nested=row["nested"])


def _iter_rank_faults(table: pa.Table, is_nested: bool) -> Iterator[str]:
    """Yield faults of ranks and densities.

    Ranks must be 0, 1, 2, ... in row order for a nested method, and null otherwise. Densities must be all null or all
    finite.
    """
    rank, density = table["rank"], _convert_values(table["density"], 0.0)
    if density is None or not np.isfinite(density).all():
        yield "densities that are not all there, or not finite"
    if not is_nested:
        if rank.null_count != len(rank):
            yield "a rank, of a method without an order"
    elif rank.null_count or not np.array_equal(rank.to_numpy(), np.arange(len(rank))):
        yield "ranks that are not 0, 1, 2, ... in the order of the rows"


def _convert_values(column: pa.ChunkedArray, fill: object) -> np.ndarray | None:
    """Return a column's values as an array, with ``fill`` if all are null; None if only some are null."""
    if column.null_count not in (0, len(column)):
        return None
    return np.asarray(column.fill_null(fill).to_numpy(zero_copy_only=False))
