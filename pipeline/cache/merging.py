"""Merging the files of the videos table: fewer files, sorted, without the rows that others have superseded.

What is merged are the small files that wait and every level of sorted files that is no larger than the result, so that
there are few levels and a row is written again a few times in all. The files that were read stay until the merged ones
are ``keep`` old, so that readers go on; a later merge deletes them. A kill at any point leaves files whose rows are
there twice, which the rule of ``pipeline.cache.live`` makes harmless; so do two merges at once.
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

from pipeline.cache.live import find_live, rule_columns
from pipeline.cache.schema import VIDEO_SCHEMA
from pipeline.cache.table import FILE_ROWS, GROUP_ROWS, SortedFile, VideosTable, sorted_file, table_files
from pipeline.errors import CorruptShard
from pipeline.storage.stores import Store

KEEP = timedelta(minutes=10)  # for so long readers may still read files that were merged
WAITING = 64  # small files of a run that goes on, before it merges them
WAITING_AT_END = 16  # small files, before a run that ends merges them
_GROWTH = 8  # each level holds so many times the rows of the one below
_PART_GROUPS = FILE_ROWS * 3 // 4 // GROUP_ROWS  # about so many row groups make a merged file
_WHILE_RUNNING = 2**21  # rows that a run merges at most, in half a minute: jobs.compact merges the rest
_AT_ONCE = 2**20  # rows of small files that one step takes into memory
_FILES_AT_ONCE = 4096  # small files in one merge: the merged file's footer holds their names
_MERGE = b"merge"  # in the metadata of a sorted file: JSON of the files that it was merged from, and in how many parts


@dataclass
class Merged:
    """The result of merging the files of the videos table.

    Attributes:
        read: files that were merged.
        written: files that hold their rows now.
        deleted: files of earlier merges.
        rows: of the written files.
        superseded: rows that are in none of them.
        waiting: merged files that stay until the written ones are old enough.
        foreign: files of another identity, which are left alone.
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
        """Yield lines for the user about what was done."""
        if self.read:
            gone = f", {self.superseded:,} superseded rows less" if self.superseded else ""
            yield f"{len(self.read):,} files merged into {len(self.written):,} of {self.rows:,} rows{gone}"
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
    most_rows: float = math.inf,
) -> Merged:
    """Merge the small files that wait, and ``everything`` into one level where that is asked for.

    ``made_with`` is the fingerprint of the cache's identity; levels of more than ``most_rows`` are left.

    Raises CorruptShard where a file is damaged, which leaves all as it was, FileNotFoundError where another merge
    deleted a file meanwhile, and OSError.
    """
    started = time.monotonic()
    done = Merged()
    while _Step(store, made_with, done, everything, keep, most_rows).carry_out():
        pass
    done.seconds = time.monotonic() - started
    return done


def merge_at_once(store: Store, made_with: str | None) -> None:
    """Merge a table that nobody reads into one level, and delete the files that it was merged from. Raises as merge."""
    for _ in range(2):  # the second one deletes what the first has merged
        merge(store, made_with, everything=True, keep=timedelta(0))


def try_merge(store: Store, made_with: str | None, at_least: int, say: Callable[[str], object]) -> None:
    """Merge where more than ``at_least`` small files wait. What fails here costs no row: ``say`` tells the user."""
    try:
        if sum(not file.level for file in table_files(store)) > at_least:
            merge(store, made_with, most_rows=_WHILE_RUNNING)
    except (CorruptShard, OSError) as error:
        say(f"warning: the files of the videos table were not merged ({error}); python -m jobs.compact tries again")


