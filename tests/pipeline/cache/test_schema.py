"""The Parquet contract: where row groups end, what every column means, and what a footer is."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cache.schema import (
    FOOTER_TAIL,
    VIDEO_SCHEMA,
    digest,
    footer_length,
    footer_of,
    open_parquet,
    parse_footer,
    tier_row_counts,
    token_schema,
    write_parquet,
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


def table_of(n_rows: int) -> pa.Table:
    vectors = [bytes([i % 256]) * 16 for i in range(n_rows)]
    return pa.table({"n": pa.array(range(n_rows), pa.int32()), "v": pa.array(vectors, pa.binary(16))})


def test_a_file_has_the_row_groups_that_were_asked_for(tmp_path):
    (tmp_path / "a.parquet").write_bytes(write_parquet(table_of(10), [3, 1, 6]))
    found = pq.read_metadata(tmp_path / "a.parquet")
    assert [found.row_group(i).num_rows for i in range(3)] == [3, 1, 6] and found.num_row_groups == 3
    assert pq.read_table(tmp_path / "a.parquet").equals(table_of(10))
    with pytest.raises(AssertionError):
        write_parquet(table_of(10), [3, 6])
    assert open_parquet(pa.BufferReader(write_parquet(table_of(0)))).read().equals(table_of(0))


def test_the_footer_is_what_its_length_says():
    data = write_parquet(table_of(5), [5]).to_pybytes()
    footer = bytes(footer_of(memoryview(data)))
    assert data.endswith(footer) and footer.endswith(b"PAR1") and len(footer) == footer_length(data[-FOOTER_TAIL:])
    assert parse_footer(footer).num_rows == 5
    for tail in (b"", b"PAR1", bytes(8), data[-FOOTER_TAIL:-1] + b"2"):
        with pytest.raises(ValueError, match="not a Parquet file"):
            footer_length(tail)


def test_a_digest_is_of_the_bytes_however_they_are_cut():
    assert digest(b"ab", b"c") == digest(b"abc") == digest(np.frombuffer(b"abc", np.uint8)) != digest(b"abd")
    assert digest(b"").startswith("blake2b:") and len(digest(b"")) == len("blake2b:") + 32
