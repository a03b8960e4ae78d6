"""Merging the files of the videos table: fewer files, sorted, without superseded rows.

A merge reads the small files, and every level of sorted files that is no larger than the result. So there are few
levels, and a row is written again a few times in all. The source files stay for readers until the merged files are
``keep`` old; a later merge deletes them. A kill at any point, or two merges at once, leave rows in two files, which the
rule of ``pipeline.cache.live`` makes harmless.
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

from pipeline.cache.live import find_live, make_rule_columns
from pipeline.cache.schema import VIDEO_SCHEMA
from pipeline.cache.table import FILE_ROWS, GROUP_ROWS, SortedFile, VideosTable, list_table_files, serialise_sorted
from pipeline.errors import CorruptShard
from pipeline.storage.stores import Store

KEEP = timedelta(minutes=10)  # merged files stay this long for readers
MAX_WAITING_FILES = 64  # a running run merges more small files than this
MAX_WAITING_AT_END = 16  # a run that ends merges more small files than this
_GROWTH = 8  # the rows of a level relative to the level below
_PART_GROUPS = FILE_ROWS * 3 // 4 // GROUP_ROWS  # row groups of a merged file, about
_MAX_ROWS_WHILE_RUNNING = 2**21  # rows that are merged in half a minute; jobs.compact merges more
_MAX_ROWS_PER_STEP = 2**20  # rows of small files in memory
_MAX_FILES_PER_STEP = 4096  # small files in one merge: the merged file's footer holds their names
_MERGE = b"merge"  # in the metadata of a sorted file: JSON of the files that it was merged from, and in how many parts


@dataclass
class Merged:
    """The result of merging the files of the videos table.

    Attributes:
        read: files that were merged.
        written: files that have their rows now.
        deleted: source files of earlier merges.
        rows: rows of the written files.
        superseded: rows that were dropped.
        waiting: source files that stay until the written files are old enough.
        foreign: files of another identity, which are not merged.
        seconds: wall time.
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
        """Yield lines for the user about the result."""
        if self.read:
            superseded_note = f", {self.superseded:,} superseded rows less" if self.superseded else ""
            yield f"{len(self.read):,} files merged into {len(self.written):,} of {self.rows:,} rows{superseded_note}"
        else:
            yield "nothing to merge"
        if self.deleted:
            yield f"{len(self.deleted):,} files of earlier merges deleted"
        if self.waiting:
            yield f"{self.waiting:,} merged files stay for a while, for those who read them"
        if self.foreign:
            yield f"warning: {len(self.foreign)} files were made with other settings and left alone: {self.foreign[0]}"


def merge(
    store: Store,
    made_with: str | None,
    *,
    everything: bool = False,
    keep: timedelta = KEEP,
    max_rows: float = math.inf,
) -> Merged:
    """Merge the small files with fitting levels of sorted files, or ``everything`` into one level; return the counts.

    ``made_with`` is the fingerprint of the cache's identity; levels of more than ``max_rows`` are not merged. Files
    that were merged stay for readers: a merge deletes the sources of earlier merges that are ``keep`` old.

    Raises CorruptShard for a damaged file (no row is lost), FileNotFoundError if another merge deleted a file
    meanwhile, and OSError.
    """
    start, result, has_more = time.monotonic(), Merged(), True
    while has_more:  # a step merges as many rows of small files as memory holds
        table, files = VideosTable(store, made_with), list_table_files(store)
        sorted_files = list(table.iter_sorted(files))
        merged_names = _delete_old_sources(store, sorted_files, {file.name for file in files}, keep, result)
        absent = merged_names.union(result.deleted)
        small = [file.name for file in files if not file.is_sorted and file.name not in absent]
        tables, names, has_more = _read_small(table, small)
        result.foreign, result.waiting = list(table.foreign), len(merged_names)
        n_small = sum(map(len, tables))
        chosen = [file for file in sorted_files if file.file.name not in absent]
        if not everything or has_more:
            chosen = _choose_levels(chosen, n_small, max_rows)
        bounds = sorted((file.file.first, file.file.last) for file in chosen)
        is_disjoint = all(before[1] < after[0] for before, after in pairwise(bounds))  # no two have rows of one video
        if not names and (is_disjoint or not everything):
            break
        names += [file.file.name for file in chosen]
        rows = pa.concat_tables([VIDEO_SCHEMA.empty_table(), *tables])
        _write(store, made_with, rows, chosen, sorted(names), result)
        result.read += names
        result.waiting += len(names)
    result.seconds = time.monotonic() - start
    return result


