"""Find which row of a video counts, for readers: in the small files, which are in memory, and in each sorted one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.cache.live_rows import (
    RULE_COLUMNS,
    VIDEOS,
    VideoRows,
    belongs,
    completed,
    in_shard_order,
    live_rows,
    no_rows,
    ok_rows,
    small_rows,
    with_place,
)
from pipeline.cache.table import SortedFile, TableFile, table_files
from pipeline.keys import keys_of
from pipeline.rows import VideoRow
from pipeline.storage.stores import Store

# Of each row of small files; the rest of a row is read from its file when asked for.
LIVE_COLUMNS = (*RULE_COLUMNS, "video_id", "error_class", "n_tokens", "hidden_size")
_OPENED = 16  # sorted files whose ends are kept in memory, some 2 MB each
_TRIES = 5  # attempts to open a table whose files another run merges
_PLACED = ("id_high", "id_low", "token_shard", "first_row_group")  # what LiveShards are made of
_FEW = 256  # up to so many videos are searched for one by one


class Place(NamedTuple):
    """The place of a video's live row: its file and the row in it; ``fault`` is None where it is ok.

    ``rank`` is what the rule of ``pipeline.cache.live_rows`` compares: the lowest is live.
    """

    shard: str
    row: int
    attempts: int
    fault: str | None
    rank: tuple[int, int, int, int]


class LiveVideos:
    """The live row of every video of a cache. Threads may share it.

    Attributes:
        small: LIVE_COLUMNS of the live rows among the small files, with ``shard`` and ``row``.
        sorted: the sorted files.
        foreign: files of another identity than the cache's, whose rows are left out.
        files: all that there were when this was opened, whose rows these are.
    """

    def __init__(self, store: Store, made_with: str | None, small: pa.Table, files: Sequence[TableFile]) -> None:
        self._store, self._made_with = store, made_with
        self.small, self.sorted, self.foreign = small, list(files), list[str]()
        self.files: list[TableFile] = []
        self._place = {video_id: i for i, video_id in enumerate(small["video_id"].to_pylist())}
        self.rows = VideoRows(store, _OPENED)

    @classmethod
    def open(cls, store: Store, made_with: str | None = None) -> LiveVideos:
        """List the table, and read its small files: one LIST, and a GET each. Raises CorruptShard, OSError."""
        for attempt in range(_TRIES):
            files = table_files(store, VIDEOS)
            try:
                return cls._read(store, made_with, files)
            except FileNotFoundError:  # another run has merged the file since it was listed
                if attempt == _TRIES - 1:
                    raise
        raise AssertionError("not reached")

    @classmethod
    def _read(cls, store: Store, made_with: str | None, files: Sequence[TableFile]) -> LiveVideos:
        """Read the small files among ``files``, and note the sorted ones without reading them."""
        names = [file.name for file in files if not file.level]
        tables, foreign = [no_rows(LIVE_COLUMNS)], []
        for name, data in zip(names, store.read_all(names), strict=True):
            table = small_rows(store, name, data, LIVE_COLUMNS, made_with)
            if table is None:
                foreign.append(name)
            else:
                tables.append(with_place(table, name))
        small = live_rows(pa.concat_tables(tables).combine_chunks())
        live = cls(store, made_with, small, [file for file in files if file.level])
        live.foreign += foreign
        live.files += files
        return live

    def __reduce__(self) -> tuple[Any, ...]:
        return LiveVideos, (self._store, self._made_with, self.small, self.sorted)

    def find(self, video_id: str) -> Place | None:
        """Find the live row of a video, or None; at most two reads of each level of sorted files.

        Raises CorruptShard, FileNotFoundError where a file was merged since this was opened, and OSError.
        """
        try:
            high = int(keys_of(pa.array([video_id]))[0, 0])
        except UnicodeEncodeError:  # half of a surrogate pair is not valid text, so no id has one
            return None
        found = []
        if (at := self._place.get(video_id)) is not None:
            found.append(_place_of(self.small, at, self.small["shard"][at].as_py(), self.small["row"][at].as_py()))
        files = [file for file in self.sorted if file.holds(high)]
        look = partial(self._in_sorted, video_id, high)
        if len(files) > 1 and self._store.folder is None:  # so that the delays do not add up
            with ThreadPoolExecutor(len(files)) as pool:
                found += [place for place in pool.map(look, files) if place is not None]
        else:
            found += [place for place in map(look, files) if place is not None]
        return min(found, key=lambda place: place.rank, default=None)

    def row(self, video_id: str) -> VideoRow | None:
        """Read the live row of a video, or None where it has none. Raises as ``find``."""
        place = self.find(video_id)
        return None if place is None else self.rows(place.shard, place.row)

    def opened(self, file: TableFile) -> SortedFile | None:
        """Open a sorted file, or return None where its rows are of another identity."""
        opened = self.rows.opened(file.name)
        if belongs(opened.made_with, self._made_with):
            return opened
        if file.name not in self.foreign:
            self.foreign.append(file.name)
        return None

    def _in_sorted(self, video_id: str, high: int, file: TableFile) -> Place | None:
        """Find a video's row in one sorted file, or None; ``high`` is the first half of its id's hash."""
        opened = self.opened(file)
        if opened is None:
            return None
        for number in opened.groups_of(high, high):
            group = self.rows.group(file.name, number)
            ids = group["id_high"].to_numpy()
            for row in range(*np.searchsorted(ids, np.array([high, high + 1], np.uint64)).tolist()):
                if group["video_id"][row].as_py() == video_id:
                    return _place_of(group, row, file.name, number * opened.group_rows + row)
        return None

    def live(self, columns: Sequence[str]) -> pa.Table:
        """Read ``columns`` of every live row with ``shard`` and ``row``, by video_id. All files are read."""
        wanted = tuple(dict.fromkeys((*columns, *RULE_COLUMNS, "video_id")))
        tables = [self._of_small(wanted)]
        for file in self.sorted:
            if (opened := self.opened(file)) is not None:
                rows = completed(pa.concat_tables(opened.parts(wanted)), wanted)
                tables.append(with_place(rows, file.name))
        return live_rows(pa.concat_tables(tables)).select([*columns, "shard", "row"])

    def _of_small(self, columns: Sequence[str]) -> pa.Table:
        """Return these columns of the live rows in small files, read again where memory lacks them."""
        if set(columns) <= set(self.small.column_names):
            return self.small.select([*columns, "shard", "row"])
        tables = [no_rows(columns)]
        names = sorted(set(self.small["shard"].to_pylist()))
        for name, data in zip(names, self._store.read_all(names), strict=True):
            rows = small_rows(self._store, name, data, columns)
            mine = self.small["row"].filter(pc.equal(self.small["shard"], name))
            tables.append(with_place(rows, name).take(mine))
        return pa.concat_tables(tables)

    def of(self, video_ids: Collection[str], columns: Sequence[str]) -> pa.Table:
        """Read ``columns`` of the live rows of these videos, with ``shard`` and ``row``; for few, no others."""
        if len(video_ids) > _FEW or not self.sorted:
            table = self.live(("video_id", *(name for name in columns if name != "video_id")))
            wanted = pa.array(sorted(set(video_ids)), pa.string())
            return table.filter(pc.is_in(table["video_id"], value_set=wanted)).select([*columns, "shard", "row"])
        places = [place for video_id in sorted(set(video_ids)) if (place := self.find(video_id)) is not None]
        found = [{**self.rows(place.shard, place.row), "shard": place.shard, "row": place.row} for place in places]
        return pa.Table.from_pylist(found, schema=no_rows(columns).schema)

    def ok(self) -> list[str]:
        """List the ids of the videos that have tokens, sorted. All files are read."""
        return list(ok_rows(self.live(("video_id", "status")))["video_id"].to_pylist())

    def failed(self) -> dict[str, str]:
        """Map the ids of the failed videos to their error class. All files are read."""
        rows = self.live(("video_id", "status", "error_class"))
        failed = rows.filter(pc.equal(rows["status"], "failed"))
        classes = pc.fill_null(failed["error_class"], "internal").to_pylist()
        return dict(zip(failed["video_id"].to_pylist(), classes, strict=True))

    def most_tokens(self) -> int:
        """Return the largest number of stored tokens of a video. All files are read."""
        return int(pc.max(self.live(("n_tokens",))["n_tokens"]).as_py() or 0)

    def widths(self) -> set[int]:
        """Return the widths D of the tokens: one number, but for caches from before a second width was refused."""
        for file in self.sorted:
            opened = self.opened(file)
            if opened is not None:
                group = self.rows.group(file.name, 0)
                return widths_of(group) | widths_of(self.small)
        return widths_of(self.small)

    def shards(self) -> LiveShards:
        """Return the token shards of the videos that have tokens. Reads short columns of the whole table."""
        return LiveShards.of(ok_rows(self.live(("status", *_PLACED))))

    def shards_of(self, video_ids: Sequence[str]) -> LiveShards:
        """Return the token shards of these videos. Raises KeyError with the first that has no row."""
        rows = self.of(video_ids, ("video_id", *_PLACED))
        if missing := set(video_ids) - set(rows["video_id"].to_pylist()):
            raise KeyError(next(video_id for video_id in video_ids if video_id in missing))
        return LiveShards.of(rows)

    def find_places(self, shards: LiveShards) -> pa.Table:
        """Find the places of the videos of ``shards`` anew, in their order. Reads short columns of the whole table."""
        keys = ["id_high", "id_low"]
        order = shards.places.select(keys).append_column("order", pa.array(range(len(shards.places))))
        places = order.join(self.live(keys), keys, join_type="inner").sort_by("order").drop_columns(["order"])
        return _with_few_names(places)

    def __len__(self) -> int:
        """Count the videos with a row; one that is in several files is counted in each, as telling takes a search."""
        return len(self.small) + sum(file.rows for file in self.sorted)


@dataclass
class LiveShards:
    """The token shards of some videos, and where the rows of these videos are.

    Videos without tokens are under the name "".

    Attributes:
        names: [n], sorted: in the order in which runs wrote them.
        counts: [n] videos of each.
        places: ``shard``, ``row`` and the hash of the id of each video, in the order of the token shards and within
            these. TokenCache.rows_of finds them anew where files were merged.
    """

    names: pa.Array
    counts: NDArray[np.int64]
    places: pa.Table

    @classmethod
    def of(cls, rows: pa.Table) -> LiveShards:
        """Group rows by token shard; they have token_shard, first_row_group, shard and row."""
        named = pc.fill_null(rows["token_shard"], "")
        rows = in_shard_order(rows.set_column(rows.schema.get_field_index("token_shard"), "token_shard", named))
        shards = rows.group_by("token_shard", use_threads=False).aggregate([([], "count_all")])
        places = _with_few_names(rows.select(["id_high", "id_low", "shard", "row"]))
        return cls(shards["token_shard"].combine_chunks(), shards["count_all"].to_numpy(), places)

    def __len__(self) -> int:
        return len(self.counts)

    def name(self, number: int) -> str:
        """Return the name of the token shard of this number."""
        return str(self.names[number].as_py())

    def rows(self, number: int) -> list[tuple[str, int]]:
        """List the place (file, row) of each video of a token shard, in its order."""
        part = self.places.slice(int(self.counts[:number].sum()), int(self.counts[number]))
        return list(zip(part["shard"].to_pylist(), part["row"].to_pylist(), strict=True))


def _with_few_names(places: pa.Table) -> pa.Table:
    """Return places with each name of a file in memory once."""
    at = places.schema.get_field_index("shard")
    return places.set_column(at, "shard", places["shard"].dictionary_encode())


def widths_of(live: pa.Table) -> set[int]:
    """Return the different ``hidden_size`` of the live rows that are ok."""
    return set(pc.unique(ok_rows(live)["hidden_size"]).to_pylist())


def _place_of(rows: pa.Table, at: int, shard: str, row: int) -> Place:
    """Build the Place of the row number ``at`` of ``rows``, which have RULE_COLUMNS and error_class."""
    said: VideoRow = rows.select([*RULE_COLUMNS, "error_class"]).slice(at, 1).to_pylist()[0]
    state = {"removed": 0, "ok": 1}.get(said["status"], 2)
    fault = None if state == 1 else "removed" if state == 0 else said["error_class"] or "internal"
    rank = (state, -(said["attempts"] or 0), -(said["rewritten"] or 0), said["tie_break"])
    return Place(shard, row, said["attempts"] or 0, fault, rank)
