"""The Parquet contract: row groups, columns and footers; and vectors from the pages of a token shard."""

from __future__ import annotations

import errno
import io
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import CorruptShard, TokenCache
from pipeline.cache import schema
from pipeline.cache.pages import copy_vectors_to_rows, find_plain_columns, get_plain_page_range
from pipeline.cache.schema import VIDEO_SCHEMA, build_token_schema, compute_tier_row_counts, hash_bytes
from pipeline.cache.token_shard import TokenRequest, TokenShard
from pipeline.storage.stores import LocalStore
from tests.builders.caches import make_cache, random_tokens
from tests.pipeline.damage import rewrite_row

#: The columns of the files of the videos table, in their order.
VIDEO_COLUMNS = """
video_id string not null, status string not null, attempts int32 not null, run_id string not null, id_high uint64,
id_low uint64, clip_key uint64, rewritten int32, earlier_attempts int32, tie_break uint64, source_size int64,
n_tokens int32, n_total int32, hidden_size int32, decode_warnings int32, backend_note string, color_transfer string,
sample_aspect_ratio string, uneven_positions int32, shared_positions int32, error_class string, error_stage string,
decode_s double, encode_s double, prune_s double, write_s double, frames_by_rate int32, token_shard string,
uri string not null, start_s double, end_s double, source_hash string, error_message string, error_signal int32,
retryable bool, backend string, backend_version string, codec string, first_row_group int32, row_counts list<int32>,
footer_hash string, checksum string, retention_ratio double, nested bool, n_frames int32, tokens_per_frame int32,
frame_indices list<int64>, timestamps list<double>, fps double, duration_s double, source_frames int64,
clip_frames int64, n_repeated int32, source_width int32, source_height int32, width int32, height int32,
kept_per_frame list<int32>, temporal_density list<float>, manifest string, runtime string, model_extra string,
token_codec string, token_block int32, tower_hash string, source_shard string, source_offset int64, clip_fps double,
source_mark uint64, source_sample uint64
"""


