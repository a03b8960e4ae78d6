"""The Parquet contract: where row groups end, what every column means, and what a footer is."""

import numpy as np
import pyarrow as pa

from pipeline.cache.schema import (
    VIDEO_SCHEMA,
    digest,
    tier_row_counts,
    token_schema,
)


def test_row_groups_end_at_the_tiers():
    assert tier_row_counts(6272, 1568, 0.25, nested=True) == [627, 313, 314, 314]
    assert tier_row_counts(6272, 6272, 1.0, nested=True) == [627, 313, 314, 314, 1568, 3136]
    assert tier_row_counts(6272, 1568, 0.25, nested=False) == [1568]
    assert tier_row_counts(4, 1, 0.25, nested=True) == [1]
    assert all(n > 0 for m in range(1, 60) for n in tier_row_counts(m, max(1, m // 4), 0.25, nested=True))


def test_every_column_says_what_it_means():
    for field in (*VIDEO_SCHEMA, *token_schema(8, 2, {"token_key": 4})):
        assert field.metadata[b"meaning"], field.name


def test_token_columns_are_as_wide_as_their_vectors():
    schema = token_schema(8, 2, {"token_key": 4, "token_attention": 1})
    widths = {field.name: field.type.byte_width for field in schema if pa.types.is_fixed_size_binary(field.type)}
    assert widths == {"token": 16, "deepstack_0": 16, "deepstack_1": 16, "token_key": 8, "token_attention": 2}
    assert schema.names[-2:] == ["token_key", "token_attention"]  # who does not ask for them reads none of them


def test_a_digest_is_of_the_bytes_however_they_are_cut():
    assert digest(b"ab", b"c") == digest(b"abc") == digest(np.frombuffer(b"abc", np.uint8)) != digest(b"abd")
    assert digest(b"").startswith("blake2b:") and len(digest(b"")) == len("blake2b:") + 32
