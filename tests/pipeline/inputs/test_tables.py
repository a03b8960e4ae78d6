"""Files of rows that a user wrote: the kinds agree, and what is wrong is said with its place."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ManifestError
from pipeline.inputs.manifest import given_manifest, read_manifest
from tests.pipeline.inputs.test_manifest import write_jsonl


@pytest.mark.parametrize("end", [-1, 0, 1])
def test_parts_know_where_their_rows_stand(tmp_path, end):
    """The last row is wrong, and the last of a part, or the first or second of the next one."""

    def rows(n_good: int) -> list[dict]:
        return [{"video_id": f"v{i}", "uri": "a.mp4"} for i in range(n_good)] + [{"video_id": "bad", "uri": " "}]

    with pytest.raises(ManifestError, match=f"line {2**13 + end + 1}: no uri"):
        read_manifest(str(write_jsonl(tmp_path / "m.jsonl", rows(2**13 + end))))
    table = pa.Table.from_pylist(rows(2**16 + end))
    pq.write_table(table, tmp_path / "m.parquet")
    for read in (lambda: read_manifest(str(tmp_path / "m.parquet")), lambda: given_manifest(table)):
        with pytest.raises(ManifestError, match=f"row {2**16 + end}: no uri"):
            read()


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(1), pa.dictionary(pa.int8(), pa.binary())])
def test_ids_and_uris_of_bytes_are_text(tmp_path, kind):
    """pyarrow and pandas write text as bytes in places; an id of ``b'a'`` would never match the user's own."""
    table = pa.table({name: pa.array([b"a", b"b"], kind) for name in ("video_id", "uri", "note")})
    pq.write_table(table, tmp_path / "m.parquet")
    for rows in (read_manifest(str(tmp_path / "m.parquet")), given_manifest(table), given_manifest(table.to_pylist())):
        assert rows["video_id"].to_pylist() == ["a", "b"]
        assert [uri.rpartition("/")[2] for uri in rows["uri"].to_pylist()] == ["a", "b"]
        assert [json.loads(text) for text in rows["manifest"].to_pylist()] == [{"note": "a"}, {"note": "b"}]


@pytest.mark.parametrize("column", ["video_id", "uri"])
@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([b"a", b"\xff"], r"bytes that are not UTF-8"),
        ([[0], [1]], "of type list"),
        ([0.5, 1.0], "of type float"),
        ([False, True], "of type bool"),
        ([{"a": 0}, {"a": 1}], "of type dict"),
    ],
)
def test_what_is_no_text_is_refused_by_column_and_row(tmp_path, column, values, why):
    other = {"video_id": "uri", "uri": "video_id"}[column]
    table = pa.table({other: ["a", "b"], column: values})
    pq.write_table(table, tmp_path / "m.parquet")
    row = 1 if why.startswith("bytes") else 0
    with pytest.raises(ManifestError, match=f"row {row}: the {column} is .*{why}"):
        read_manifest(str(tmp_path / "m.parquet"))
    with pytest.raises(ManifestError, match=f"row {row}: the {column} is .*{why}"):
        given_manifest(table.to_pylist())
