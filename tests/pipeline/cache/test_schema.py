"""The Parquet contract: where row groups end, what every column means, and what a footer is."""

import numpy as np
import pyarrow as pa

from pipeline.cache.schema import (
    VIDEO_SCHEMA,
    build_token_schema,
    compute_tier_row_counts,
    hash_bytes,
)

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
    columns = [
        f"{field.name} {field.type}".replace("item: ", "") + ("" if field.nullable else " not null")
        for field in VIDEO_SCHEMA
    ]
    assert columns == " ".join(VIDEO_COLUMNS.split()).split(", ")


def test_token_columns_are_as_wide_as_their_vectors():
    schema = build_token_schema(8, 2, {"token_key": 4, "token_attention": 1})
    widths = {field.name: field.type.byte_width for field in schema if pa.types.is_fixed_size_binary(field.type)}
    assert widths == {"token": 16, "deepstack_0": 16, "deepstack_1": 16, "token_key": 8, "token_attention": 2}
    assert schema.names[-2:] == ["token_key", "token_attention"]  # who does not ask for them reads none of them


def test_a_digest_is_of_the_bytes_however_they_are_cut():
    assert (
        hash_bytes(b"ab", b"c")
        == hash_bytes(b"abc")
        == hash_bytes(np.frombuffer(b"abc", np.uint8))
        != hash_bytes(b"abd")
    )
    assert hash_bytes(b"").startswith("blake2b:") and len(hash_bytes(b"")) == len("blake2b:") + 32