class _Step:
    """One merge of as many rows of small files as memory holds, and of the levels that go with them."""

    def __init__(
        self,
        store: Store,
        made_with: str | None,
        done: Merged,
        everything: bool,
        keep: timedelta,
        most_rows: float,
    ) -> None:
        self._store, self._made_with, self._done = store, made_with, done
        self._everything, self._keep, self._most_rows = everything, keep, most_rows
        self._table = VideosTable(store, made_with)
        files = table_files(store)
        opened = [self._table.open_sorted(file.name) for file in files if file.level]
        self._sorted = [file for file in opened if file is not None]
        self._covered = self._delete_old({file.name for file in files})
        gone = self._covered.union(done.deleted)
        self._small = [file for file in files if not file.level and file.name not in gone]

    def carry_out(self) -> bool:
        """Merge once, and return whether more is left to do."""
        tables, names, left = self._read_small()
        self._done.foreign = list(self._table.foreign)
        self._done.waiting = len(self._covered)
        n_small = sum(map(len, tables))
        chosen = self._levels(n_small, whole=self._everything and not left)
        if not names and (_disjoint(chosen) or not self._everything):
            return False
        total = n_small + sum(file.file.rows for file in chosen)
        small = pa.concat_tables([VIDEO_SCHEMA.empty_table(), *tables])
        names += [file.file.name for file in chosen]
        self._write(small, chosen, sorted(names), total)
        self._done.read += names
        self._done.waiting += len(names)
        return left

    def _read_small(self) -> tuple[list[pa.Table], list[str], bool]:
        """Read small files up to the limits of one step: (their rows, their names, whether more are left)."""
        tables: list[pa.Table] = []
        names: list[str] = []
        n_rows = 0
        all_names = [file.name for file in self._small]
        for name, rows in self._table.read_small(all_names, VIDEO_SCHEMA.names):
            tables.append(rows)
            names.append(name)
            n_rows += len(rows)
            if n_rows >= _AT_ONCE or len(names) >= _FILES_AT_ONCE:
                return tables, names, name != all_names[-1]
        return tables, names, False

    def _levels(self, n_rows: int, *, whole: bool) -> list[SortedFile]:
        """Choose the sorted files that are merged with so many rows of small ones."""
        waiting = [file for file in self._sorted if file.file.name not in self._covered]
        if whole:
            return waiting
        if not n_rows:
            return []
        by_level: dict[int, list[SortedFile]] = defaultdict(list)
        for file in waiting:
            by_level[file.file.level].append(file)
        chosen: list[SortedFile] = []
        for level in sorted(by_level):
            of_level = sum(file.file.rows for file in by_level[level])
            if level > level_of(n_rows) or of_level > self._most_rows:
                break
            chosen += by_level[level]
            n_rows += of_level
        return chosen

    def _write(self, small: pa.Table, chosen: Sequence[SortedFile], names: list[str], total: int) -> None:
        """Write the live rows of all, a range of hashes a file."""
        cuts = _cuts(small, chosen)
        merge = json.dumps({"of": names, "parts": len(cuts)})
        for first, end in zip(cuts, [*cuts[1:], 2**64], strict=True):
            last = end - 1
            rows = pa.concat_tables([_within(small, first, last), *_read_within(chosen, first, last)])
            live = surviving(rows)
            self._done.rows += len(live)
            self._done.superseded += len(rows) - len(live)
            name, data = sorted_file(level_of(total), live, {_MERGE: merge}, self._made_with, GROUP_ROWS)
            self._store.put(name, data)
            self._done.written.append(name)

    def _delete_old(self, present: set[str]) -> set[str]:
        """Delete what merged files of age ``keep`` hold; returns what younger ones hold, which is not merged again."""
        merges: dict[bytes, list[SortedFile]] = defaultdict(list)
        for file in self._sorted:
            merges[file.metadata.get(_MERGE, b"{}")].append(file)
        covered: set[str] = set()
        for text, files in merges.items():
            merged = json.loads(text)
            sources = present.intersection(merged.get("of", ()))
            if not sources or len(files) != merged["parts"]:  # the merge was interrupted, so its rows are merged again
                continue
            with suppress(FileNotFoundError):
                if all(self._store.age(file.file.name) >= self._keep for file in files):
                    for name in sorted(sources):
                        self._store.delete(name)
                        self._done.deleted.append(name)
                covered |= sources
        self._sorted = [file for file in self._sorted if file.file.name not in self._done.deleted]
        return covered - {*self._done.deleted}


def level_of(rows: int) -> int:
    """Return the level of so many rows: 1 up to GROUP_ROWS, and one more for each _GROWTH times as many."""
    return 1 + max(0, math.ceil(math.log(max(rows, 1) / GROUP_ROWS, _GROWTH)))


def _disjoint(files: Sequence[SortedFile]) -> bool:
    """Return whether no two of the files may hold rows of one video."""
    bounds = sorted((file.file.first, file.file.last) for file in files)
    return all(before[1] < after[0] for before, after in pairwise(bounds))


def _cuts(small: pa.Table, chosen: Sequence[SortedFile]) -> list[int]:
    """Return the ``id_high`` at which each merged file begins, that of a row, so that no file is empty."""
    starts = [np.sort(small["id_high"].to_numpy())[::GROUP_ROWS], *(np.array(f.firsts, np.uint64) for f in chosen)]
    return [int(cut) for cut in np.unique(np.sort(np.concatenate(starts))[::_PART_GROUPS])]


def _read_within(files: Sequence[SortedFile], first: int, last: int) -> list[pa.Table]:
    """Read the rows of each file whose ``id_high`` is from ``first`` to ``last``."""
    overlapping = [file for file in files if file.file.first <= last and file.file.last >= first]
    return [_within(file.read(file.groups_of(first, last), VIDEO_SCHEMA.names), first, last) for file in overlapping]


def _within(rows: pa.Table, first: int, last: int) -> pa.Table:
    """Select the rows whose ``id_high`` is from ``first`` to ``last``."""
    high = rows["id_high"]
    at_least = pc.greater_equal(high, pa.scalar(first, pa.uint64()))
    return rows.filter(pc.and_(at_least, pc.less_equal(high, pa.scalar(last, pa.uint64()))))


def surviving(rows: pa.Table) -> pa.Table:
    """Return the live row of each video in the order of keys, with the count of other files tried under its id.

    Where rows of three files meet in several merges that is the least it can have been.
    """
    order, earlier = find_live(rule_columns(rows))
    live = rows.take(pa.array(order))
    if len(live) == len(rows):
        return live
    place = live.schema.get_field_index("earlier_attempts")
    return live.set_column(place, VIDEO_SCHEMA.field("earlier_attempts"), pa.array(earlier, pa.int32()))