def merge_fully(store: Store, made_with: str | None) -> None:
    """Merge a table without readers into one level, and delete its source files at once. Raises as merge."""
    for _ in range(2):  # the second merge deletes the sources of the first
        merge(store, made_with, everything=True, keep=timedelta(0))


def try_merge(store: Store, made_with: str | None, at_least: int, say: Callable[[str], object]) -> None:
    """Merge if there are more than ``at_least`` small files, without levels of more than two million rows.

    An error loses no row and is not raised: ``say`` gets a warning.
    """
    try:
        if sum(not file.is_sorted for file in list_table_files(store)) > at_least:
            merge(store, made_with, max_rows=_MAX_ROWS_WHILE_RUNNING)
    except (CorruptShard, OSError) as error:
        say(f"warning: the files of the videos table were not merged ({error}); python -m jobs.compact tries again")


def _read_small(table: VideosTable, all_names: Sequence[str]) -> tuple[list[pa.Table], list[str], bool]:
    """Read small files up to the limits of one step: (their rows, their names, True if files are left)."""
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
    """Choose which of the sorted files to merge with ``n_rows`` rows of small files; none if ``n_rows`` is 0.

    These are complete levels, from the lowest on, up to the level of all rows chosen so far. A level of more than
    ``max_rows`` rows ends the choice.
    """
    by_level: dict[int, list[SortedFile]] = defaultdict(list)
    for file in sorted_files if n_rows else ():
        by_level[file.file.level].append(file)
    files: list[SortedFile] = []
    for level in sorted(by_level):
        of_level = sum(file.file.rows for file in by_level[level])
        if level > find_level(n_rows) or of_level > max_rows:
            break
        files += by_level[level]
        n_rows += of_level
    return files


def _write(
    store: Store,
    made_with: str | None,
    small: pa.Table,
    sorted_files: Sequence[SortedFile],
    names: list[str],
    result: Merged,
) -> None:
    """Write the live rows of all sources as sorted files, a range of hashes a file, and count them in the result.

    ``names`` are the names of the sources, for the metadata.
    """
    level = find_level(len(small) + sum(file.file.rows for file in sorted_files))
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
        tables = (file.read(file.groups_of(first, last), VIDEO_SCHEMA.names) for file in within)
        rows = pa.concat_tables([small, *tables])
        at_least = pc.greater_equal(rows["id_high"], pa.scalar(first, pa.uint64()))
        rows = rows.filter(pc.and_(at_least, pc.less_equal(rows["id_high"], pa.scalar(last, pa.uint64()))))
        live = select_surviving(rows)
        result.rows += len(live)
        result.superseded += len(rows) - len(live)
        name, data = serialise_sorted(level, live, {_MERGE: record}, made_with, GROUP_ROWS)
        store.put(name, data)
        result.written.append(name)


def _delete_old_sources(
    store: Store, sorted_files: Sequence[SortedFile], present: set[str], keep: timedelta, result: Merged
) -> set[str]:
    """Delete the sources of merges that are ``keep`` old; return the sources of younger merges, to be left alone.

    ``present`` are the names of all files.
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
            # A store whose clock is ahead gives new files an age below zero.
            if not keep or all(store.age(file.file.name) >= keep for file in files):
                for name in sorted(sources):
                    store.delete(name)
                    result.deleted.append(name)
            merged_names |= sources
    return merged_names - {*result.deleted}


def find_level(rows: int) -> int:
    """Return the level of a merge of ``rows`` rows: 1 up to GROUP_ROWS, one more for each factor _GROWTH."""
    return 1 + max(0, math.ceil(math.log(max(rows, 1) / GROUP_ROWS, _GROWTH)))


def select_surviving(rows: pa.Table) -> pa.Table:
    """Return the live row of each video in the order of keys; superseded rows are dropped.

    ``earlier_attempts`` gets the attempts on other files under the id. After several merges it is a lower bound.
    """
    order, earlier = find_live(make_rule_columns(rows))
    live = rows.take(pa.array(order))
    if len(live) == len(rows):
        return live
    column = live.schema.get_field_index("earlier_attempts")
    return live.set_column(column, VIDEO_SCHEMA.field("earlier_attempts"), pa.array(earlier, pa.int32()))
