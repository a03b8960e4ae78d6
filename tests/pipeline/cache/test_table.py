"""Files of the table: what a name tells, and that what is read of a sorted file is what was written."""

import random

import numpy as np
import pyarrow as pa
import pytest

from pipeline import CorruptShard, TokenCache
from pipeline.cache import table as table_files
from pipeline.cache.live import LiveVideos
from pipeline.cache.schema import VIDEO_SCHEMA
from pipeline.cache.table import SortedFile, build_table, list_table_files, parse_file_name, read_file, serialize_sorted
from pipeline.storage.stores import LocalStore
from tests.builders.caches import read_live, write_header

N = 300


def rows_of(count: int) -> pa.Table:
    """As many rows as a long run leaves, none of them with tokens."""
    records = [
        {"video_id": f"folder/v{i}", "run_id": "r", "uri": f"/x/{i}", "status": "failed", "attempts": 1 + i % 3}
        for i in range(count)
    ]
    return table_files.sort_by_key(build_table(records))


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return write_header(tmp_path)


def put_sorted(store: LocalStore, rows: pa.Table, group_rows: int = 64) -> str:
    """Put a file of several row groups."""
    name, data = serialize_sorted(2, rows, {}, None, group_rows)
    store.put(name, data)
    return name


def test_the_name_of_a_sorted_file_tells_what_it_holds(store):
    rows = rows_of(N)
    name = put_sorted(store, rows)
    file = parse_file_name(name)
    high = rows["id_high"].to_numpy()
    assert (file.level, file.rows, file.first, file.last) == (2, N, int(high[0]), int(high[-1]))
    assert file.holds(file.first) and file.holds(file.last) and not file.holds(file.last + 1)
    assert parse_file_name("videos/r-000001-aa.parquet").level == 0
    assert list_table_files(store) == [file]


def test_columns_and_row_groups_are_read_as_they_were_written(store, monkeypatch):
    rows = rows_of(N)
    file = SortedFile(store, parse_file_name(put_sorted(store, rows)))
    assert len(file.firsts) == -(-N // 64)
    assert file.read([0, 2], ["attempts", "id_high"]).equals(
        pa.concat_tables([rows.slice(0, 64), rows.slice(128, 64)]).select(["attempts", "id_high"])
    )
    monkeypatch.setattr("pipeline.cache.table._GROUPS_AT_ONCE", 2)
    assert pa.concat_tables(file.parts()).equals(rows)
    high = rows["id_high"].to_numpy()
    for at in (0, 63, 64, 65, 200, N - 1):
        groups = file.find_row_groups(int(high[at]), int(high[at]))
        assert at // 64 in groups and len(groups) <= 2


def test_each_video_is_found_and_no_other(store):
    rows = rows_of(N)
    put_sorted(store, rows)
    cache, found, live = TokenCache(store.root), LiveVideos.open(store), read_live(store, ("video_id",)).to_pylist()
    places = {row["video_id"]: row["row"] for row in live}
    for row in random.Random(0).sample(rows.to_pylist(), 40):
        assert cache.metadata(row["video_id"])["attempts"] == row["attempts"]
        assert found.find(row["video_id"]).row == places[row["video_id"]]
        assert row["video_id"] not in cache
    assert len(cache.failed) == N and cache.video_ids == []
    with pytest.raises(KeyError, match=f"\\(it has {N} rows\\)"):
        cache.metadata("folder/v")


@pytest.mark.parametrize("read", ["all", "short", "one", "find"])
def test_a_flipped_bit_anywhere_raises_or_changes_nothing(store, read):
    """A bit of every few bytes of the rows and of the tail; and a file that was cut off."""
    rows = rows_of(70)  # two row groups
    name = put_sorted(store, rows)
    path, file, draw = store.root / name, parse_file_name(name), random.Random(0)
    whole, known = path.read_bytes(), {row["video_id"]: row for row in rows.to_pylist()}
    short = ["id_high", "status", "attempts", "video_id"]

    def seen() -> pa.Table | bool:
        if read == "find":
            video_id = draw.choice(list(known))
            return TokenCache(store.root).metadata(video_id)["attempts"] == known[video_id]["attempts"]
        if read == "one":
            return SortedFile(store, file).read([1])
        return read_file(store, file, short if read == "short" else VIDEO_SCHEMA.names)

    good, n_rows, n_raised = seen(), len(whole) - file.n_tail, 0
    places = [*range(0, n_rows, 97), *range(n_rows, len(whole), 997)]
    for at in places:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        try:
            assert seen() == good, at
        except CorruptShard:
            n_raised += 1
    assert n_raised > (0.9 * len(places) if read == "all" else file.n_tail // 997)
    for cut in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptShard):
            seen()


class Counting(LocalStore):
    """Counts the slices that are read."""

    n_reads = 0

    def read_slice(self, name, start, end=None):
        self.n_reads += 1
        return super().read_slice(name, start, end)


def test_few_requests_find_a_video(store):
    """One listing opens the table; then its end and one row group of the file are read."""
    put_sorted(store, rows_of(N))
    counting = Counting(store.root)
    cache = TokenCache(store.root, store=counting)
    for _ in range(2):
        cache.metadata("folder/v7")
        assert counting.n_reads == 2


def test_keys_that_share_a_half_are_told_apart(store, monkeypatch):
    """Ids whose keys begin alike, at the end of a row group and the beginning of the next."""
    monkeypatch.setattr("pipeline.cache.live.hash_texts", lambda texts: np.array([[7, 0]], np.uint64))
    rows = rows_of(5)
    for name, values in (("id_high", [7] * 5), ("id_low", range(5))):
        rows = rows.set_column(rows.schema.get_field_index(name), rows.field(name), pa.array(values, pa.uint64()))
    put_sorted(store, rows, group_rows=2)
    cache = TokenCache(store.root)
    assert [cache.metadata(f"folder/v{i}")["attempts"] for i in range(5)] == [1, 2, 3, 1, 2]
    assert len(cache.failed) == 5


def test_rows_of_several_workers_become_the_same_file_as_one_table():
    numbers = random.Random(0)
    more = {"run_id": "r", "uri": "u", "status": "ok", "attempts": 1}
    times = [[numbers.random() for _ in range(768)] for _ in range(600)]
    whole = build_table([{"video_id": f"v{i}", "timestamps": row, **more} for i, row in enumerate(times)])
    parts = pa.concat_tables([whole.slice(start, 37) for start in range(0, len(whole), 37)])
    one, other = (table_files.serialize_small("r", 0, rows, None) for rows in (whole, table_files.add_keys(parts)))
    assert one == other
