"""Columns of videos in every form of bytes and paths that other libraries write, in the memory of a few batches."""

import json
import random
import struct
from contextlib import suppress

import datasets
import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ManifestError, VideoFault
from pipeline.inputs.archive import ArchiveOptions
from pipeline.inputs.indexes import Indexes
from tests.builders.manifests import contents, ids, read_manifest, rows

#: Rows of datasets' own form: with bytes, with a path, with both, with neither, and none at all.
MIXED = [
    {"bytes": b"1" * 900, "path": None},
    {"bytes": None, "path": "a.mp4"},
    {"bytes": b"3", "path": "lost.mp4"},
    {"bytes": None, "path": None},
    None,
    {"bytes": None, "path": "../secret.mp4"},
]
IDS = ["bytes", "path", "both", "neither", "null", "outside"]


def write_arrow(table, path, make=pa.ipc.new_file, **options):
    with make(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=2)


def write_stream(table, path, **options):
    write_arrow(table, path, pa.ipc.new_stream, **options)


def write_by_duckdb(whole, path):
    duckdb.sql(f"COPY (SELECT * FROM whole) TO '{path}' (FORMAT parquet)")


#: How each library writes a table of Arrow: the suffix of the file, and a function.
WRITERS = {
    "pyarrow, row groups": (".parquet", lambda table, path: pq.write_table(table, path, row_group_size=2)),
    "pyarrow, no statistics": (".parquet", lambda table, path: pq.write_table(table, path, write_statistics=False)),
    "pyarrow, file of zstd": (".arrow", lambda table, path: write_arrow(table, path, compression="zstd")),
    "pyarrow, stream of lz4": (".arrow", lambda table, path: write_stream(table, path, compression="lz4")),
    "pandas, feather": (".feather", lambda table, path: table.to_pandas().to_feather(path)),
    "polars, parquet": (".parquet", lambda table, path: polars.from_arrow(table).write_parquet(path)),
    "polars, file of lz4": (".arrow", lambda table, path: polars.from_arrow(table).write_ipc(path, compression="lz4")),
    "duckdb": (".parquet", write_by_duckdb),
    "datasets": (".arrow", lambda table, path: write_stream(datasets.Dataset(table).data.table, path)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_row_has_bytes_or_a_path_whatever_wrote_it(tmp_path, writer):
    suffix, write = WRITERS[writer]
    more = {"n": range(6), "kind": pa.array(list("xxyyzz")).dictionary_encode(), "embedding": [[1.0]] * 6}
    table = pa.table({"video_id": IDS, "video": MIXED, **more})
    (tmp_path / "t").mkdir()
    path = tmp_path / f"t/m{suffix}"
    write(table, path)
    found = {row["video_id"]: row for row in rows(path, "video")}
    assert list(found) == IDS
    assert {name: row["uri"] for name, row in found.items() if row["source_offset"] is None} == {
        "path": f"{tmp_path}/t/a.mp4",
        "outside": f"{tmp_path}/secret.mp4",
    }
    assert [name for name, row in found.items() if row["policy"]] == ["outside"]
    for name in ("bytes", "path"):  # lists are not carried
        assert json.loads(found[name]["manifest"]) == {"n": IDS.index(name), "kind": "x"}
    assert contents([found["both"], found["bytes"]]) == [b"3", b"1" * 900]


FORMS = {".parquet": pq.write_table, ".arrow": write_arrow, ".stream.arrow": write_stream}
BYTES = [b"one", None, b"two", b"one"]
KINDS = {
    "binary": pa.array(BYTES),
    "fixed size": pa.array(BYTES, pa.binary(3)),
    "view": pa.array(BYTES, pa.binary_view()),
    "dictionary": pa.array(BYTES).dictionary_encode(),
    "extension": pa.ExtensionArray.from_storage(pa.opaque(pa.binary(), "video", "vendor"), pa.array(BYTES)),
    "struct": pa.array([None if data is None else {"bytes": data} for data in BYTES]),
    "struct of views": pa.array(
        [{"path": None, "n": 1, "bytes": data} for data in BYTES],
        pa.struct({"path": pa.string_view(), "n": pa.int64(), "bytes": pa.binary_view()}),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_any_type_are_read(tmp_path, kind, form):
    path = tmp_path / f"a{form}"
    FORMS[form](pa.table({"v": KINDS[kind]}), path)
    found = rows(path, "v")
    assert ids(found) == [f"{path.name}/{number}" for number in range(4)]
    assert contents([found[place] for place in (3, 0, 2)]) == [b"one", b"one", b"two"]
    with pytest.raises(VideoFault, match="unsupported: row 1 of the table holds neither bytes nor a path"):
        contents([found[1]])


PATHS = ["b/a.mp4", "../c.mp4", "b/a.mp4"]
TEXTS = {
    "string": pa.array(PATHS),
    "view": pa.array(PATHS, pa.string_view()),
    "extension": pa.ExtensionArray.from_storage(pa.opaque(pa.string(), "path", "vendor"), pa.array(PATHS)),
    "struct without bytes": pa.array([{"path": path} for path in PATHS]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", TEXTS)
def test_paths_of_any_type_are_files_beside_the_table_and_never_outside(tmp_path, kind, form):
    (tmp_path / "t").mkdir()
    path = tmp_path / f"t/a{form}"
    FORMS[form](pa.table({"video_id": ["1", "2", "3"], "v": TEXTS[kind]}), path)
    found = rows(path, "v")
    assert [row["uri"] for row in found] == [f"{tmp_path}/t/b/a.mp4", f"{tmp_path}/c.mp4", f"{tmp_path}/t/b/a.mp4"]
    assert [row["policy"] is None for row in found] == [True, False, True]
    assert all(row["source_offset"] is None and row["manifest"] is None for row in found)
    told = read_manifest(str(path), [str(tmp_path)], indexes=Indexes(ArchiveOptions("v")))
    assert told["policy"].null_count == 3


def test_addresses_in_a_table_follow_the_rules_of_manifests(tmp_path):
    paths = ["hf://datasets/u/n/a.mp4", "https://k:SEC@host/a.mp4?sig=SEC", "s3://b/a.mp4"]
    paths += [f"file://{tmp_path}/a.mp4", "x\0y"]
    write_stream(pa.table({"v": [{"bytes": None, "path": path} for path in paths]}), tmp_path / "a.arrow")
    found = rows(tmp_path / "a.arrow", "v")
    said = [row["policy"] or row["fault"] for row in found]
    assert [text and text.split(":")[0] for text in said[:2]] == ["hf", "https"] and "--video-root" in said[2]
    assert said[3] is None and found[3]["uri"] == f"{tmp_path}/a.mp4" and said[4] == "policy: its path has a NUL"
    assert "SEC" not in str(found)


@pytest.mark.parametrize("deltas", [False, True])
def test_a_stream_whose_dictionaries_change_is_read_in_any_order(tmp_path, deltas):
    """A batch can be read only after the dictionaries before it."""
    options = pa.ipc.IpcWriteOptions(compression="zstd", emit_dictionary_deltas=deltas)
    values = [b"1", b"2", b"3"]
    schema = pa.schema({"v": pa.dictionary(pa.int8(), pa.binary()), "video_id": pa.string()})
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), schema, options=options) as writer:
        for end in (1, 2, 3):
            column = pa.DictionaryArray.from_arrays(pa.array([end - 1], pa.int8()), pa.array(values[:end]))
            writer.write_batch(pa.record_batch([column, [str(end)]], schema=schema))
    found = rows(tmp_path / "a.arrow", "v")
    assert ids(found) == ["1", "2", "3"]
    assert contents([found[place] for place in (2, 0, 1, 1, 2)]) == [b"3", b"1", b"2", b"2", b"3"]


@pytest.mark.parametrize("write", [write_arrow, write_stream])
def test_damage_to_an_arrow_file_is_a_fault_of_its_own(tmp_path, write):
    """A batch of zeros, and offsets that lead out of the data: Arrow itself may end the process at these."""
    ids = [f"v{number}" for number in range(6)]
    write(pa.table({"video_id": ids, "v": [b"1" * 500] * 6}), tmp_path / "b.arrow")
    write(pa.table({"video_id": [f"{name} of a" for name in ids], "v": [b"2" * 500] * 6}), tmp_path / "a.arrow")
    sound = (tmp_path / "a.arrow").read_bytes()
    second = sound.index(b"v2 of a")
    for start, end, new in (
        (sound.rindex(b"\xff\xff\xff\xff", 0, second), second, 0),
        (sound.rindex(struct.pack("<3i", 0, 7, 14), 0, second) + 4, second, 255),
    ):
        (tmp_path / "a.arrow").write_bytes(sound[:start] + bytes([new]) * (end - start) + sound[end:])
        found = rows(tmp_path, "v")
        assert [row["video_id"] for row in found if row["fault"] is None][-6:] == ids
        if write is write_arrow or new:  # zeros are the end of a stream
            assert any((row["fault"] or "").startswith("corrupt: the table cannot be read") for row in found)


@pytest.mark.parametrize("write", [write_arrow, write_stream])
@pytest.mark.parametrize("codec", [None, "zstd"])
def test_flipped_and_lost_bytes_of_an_arrow_file_raise_only_faults(tmp_path, codec, write):
    table, draw = pa.table({"v": [bytes([number]) * 300 for number in range(6)]}), random.Random(0)
    for whole in (table, table.append_column("video_id", [list("abcdef")])):
        write(whole, tmp_path / "a.arrow", compression=codec)
        write(whole, tmp_path / "b.arrow", compression=codec)
        sound = (tmp_path / "a.arrow").read_bytes()
        for _ in range(10):
            data, place = bytearray(sound), draw.randrange(len(sound))
            data[place : place + draw.randrange(1, 64)] = draw.choice([b"", bytes(32), bytes([data[place] ^ 4])])
            (tmp_path / "a.arrow").write_bytes(data)
            try:
                found = rows(tmp_path, "v")
            except ManifestError:
                continue  # the first table has no column v any more
            assert len(found) >= 6
            for row in found:
                with suppress(VideoFault):
                    contents([row])


@pytest.mark.parametrize(("codec", "make"), [("lz4", pa.ipc.new_file), ("zstd", pa.ipc.new_stream)])
def test_a_compressed_arrow_file_takes_the_memory_of_one_batch(tmp_path, codec, make):
    schema = pa.schema({"video_id": pa.string(), "v": pa.struct({"bytes": pa.binary(), "path": pa.string()})})
    with make(str(tmp_path / "a.arrow"), schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        for number in range(20):
            video = {"bytes": bytes([number]) * 2_000_000, "path": None}
            columns = [[str(number)], pa.array([video], schema.field("v").type)]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    pool = pa.proxy_memory_pool(whole := pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        found = rows(tmp_path / "a.arrow", "v")
        listed = pool.max_memory()
        assert contents([found[17]]) == [bytes([17]) * 2_000_000]
    finally:
        pa.set_memory_pool(whole)
    assert len(found) == 20 and listed < 3 * 2_000_000 < 3 * pool.max_memory() < 9 * 2_000_000