def test_row_groups_end_at_the_tiers():
    assert compute_tier_row_counts(6272, 1568, 0.25, nested=True) == [627, 313, 314, 314]
    assert compute_tier_row_counts(6272, 6272, 1.0, nested=True) == [627, 313, 314, 314, 1568, 3136]
    assert compute_tier_row_counts(6272, 1568, 0.25, nested=False) == [1568]
    assert compute_tier_row_counts(4, 1, 0.25, nested=True) == [1]
    assert all(n > 0 for m in range(1, 60) for n in compute_tier_row_counts(m, max(1, m // 4), 0.25, nested=True))


def test_every_column_says_what_it_means():
    for field in (*VIDEO_SCHEMA, *build_token_schema(8, 2, {"token_key": 4})):
        assert field.metadata[b"meaning"], field.name


def test_the_columns_of_the_videos_table_keep_their_order_and_types():
    """Both are part of the format: the order of keys in ``VideoRecord`` is the order of columns in every file."""
    columns = (f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in VIDEO_SCHEMA)
    assert ", ".join(columns).replace("item: ", "") == " ".join(VIDEO_COLUMNS.split())


def test_token_columns_are_as_wide_as_their_vectors():
    columns = build_token_schema(8, 2, {"token_key": 4, "token_attention": 1})
    widths = {field.name: field.type.byte_width for field in columns if pa.types.is_fixed_size_binary(field.type)}
    assert widths == {"token": 16, "deepstack_0": 16, "deepstack_1": 16, "token_key": 8, "token_attention": 2}
    assert columns.names[-2:] == ["token_key", "token_attention"]  # who does not ask for them reads none of them


def test_a_digest_is_of_the_bytes_however_they_are_cut():
    whole = hash_bytes(b"abc")
    assert hash_bytes(b"ab", b"c") == whole == hash_bytes(np.frombuffer(b"abc", np.uint8)) != hash_bytes(b"abd")
    assert hash_bytes(b"").startswith("blake2b:") and len(hash_bytes(b"")) == len("blake2b:") + 32


@pytest.mark.parametrize(
    ("change", "keep", "columns", "kind"),
    [
        ({"first_row_group": 6}, 25, ("token",), "rows"),
        ({"first_row_group": -1}, 25, ("token",), "rows"),
        ({"row_counts": [10, 5]}, 18, ("token",), "rows"),
        ({"row_counts": [9, 5, 5, 6]}, 18, ("token",), "rows"),
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
    ["", ".", None, "tokens/", "videos/x", "tokens/folder", "tokens/..", "tokens/x\0", f"tokens/{'x' * 999}", "../x"],
)
def test_a_name_of_no_token_shard_is_damage(tmp_path, name):
    """A bare OSError ended jobs.inspect, and a folder's name came from somebody's videos table."""
    store = make_cache(tmp_path / "c", {"a": random_tokens(0, (4, 25, 16))})
    shutil.copy(*(store.root / name for name in store.names("tokens", ".parquet")), tmp_path / "x")
    (store.root / "tokens" / "folder").mkdir()
    rewrite_row(store, "a", lambda row: row.update(token_shard=name))
    with pytest.raises(CorruptShard, match=r"(token_shard|which is no file|missing)"):
        TokenCache(store.root).get("a")


N, WIDTH = 3000, 6  # Arrow ends a page where 1,024 rows have gone into it, and it has enough
BITS = np.random.default_rng(0).integers(-(2**15), 2**15, (N, WIDTH // 2), np.int16)


def vectors_table(nullable: bool = False) -> pa.Table:
    kind = pa.binary(WIDTH)
    column = pa.FixedSizeBinaryArray.from_buffers(kind, N, [None, pa.py_buffer(BITS)])
    field = pa.field("token", kind, nullable=nullable)
    return pa.table({"n": pa.array(range(N)), "token": column}, schema=pa.schema([pa.field("n", pa.int64()), field]))


def put(data: bytes, places: np.ndarray, rows: int) -> np.ndarray | None:
    """What ``copy_vectors_to_rows`` makes of the column in the file's only row group."""
    metadata = pq.read_metadata(io.BytesIO(data))
    number, width = find_plain_columns(metadata)["token"]
    pages = get_plain_page_range(metadata.row_group(0), number)
    if pages is None:
        return None
    out = np.zeros((rows, width // 2), np.int16)
    n_rows = metadata.row_group(0).num_rows
    return out if copy_vectors_to_rows(memoryview(data)[slice(*pages)], n_rows, places, out) else None


def written(**more) -> bytes:
    file = io.BytesIO()
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": True, "write_statistics": False}
    pq.write_table(vectors_table(more.pop("nullable", False)), file, **options | more)
    return file.getvalue()


PAGES = {
    "as-written-here": schema.write_parquet(vectors_table()).to_pybytes(),
    "several": written(data_page_size=100),
    "with-statistics": written(write_statistics=True),
}


@pytest.mark.parametrize("data", PAGES.values(), ids=PAGES)
def test_rows_go_to_their_places(data):
    order = np.random.default_rng(1).permutation(N)
    places = np.argsort(order)
    assert np.array_equal(put(data, places, N), BITS[order])
    assert np.array_equal(put(data, np.arange(1500)[::-1], 1500), BITS[:1500][::-1])  # the first ones of more


def test_other_pages_are_left_to_arrow():
    for more in (
        {"compression": "zstd"},
        {"use_dictionary": True},
        {"write_page_checksum": False},
        {"data_page_version": "2.0"},
        {"column_encoding": {"token": "BYTE_STREAM_SPLIT", "n": "PLAIN"}},
    ):
        assert put(written(**more), np.arange(N), N) is None, more
    assert find_plain_columns(pq.read_metadata(io.BytesIO(written(nullable=True)))) == {}


def test_no_flipped_bit_of_header_or_page_goes_unseen():
    data = bytearray(written())
    column = pq.read_metadata(io.BytesIO(bytes(data))).row_group(0).column(1)
    start, end = column.data_page_offset, column.data_page_offset + column.total_compressed_size
    whole, refused = np.arange(N), 0
    assert copy_vectors_to_rows(memoryview(bytes(data))[start:end], N, whole, np.zeros_like(BITS))
    for bit in [*range(8 * start, 8 * (start + 40)), *range(8 * (start + 40), 8 * end, 997)]:
        data[bit // 8] ^= 1 << bit % 8
        pages, out = memoryview(data)[start:end], np.zeros_like(BITS)
        done = copy_vectors_to_rows(pages, N, whole, out)
        assert not done or np.array_equal(out, BITS), bit
        refused += not done
        data[bit // 8] ^= 1 << bit % 8
    assert refused > 250
    for cut in (0, 1, 30, end - start - 1):
        assert not copy_vectors_to_rows(memoryview(data)[start : start + cut], N, whole, np.zeros_like(BITS))
