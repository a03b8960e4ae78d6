"""Checks of videos shards: the file, and whether its rows agree with themselves and with the header."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import pyarrow as pa

from gstep.types import budget_for
from pipeline.cache.header import CacheHeader, fingerprint
from pipeline.cache.live_rows import INDEX_COLUMNS, completed, with_place
from pipeline.cache.method import declared_method
from pipeline.cache.schema import LATER, VIDEO_SCHEMA, tier_row_counts
from pipeline.cache.table import SortedFile, TableFile, file_named, made_with_of, read_small
from pipeline.errors import CorruptShard, FaultClass
from pipeline.rows import JSON_COLUMNS, VideoRow
from pipeline.storage.stores import Store
from pipeline.verify.report import Kind, Problem

Place = tuple[str, int]  # a file of the videos table and a row in it
JUDGED_COLUMNS = (*INDEX_COLUMNS, "run_id", "token_shard")  # columns of every row that stay in memory
_NEEDED = (
    *("token_shard", "first_row_group", "row_counts", "footer_hash", "checksum", "retention_ratio", "nested"),
    *("n_tokens", "n_total", "n_frames", "tokens_per_frame", "hidden_size"),
    *("frame_indices", "timestamps", "kept_per_frame"),
)


@dataclass(frozen=True)
class CheckedCommit:
    """The result of checking one file of the videos table.

    Attributes:
        rows: JUDGED_COLUMNS of every row with ``shard`` and ``row``; None of a file that cannot be read, or is another
            cache's.
        problems: what is wrong.
        n_bytes: of the file.
        bad: rows that contradict themselves, so that their tokens cannot be judged by them.
    """

    rows: pa.Table | None
    problems: list[Problem]
    n_bytes: int = 0
    bad: frozenset[int] = field(default_factory=frozenset)


def method_of(header: CacheHeader) -> str:
    """Return the name of the method that the cache was pruned with."""
    return str(header["identity"].get("pruner", {}).get("method"))


def check_commit(store: Store, name: str, header: CacheHeader) -> CheckedCommit:
    """Check one file of the videos table: content, columns, and each row against itself and the header."""
    file = file_named(name)
    try:
        table, made_with, n_bytes = _read(store, file)
    except CorruptShard as error:
        return CheckedCommit(None, [Problem(Kind(error.kind), str(error), name)])
    except pa.ArrowException as error:
        return CheckedCommit(None, [Problem(Kind.COMMIT, f"{store}/{name}: {error}", name)])
    except OSError as error:
        return CheckedCommit(None, [Problem(Kind.UNREADABLE, f"{store}/{name}: {error}", name)])
    if wrong := sorted(_wrong_columns(table.schema)):
        what = f"{store}/{name}: columns are missing or of another type: {', '.join(wrong)}"
        return CheckedCommit(None, [Problem(Kind.SCHEMA, what, name)], n_bytes)
    if made_with != fingerprint(header["identity"]):
        what = f"{store}/{name}: its rows were made with other settings, and no reader takes them"
        return CheckedCommit(None, [Problem(Kind.FINGERPRINT, what, name)], n_bytes)
    problems = []
    table = completed(table, VIDEO_SCHEMA.names)
    if file.level and (fault := _sorted_fault(table, file)):
        problems.append(Problem(Kind.COMMIT, f"{store}/{name}: {fault}", name))
    bad = set()
    for place, row in enumerate(table.to_pylist()):
        faults = list(row_faults(row, header))
        problems += [Problem(Kind.ROW, f"{fault} ({name})", name, row["video_id"]) for fault in faults]
        if faults:
            bad.add(place)
    return CheckedCommit(with_place(table.select(JUDGED_COLUMNS), name), problems, n_bytes, frozenset(bad))


def _read(store: Store, file: TableFile) -> tuple[pa.Table, str | None, int]:
    """Read a file of the table: return (all rows, their identity's fingerprint, bytes).

    Raises CorruptShard, ArrowException, OSError.
    """
    if file.level:
        opened = SortedFile(store, file)
        return pa.concat_tables(opened.parts()), opened.made_with, opened.n_bytes
    data = store.read(file.name)
    table = read_small(store, file.name, data)
    return table, made_with_of(table.schema.metadata), len(data)


def _wrong_columns(schema: pa.Schema) -> Iterator[str]:
    """Yield the columns that are missing or of another type than VIDEO_SCHEMA has."""
    for expected in VIDEO_SCHEMA:
        name = expected.name
        if schema.field(name).type != expected.type if name in schema.names else name not in LATER:
            yield name


def _sorted_fault(table: pa.Table, file: TableFile) -> str | None:
    """Describe how a sorted file's rows contradict its name; None where they agree."""
    high, low = table["id_high"].to_numpy(), table["id_low"].to_numpy()
    if len(table) != file.rows:
        return f"{len(table)} rows, where its name has {file.rows}"
    if (int(high[0]), int(high[-1])) != (file.first, file.last):
        return "its first or last key is not the one in its name"
    ascends = (high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] >= low[:-1]))
    return None if ascends.all() else "its rows are not in the order of their keys"


