"""Files of rows that a user wrote: the kinds agree, and what is wrong is said with its place."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ManifestError
from pipeline.inputs.manifest import given_manifest, read_manifest
from pipeline.inputs.tables import UNREADABLE, BadRow, Rows, carried_json, is_text, read_parts, read_rows
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


def rows_of(name: str, data: bytes) -> list[tuple[str, dict]]:
    return list(read_rows(name, io.BytesIO(data), "an id"))


def test_each_row_comes_with_its_place():
    assert rows_of("m.jsonl", b'\xef\xbb\xbf{"a": 1}\n\n {"a": null}\n') == [
        ("line 1", {"a": 1}),
        ("line 3", {"a": None}),
    ]
    assert rows_of("m.csv", b'\xef\xbb\xbfa,b\n1,\n"x\ny",z\n') == [
        ("line 2", {"a": "1"}),
        ("line 4", {"a": "x\ny", "b": "z"}),
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1, None]}), sink)
    assert rows_of("m.parquet", sink.getvalue().to_pybytes()) == [("row 0", {"a": 1}), ("row 1", {"a": None})]


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("m.jsonl", b'{"a": 1}\n{', r"m\.jsonl, line 2: not JSON"),
        ("m.jsonl", b"[1]", r"m\.jsonl, line 1: expected an object with an id, got list"),
        ("m.csv", b"a,b\n1,2,3\n", r"m\.csv, line 2: more cells than the header names"),
        ("m.csv", b'a\n1\n"open', r"m\.csv, line \d: unexpected end of data"),
    ],
)
def test_what_is_no_row_is_named_by_its_place(name, data, why):
    with pytest.raises(BadRow, match=why):
        rows_of(name, data)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"PAR1"])
def test_what_is_no_such_file_raises_what_callers_expect(data):
    for name in ("m.jsonl", "m.csv", "m.parquet"):
        if (name, data) in {("m.jsonl", b"PAR1"), ("m.csv", b"PAR1")}:  # text
            continue
        with pytest.raises(UNREADABLE):
            rows_of(name, data)


def columns(rows: list[dict], kind: str) -> Rows:
    sink = pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), sink)
    else:
        sink.write("\n".join(map(json.dumps, rows)).encode())
    (part,) = read_parts(f"m.{kind}", pa.BufferReader(sink.getvalue()), "")
    return part


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_are_texts_or_numbers_or_nothing(kind):
    part = columns([{"id": 1, "t": 1.5, "x": "é"}, {"id": 2, "t": None, "x": "b"}], kind)
    assert part.texts("id").to_pylist() == ["1", "2"] and part.texts("x").to_pylist() == ["é", "b"]
    assert part.texts("t") is None and part.texts("absent") is None
    assert part.numbers("t").to_pylist() == [1.5, None] and part.numbers("absent").to_pylist() == [None, None]
    assert part.numbers("x") is None
    assert [json.loads(text) for text in part.carried(("id", "x")).to_pylist() if text] == [{"t": 1.5}]
    assert part.carried(("id", "t", "x")).to_pylist() == [None, None]


def test_what_is_carried_along_is_strict_json():
    assert (
        carried_json({"a": float("nan"), "b": [float("inf"), 1], "c": "é"})
        == '{"a": null, "b": [null, 1], "c": "\\u00e9"}'
    )
    assert is_text("é日") and not is_text("bad\udcff")


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
