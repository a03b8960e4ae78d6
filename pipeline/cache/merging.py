"""Merge the files of the videos table into fewer, sorted files without superseded rows.

A killed or concurrent merge leaves rows in two files, which does not change the live rows.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.live import find_live_indices, make_rule_columns
from pipeline.cache.schema import VIDEO_SCHEMA
from pipeline.cache.table import FILE_ROWS, GROUP_ROWS, SortedFile, VideosTable, list_table_files, serialize_sorted
from pipeline.errors import CorruptShard
from pipeline.storage.stores import Store

KEEP = timedelta(minutes=10)  # merged files stay this long for readers
MAX_WAITING_FILES = 64  # a run merges as soon as there are more small files
MAX_WAITING_AT_END = 16  # a run merges at its end if there are more small files
_GROWTH = 8  # the rows of a level relative to the level below
_PART_GROUPS = FILE_ROWS * 3 // 4 // GROUP_ROWS  # approximate row groups of a merged file
_MAX_ROWS_WHILE_RUNNING = 2**21  # rows that take half a minute; jobs.compact also merges larger levels
_MAX_ROWS_PER_STEP = 2**20  # rows of small files in memory
_MAX_FILES_PER_STEP = 4096  # small files in one merge: the merged file's footer holds their names
_MERGE = b"merge"  # metadata of a sorted file: JSON with the names of its sources and the number of merged files


@dataclass
class MergeResult:
    """The result of a call of ``merge_table_files``; the file names are relative to the cache.

    Attributes:
        read: the files that were merged, small and sorted.
        deleted: the source files of earlier merges that this call deleted.
        rows: the number of rows in the files of ``written``.
        superseded: the number of rows that were dropped because another row of the video is live.
        waiting: the number of merged source files that stay for concurrent readers.
        foreign: the files of another identity, which are not merged.
    """

    read: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    rows: int = 0
    superseded: int = 0
    waiting: int = 0
    foreign: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """Yield the lines that a command prints about this result, one to four."""
        if self.read:
            superseded_note = f", without {self.superseded:,} superseded rows" if self.superseded else ""
            yield f"{len(self.read):,} files merged into {len(self.written):,} of {self.rows:,} rows{superseded_note}"
        else:
            yield "nothing to merge"
        if self.deleted:
            yield f"{len(self.deleted):,} files of earlier merges deleted"
        if self.waiting:
            yield f"{self.waiting:,} merged files stay for a while, for those who read them"
        if self.foreign:
            yield f"warning: {len(self.foreign)} files were made with other settings and left alone: {self.foreign[0]}"


def merge_table_files(
    store: Store,
    made_with: str | None,
    *,
    everything: bool = False,
    keep: timedelta = KEEP,
    max_rows: float = math.inf,
) -> MergeResult:
    """Merge the small files of the videos table with sorted files, and delete the sources of earlier merges.

    Small files are merged in steps that fit in memory. Each step also merges the lowest levels of sorted files, as long
    as they are not larger than its result, so that each row is rewritten only a few times. Nothing is written if there
    are no small files, unless ``everything`` is set and sorted files overlap. The files that this call merges stay for
    concurrent readers, unless ``keep`` is zero and a later step deletes them.

    Args:
        made_with: the fingerprint of the cache's identity; files of another identity are left alone. None merges all
            files.
        everything: the last step merges all sorted files, so that each video is in one of the written files.
        keep: delete the sources of an earlier merge if all its files are at least this old; zero ignores their age.
        max_rows: a level with more rows, and all levels above it, are not merged; ignored by the last step of
            ``everything``.

    Raises:
        CorruptShard: a file is damaged. No row is lost, and what earlier steps merged stays merged.
        FileNotFoundError: another merge deleted a file meanwhile.
    """
    start = time.monotonic()
    result = MergeResult()
    has_more = True
    while has_more:  # a step merges as many rows of small files as memory holds
        table = VideosTable(store, made_with)
        files = list_table_files(store)
        sorted_files = list(table.iter_open_sorted(files))
        merged_names = _delete_old_sources(store, sorted_files, {file.name for file in files}, keep, result)
        absent = merged_names.union(result.deleted)
        small = [file.name for file in files if not file.is_sorted and file.name not in absent]
        tables, names, has_more = _read_small(table, small)
        result.foreign = list(table.foreign)
        result.waiting = len(merged_names)
        n_small = sum(map(len, tables))
        chosen = [file for file in sorted_files if file.file.name not in absent]
        if not everything or has_more:
            chosen = _choose_levels(chosen, n_small, max_rows)
        bounds = sorted((file.file.first, file.file.last) for file in chosen)
        is_disjoint = all(
            before[1] < after[0] for before, after in pairwise(bounds)
        )  # no two files have rows of the same video
        if not names and (is_disjoint or not everything):
            break
        names += [file.file.name for file in chosen]
        rows = pa.concat_tables([VIDEO_SCHEMA.empty_table(), *tables])
        _write_merged_files(store, made_with, rows, chosen, sorted(names), result)
        result.read += names
        result.waiting += len(names)
    result.seconds = time.monotonic() - start
    return result


def merge_table_fully(store: Store, made_with: str | None) -> None:
    """Merge a table that nobody reads into one level, and delete the source files at once."""
    for _ in range(2):  # the second merge deletes the sources of the first
        merge_table_files(store, made_with, everything=True, keep=timedelta(0))


def merge_unless_damaged(store: Store, made_with: str | None, at_least: int, say: Callable[[str], object]) -> None:
    """Merge if there are more than ``at_least`` small files; levels of more than two million rows are left alone.

    A CorruptShard or an OSError is not raised: ``say`` gets a warning, and no row is lost.
    """
    try:
        if sum(not file.is_sorted for file in list_table_files(store)) > at_least:
            merge_table_files(store, made_with, max_rows=_MAX_ROWS_WHILE_RUNNING)
    except (CorruptShard, OSError) as error:
        say(f"warning: the files of the videos table were not merged ({error}); python -m jobs.compact tries again")


def _read_small(table: VideosTable, all_names: Sequence[str]) -> tuple[list[pa.Table], list[str], bool]:
    """Read small files in the given order until a step has 1,048,576 rows or 4,096 files.

    Returns:
        (a table per file, the names of these files, True if a limit was reached before the last of ``all_names``).
        Files of another identity are in neither list.
    """
    tables: list[pa.Table] = []
    names: list[str] = []
    n_rows = 0
    for name, rows in table.read_small(all_names, VIDEO_SCHEMA.names):
        tables.append(rows)
        names.append(name)
        n_rows += len(rows)
        if n_rows >= _MAX_ROWS_PER_STEP or len(names) >= _MAX_FILES_PER_STEP:
            return tables, names, name != all_names[-1]
    return tables, names, False


def _choose_levels(sorted_files: Sequence[SortedFile], n_rows: int, max_rows: float) -> list[SortedFile]:
    """Choose the sorted files to merge with ``n_rows`` rows of small files; return [] if ``n_rows`` is 0.

    The choice consists of complete levels, from the lowest up. It ends before a level that is higher than the level of
    all rows chosen so far, or that has more than ``max_rows`` rows.
    """
    by_level: dict[int, list[SortedFile]] = defaultdict(list)
    for file in sorted_files if n_rows else ():
        by_level[file.file.level].append(file)
    files: list[SortedFile] = []
    for level in sorted(by_level):
        of_level = sum(file.file.rows for file in by_level[level])
        if level > compute_level(n_rows) or of_level > max_rows:
            break
        files += by_level[level]
        n_rows += of_level
    return files


def _write_merged_files(
    store: Store,
    made_with: str | None,
    small: pa.Table,
    sorted_files: Sequence[SortedFile],
    names: list[str],
    result: MergeResult,
) -> None:
    """Write the live rows of all sources as new sorted files, one per range of hashes, and count them in ``result``.

    Each file's metadata records ``names`` and the number of files, so that a later merge can delete the sources.

    Args:
        small: the rows of the small files, in VIDEO_SCHEMA.
        names: the names of all sources, small and sorted.
    """
    level = compute_level(len(small) + sum(file.file.rows for file in sorted_files))
    starts = [
        np.sort(small["id_high"].to_numpy())[::GROUP_ROWS],
        *(np.array(file.firsts, np.uint64) for file in sorted_files),
    ]
    # The first ``id_high`` of each merged file. Each is the hash of a row, so that no file is empty.
    cuts = [int(cut) for cut in np.unique(np.sort(np.concatenate(starts))[::_PART_GROUPS])]
    record = json.dumps({"of": names, "parts": len(cuts)})
    for first, end in zip(cuts, [*cuts[1:], 2**64], strict=True):
        last = end - 1
        within = [file for file in sorted_files if file.file.first <= last and file.file.last >= first]
        tables = (file.read(file.find_row_groups(first, last), VIDEO_SCHEMA.names) for file in within)
        rows = pa.concat_tables([small, *tables])
        at_least = pc.greater_equal(rows["id_high"], pa.scalar(first, pa.uint64()))
        rows = rows.filter(pc.and_(at_least, pc.less_equal(rows["id_high"], pa.scalar(last, pa.uint64()))))
        live = select_surviving(rows)
        result.rows += len(live)
        result.superseded += len(rows) - len(live)
        name, data = serialize_sorted(level, live, {_MERGE: record}, made_with, GROUP_ROWS)
        store.put(name, data)
        result.written.append(name)


def _delete_old_sources(
    store: Store, sorted_files: Sequence[SortedFile], present: set[str], keep: timedelta, result: MergeResult
) -> set[str]:
    """Delete the sources of merges whose files are all at least ``keep`` old; return the sources of younger merges.

    Only files of ``present`` are deleted or returned. A merge of which a written file is missing, or vanishes
    meanwhile, is ignored: it was interrupted, or its files were merged again. Deleted names are added to
    ``result.deleted``.

    Args:
        keep: zero deletes the sources whatever their age.
    """
    merges: dict[bytes, list[SortedFile]] = defaultdict(list)
    for file in sorted_files:
        merges[file.metadata.get(_MERGE, b"{}")].append(file)
    merged_names: set[str] = set()
    for text, files in merges.items():
        merge_record = json.loads(text)
        sources = present.intersection(merge_record.get("of", ()))
        # Rows of an interrupted merge are merged again.
        if not sources or len(files) != merge_record["parts"]:
            continue
        with suppress(FileNotFoundError):
            # If the clock of the store is ahead, new files have a negative age.
            if not keep or all(store.compute_age(file.file.name) >= keep for file in files):
                for name in sorted(sources):
                    store.delete(name)
                    result.deleted.append(name)
            merged_names |= sources
    return merged_names - {*result.deleted}


def compute_level(rows: int) -> int:
    """Return the level of a merge of ``rows`` rows: 1 up to 4,096 rows, and one more for each factor of 8."""
    return 1 + max(0, math.ceil(math.log(max(rows, 1) / GROUP_ROWS, _GROWTH)))


def select_surviving(rows: pa.Table) -> pa.Table:
    """Return the live row of each video, sorted by the hash of its id; superseded rows are dropped.

    If rows were dropped, ``earlier_attempts`` is set to the most attempts on another file under the id. Over several
    merges this is a lower bound.
    """
    order, earlier = find_live_indices(make_rule_columns(rows))
    live = rows.take(pa.array(order))
    if len(live) == len(rows):
        return live
    column = live.schema.get_field_index("earlier_attempts")
    return live.set_column(column, VIDEO_SCHEMA.field("earlier_attempts"), pa.array(earlier, pa.int32()))
