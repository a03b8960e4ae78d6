"""A token shard: what is read of it is what was committed, or it raises with the kind of damage."""

from pathlib import Path
from typing import NamedTuple

import pytest

from pipeline import CorruptShard
from pipeline.cache.table import VideosTable
from pipeline.cache.token_shard import TokenRows, TokenShard
from pipeline.rows import VideoRow
from pipeline.storage.stores import LocalStore
from tests.pipeline.caches import make_cache, random_tokens, read_live
from tests.pipeline.damage import flip

COLUMNS = ("video_id", "index", "token")


class Shard(NamedTuple):
    """A shard of the videos a and b: its store and file, and their rows of the videos table."""

    store: LocalStore
    file: Path
    rows: dict[str, VideoRow]

    def open(self) -> TokenShard:
        row = self.rows["a"]
        return TokenShard(self.store, row["token_shard"], row["footer_hash"])


@pytest.fixture
def shard(tmp_path) -> Shard:
    store = make_cache(tmp_path, {name: random_tokens(i, (4, 25, 16)) for i, name in enumerate("ab")})
    assert isinstance(store, LocalStore)
    table = VideosTable(store)
    rows = {row["video_id"]: table.read_row(row["shard"], row["row"]) for row in read_live(store).to_pylist()}
    return Shard(store, tmp_path / rows["a"]["token_shard"], rows)


@pytest.mark.parametrize("keep", [1, 10, 11, 24, 25])
def test_the_first_rows_of_a_video_are_read(shard, keep):
    row = shard.rows["b"]
    assert row["row_counts"] == [10, 5, 5, 5] and row["first_row_group"] == 4
    opened = shard.open()
    table, whole = opened.read(TokenRows(row, keep, COLUMNS)), opened.read(TokenRows(row, 25, COLUMNS))
    assert table.equals(whole.slice(0, keep)) and table.schema.names == list(COLUMNS)
    assert set(table["video_id"].to_pylist()) == {"b"}


def test_it_knows_its_size(shard):
    opened = shard.open()
    assert opened.n_bytes == shard.file.stat().st_size
    assert 0 < opened.n_footer < opened.n_bytes


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda file: file.unlink(), "missing"),
        (lambda file: file.write_bytes(b""), "footer"),
        (lambda file: file.write_bytes(b"PAR1"), "footer"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "footer"),
        (lambda file: flip(file, file.stat().st_size - 30), "footer"),
        (lambda file: file.write_bytes(file.read_bytes()[:-8] + b"\xff\xff\xff\x7fPAR1"), "footer"),
    ],
)
def test_another_footer_is_not_opened(shard, damage, kind):
    damage(shard.file)
    with pytest.raises(CorruptShard) as caught:
        shard.open()
    assert caught.value.kind == kind and str(shard.rows["a"]["token_shard"]) in str(caught.value)


def test_a_damaged_page_is_seen_by_who_reads_it_alone(shard):
    opened = shard.open()
    column = next(
        group.column(i)
        for group in [opened.metadata.row_group(4)]
        for i in range(group.num_columns)
        if group.column(i).path_in_schema == "token"
    )
    flip(shard.file, column.data_page_offset + column.total_compressed_size - 1)
    assert len(shard.open().read(TokenRows(shard.rows["a"], 25, COLUMNS))) == 25
    assert len(shard.open().read(TokenRows(shard.rows["b"], 25, ("video_id", "index")))) == 25
    with pytest.raises(CorruptShard) as caught:
        shard.open().read(TokenRows(shard.rows["b"], 25, COLUMNS))
    assert caught.value.kind == "damaged"


@pytest.mark.parametrize(
    ("change", "columns", "kind"),
    [
        ({"first_row_group": 6}, COLUMNS, "rows"),
        ({"first_row_group": -1}, COLUMNS, "rows"),
        ({"row_counts": [10, 5]}, COLUMNS, "rows"),
        ({"row_counts": [9, 5, 5, 6]}, COLUMNS, "rows"),
        ({}, ("token", "deepstack_0"), "schema"),
    ],
)
def test_rows_and_columns_that_are_not_there_are_refused(shard, change, columns, kind):
    keep = 18 if "row_counts" in change else 25
    with pytest.raises(CorruptShard) as caught:
        shard.open().read(TokenRows({**shard.rows["b"], **change}, keep, columns))
    assert caught.value.kind == kind


def test_a_store_that_fails_is_no_damage(shard):
    shard.file.unlink()
    shard.file.mkdir()
    with pytest.raises(OSError) as caught:
        shard.open()
    assert not isinstance(caught.value, CorruptShard)
