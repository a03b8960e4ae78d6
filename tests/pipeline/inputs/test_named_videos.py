"""Rows of a manifest: checked together they are what each is alone, and no secret stays in a URI."""

import contextlib
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.inputs.named_videos import MANIFEST_SCHEMA, ManifestConverter, Roots
from pipeline.inputs.tables import read_row_batches

NAMES = st.text(st.sampled_from("ab./ \u3000\n:?é7"), max_size=8) | st.sampled_from(
    ["a/b.mp4", "/m/a.mp4", "/else/a.mp4", "s3://bucket/p/a.mp4", "s3://bucket/q/a.mp4", "s3://bucket/p/../a", "../a"]
)
SIZES = st.sampled_from([None, 0, 5, 5.0, "7", "", -1, 2.5, "much", float("nan"), 2**60, 10**400, True])
TIMES = st.sampled_from([None, 0, 1.5, "2.5", "", "soon", float("nan"), 10**400, True])


@pytest.mark.parametrize("base", [Path("/m"), "s3://bucket/p/"])
@settings(max_examples=60)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {"video_id": NAMES, "uri": NAMES}, optional={"end_s": TIMES, "size_bytes": SIZES, "x": NAMES}
        )
    )
)
def test_rows_that_are_checked_together_are_what_each_is_alone(base, rows):
    roots = Roots([], ["s3://bucket/p/"])
    named = ManifestConverter("m", base, roots)
    parts = [read_row_batches("m.jsonl", io.BytesIO("\n".join(map(json.dumps, rows)).encode()), "")]
    with contextlib.suppress(pa.ArrowException, OverflowError):  # columns of many types, which Parquet does not take
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows), sink)
        parts.append(read_row_batches("m.parquet", pa.BufferReader(sink.getvalue()), ""))
    for part in (one for read in parts for one in read):
        plain = named._convert_by_columns(part)
        if plain is not None:
            plain.validate(full=True)
            one_by_one = [named._convert_row(row, where) for where, row in part]
            assert plain.to_pylist() == pa.RecordBatch.from_pylist(one_by_one, schema=MANIFEST_SCHEMA).to_pylist()


def test_an_empty_column_of_numbers_needs_no_look_at_each_row():
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"video_id": ["a"], "uri": ["/m/a.mp4"], "start_s": pa.nulls(1, pa.float64())}), sink)
    [part] = read_row_batches("m.parquet", pa.BufferReader(sink.getvalue()), "")
    plain = ManifestConverter("m", Path("/m"), Roots([], []))._convert_by_columns(part)
    assert plain is not None and plain["start_s"].to_pylist() == [None]
