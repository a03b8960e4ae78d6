"""Rows that a token shard does not have are refused with the kind of damage; verify/test_checks.py damages bytes."""

import pytest

from pipeline import CorruptShard, TokenCache
from pipeline.cache.token_shard import TokenRows, TokenShard
from tests.pipeline.caches import make_cache, random_tokens

COLUMNS = ("video_id", "index", "token")


@pytest.mark.parametrize(
    ("change", "keep", "columns", "kind"),
    [
        ({"first_row_group": 6}, 25, COLUMNS, "rows"),
        ({"first_row_group": -1}, 25, COLUMNS, "rows"),
        ({"row_counts": [10, 5]}, 18, COLUMNS, "rows"),
        ({"row_counts": [9, 5, 5, 6]}, 18, COLUMNS, "rows"),
        ({}, 25, ("token", "deepstack_0"), "schema"),
    ],
)
def test_rows_and_columns_that_are_not_there_are_refused(tmp_path, change, keep, columns, kind):
    store = make_cache(tmp_path, {name: random_tokens(i, (4, 25, 16)) for i, name in enumerate("ab")})
    row = TokenCache(tmp_path).metadata("b")
    assert row["row_counts"] == [10, 5, 5, 5] and row["first_row_group"] == 4
    shard = TokenShard(store, row["token_shard"], row["footer_hash"])
    with pytest.raises(CorruptShard) as caught:
        shard.read(TokenRows({**row, **change}, keep, columns))
    assert caught.value.kind == kind


def test_a_store_that_fails_is_no_damage(tmp_path):
    (tmp_path / "shard").mkdir()
    with pytest.raises(OSError) as caught:
        TokenShard(make_cache(tmp_path, {}), "shard", "")
    assert not isinstance(caught.value, CorruptShard)
