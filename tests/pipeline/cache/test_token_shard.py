"""Rows that a token shard does not have are refused with the kind of damage; verify/test_checks.py damages bytes."""

import errno

import pytest

from pipeline import CorruptShard, TokenCache
from pipeline.cache.token_shard import TokenRequest, TokenShard
from pipeline.storage.stores import LocalStore
from tests.builders.caches import make_cache, random_tokens
from tests.pipeline.damage import rewrite_row

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
        shard.read(TokenRequest({**row, **change}, keep, columns))
    assert caught.value.kind == kind


class Locked(LocalStore):
    """A store that refuses to open files."""

    def open(self, name):
        raise PermissionError(errno.EACCES, "Permission denied", name)


def test_a_store_that_fails_is_no_damage(tmp_path):
    with pytest.raises(PermissionError):
        TokenShard(Locked(tmp_path), "tokens/shard.parquet", "")


@pytest.mark.parametrize(
    "name",
    ["", ".", None, "tokens", "tokens/", "videos/x", "tokens/folder", "tokens/..", "tokens/x\0", f"tokens/{'x' * 999}"],
)
def test_a_name_of_no_token_shard_is_damage(tmp_path, name):
    """A bare OSError ended jobs.inspect, and a folder's name came from somebody's videos table."""
    store = make_cache(tmp_path, {"a": random_tokens(0, (4, 25, 16))})
    (tmp_path / "tokens" / "folder").mkdir()
    rewrite_row(store, "a", lambda row: row.update(token_shard=name))
    with pytest.raises(CorruptShard, match=r"(token_shard|which is no file|missing)"):
        TokenCache(tmp_path).get("a")