def row_faults(row: VideoRow, header: CacheHeader) -> Iterator[str]:
    """Yield a description of each contradiction inside a row of the videos table, or with the header."""
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
    elif lacking := [name for name, value in row.items() if name in _NEEDED and value is None]:
        yield f"an ok video without {', '.join(lacking)}"
    else:
        yield from _count_faults(row, header)
        yield from _frame_faults(row)
    for name in JSON_COLUMNS:
        if row[name] is not None and not is_json(row[name]):
            yield f"{name} is not JSON"


def _count_faults(row: VideoRow, header: CacheHeader) -> Iterator[str]:
    """Yield what contradicts itself in a row's token counts and retention ratio."""
    n_tokens, n_total, ratio = row["n_tokens"], row["n_total"], row["retention_ratio"]
    if n_total < 1 or n_total != row["n_frames"] * row["tokens_per_frame"]:
        yield f"n_total is {n_total}, not {row['n_frames']} x {row['tokens_per_frame']}"
        return
    if not 1 <= n_tokens <= n_total:
        yield f"n_tokens is {n_tokens} of {n_total}"
    stored = header["identity"].get("retention_ratio")
    if not 0 < ratio <= 1 or abs(ratio - stored) > 1e-9:
        yield f"it is stored at retention ratio {ratio}, the cache at {stored}"
        return
    declared = declared_method(header["identity"])
    if declared is not None and declared.exact and n_tokens != budget_for(ratio, n_total):
        yield f"{n_tokens} tokens, where {method_of(header)} keeps {budget_for(ratio, n_total)} of {n_total}"
    if declared is not None and row["nested"] != declared.nested:
        yield f"nested is {row['nested']}, which {method_of(header)} is not"
    yield from _layout_faults(row, header)


def _layout_faults(row: VideoRow, header: CacheHeader) -> Iterator[str]:
    """Yield what contradicts itself in a row's row groups, width and counts per frame."""
    n_tokens, n_total, ratio = row["n_tokens"], row["n_total"], row["retention_ratio"]
    if row["row_counts"] != tier_row_counts(n_total, n_tokens, ratio, nested=row["nested"]):
        yield f"its row groups of {row['row_counts']} rows do not end at the tiers of {n_tokens} tokens"
    if row["first_row_group"] < 0:
        yield f"its first row group is {row['first_row_group']}"
    if row["hidden_size"] != header.get("hidden_size", row["hidden_size"]):
        yield f"tokens of {row['hidden_size']} numbers, in a cache of {header['hidden_size']}"
    if len(row["kept_per_frame"]) != row["n_frames"] or sum(row["kept_per_frame"]) != n_tokens:
        yield f"kept_per_frame does not sum to {n_tokens} tokens in {row['n_frames']} frames"
    if row["temporal_density"] is not None and len(row["temporal_density"]) != row["n_frames"]:
        yield f"{len(row['temporal_density'])} temporal densities of {row['n_frames']} frames"


def _frame_faults(row: VideoRow) -> Iterator[str]:
    """Yield what contradicts itself in a row's frame indices and timestamps."""
    frames, seconds = np.asarray(row["frame_indices"]), np.asarray(row["timestamps"], dtype=np.float64)
    n_frames = row["n_frames"]
    if len(frames) != len(seconds) or not len(frames) or n_frames < 1:
        yield f"{len(frames)} frame_indices and {len(seconds)} timestamps"
        return
    per_t = math.ceil(len(frames) / n_frames)  # two on Qwen, where the last may be alone
    if math.ceil(len(frames) / per_t) != n_frames:
        yield f"{len(frames)} sampled frames cannot make {n_frames} of the model's"
    end = row["source_frames"] if row["source_frames"] is not None else math.inf
    if frames[0] < 0 or frames[-1] >= end or (np.diff(frames) < 0).any():
        yield f"frame_indices do not ascend within the source's {end} frames"
    steps = np.diff(seconds)
    if not np.isfinite(seconds).all() or (steps < 0).any() or (steps[np.diff(frames) == 0] != 0).any():
        yield "timestamps do not ascend with the frames"
    repeated = len(frames) - len(np.unique(frames))
    if row["n_repeated"] not in (None, repeated):
        yield f"n_repeated is {row['n_repeated']}, {repeated} frames repeat"


def is_json(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
