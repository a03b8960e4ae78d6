"""What to process: folders, globs, files, manifests and videos at hand become rows, or one clear refusal.

What a cache names is read below named places alone.
"""

import contextlib
import io
import json
import math
import os
import tarfile
from decimal import Decimal
from pathlib import Path

import hypothesis
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from gstep.language import Decoding
from pipeline.errors import ManifestError, QuestionsError, VideoFault
from pipeline.generate.questions import AnswerMode, read_given_questions, read_questions
from pipeline.inputs.forms import make_member_fetcher
from pipeline.inputs.manifest import convert_given_videos, sort_roots
from pipeline.inputs.named_videos import MANIFEST_SCHEMA, ManifestConverter, Roots
from pipeline.inputs.tables import read_row_batches
from pipeline.inspect.page import render_video_page
from pipeline.storage.s3 import Objects
from tests.builders.answers import write_questions
from tests.builders.clips import SAMPLES
from tests.builders.manifests import ids, read_manifest, rows, touch
from tests.builders.stores import S3Server
from tests.pipeline.pages import FRAMES, VIDEO, build, decoded_clip, pictures_of


def test_ids_are_paths_relative_to_the_folder_or_to_the_literal_prefix_of_a_glob(tmp_path):
    for name in ("b.mp4", "a/c.MKV", "a/notes.txt", "x/one.mp4"):
        touch(tmp_path / "v" / name)
    found = rows(tmp_path / "v")
    assert ids(found) == ["a/c.MKV", "b.mp4", "x/one.mp4"]
    assert all(Path(row["uri"]).is_absolute() and row["policy"] is None for row in found)
    assert ids_of(f"{tmp_path}/v/*/*") == ["a/c.MKV", "x/one.mp4"]
    assert ids_of("sample") == [*SAMPLES]


def test_a_link_that_leads_out_of_a_folder_and_a_name_that_is_no_text_cost_themselves_only(tmp_path):
    touch(tmp_path / "in" / "fine ü.mp4")
    (tmp_path / "in" / "link.mp4").symlink_to(touch(tmp_path / "outside/secret.mp4"))
    touch(tmp_path / "in" / os.fsdecode(b"bad \xff.mp4"))
    policies = {row["video_id"]: row["policy"] for row in rows(tmp_path / "in")}
    assert policies.pop("bad \\xff.mp4") == "the file's name is not valid UTF-8; rename it"
    assert {name: policy is None for name, policy in policies.items()} == {"fine ü.mp4": True, "link.mp4": False}


def ids_of(videos: Path | str) -> list[str]:
    return ids(rows(videos))


def test_a_linked_folder_is_entered_once_and_by_its_own_path_whatever_the_order(tmp_path, monkeypatch):
    touch(tmp_path / "in/m/real/x.mp4")
    touch(tmp_path / "out/y.mp4")
    touch(tmp_path / "in/.kept/hidden.mp4")
    touch(tmp_path / "in/notes.txt")
    (tmp_path / "in/.kept/b").symlink_to(tmp_path / "out")
    links = {"a": "m/real", "m/loop": "..", "m/here": ".", "z": "m", "b": "../out", "y": "../out"}
    for link, target in links.items():
        (tmp_path / "in" / link).symlink_to(target)
    walk = os.walk

    def backwards(top, **more):
        for parent, folders, names in walk(top, **more):
            folders.sort(reverse=True)
            yield parent, folders, names

    for way in (walk, backwards):
        monkeypatch.setattr(os, "walk", way)
        videos = ["b/y.mp4", "m/real/x.mp4"]
        assert ids_of(tmp_path / "in") == [".kept/hidden.mp4", *videos]
        # A glob does not look into hidden folders, and Python's own follows the links for ever.
        assert ids_of(tmp_path / "in/**/*.mp4") == ids_of(tmp_path / "in/**") == videos
        assert ids_of(tmp_path / "in/m/**/x.mp4") == ["real/x.mp4"] == ids_of(tmp_path / "in/m/**/real/*")
        assert ids_of(tmp_path / "in/.k*/**/*.mp4") == [".kept/b/y.mp4", ".kept/hidden.mp4"]
        monkeypatch.chdir(tmp_path / "in")
        assert ids_of("**/*.mp4") == videos and ids_of("*/**/y.mp4") == ["b/y.mp4"]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("size", [1, 2**21 // 3])
def test_manifest_kinds_agree(tmp_path, kind, size):
    """A cell may be long."""
    row, label = {"video_id": "007", "uri": "v.mp4", "start_s": 1.5, "end_s": None}, "x, " * size
    (found,) = rows(write_questions(tmp_path / f"m.{kind}", [{**row, "label": label}]))
    assert {name: found[name] for name in row} == {**row, "uri": str(tmp_path / "v.mp4")}
    assert json.loads(found["manifest"]) == {"label": label}


A = {"video_id": "a", "uri": "a.mp4"}
DEEP = f'{{"video_id": "a", "uri": "a.mp4", "x": {"[" * 200}{"]" * 200}}}\n'
#: A file, its rows or text, and words of the refusal.
REFUSED = [
    ("m.jsonl", [A, {"video_id": "", "uri": "b.mp4"}], "line 2: no video_id"),
    ("m.jsonl", [{"video_id": "a"}], "no uri"),
    ("m.jsonl", [A, A], "repeat a video_id, e.g. 'a'"),
    ("m.jsonl", [{**A, "start_s": "soon"}], "start_s is 'soon'"),
    ("m.jsonl", [{**A, "end_s": True}], "end_s is True, not a number of seconds"),
    ("m.jsonl", [{**A, "size_bytes": 1.5}], "size_bytes is 1.5, not a whole number of bytes"),
    ("nowhere", None, "no such folder"),
    ("", None, "no video in this folder"),
    ("*.mp4", None, "no video matches"),
    ("torn.parquet", "PAR1 torn", "cannot be read as a manifest"),
    ("bad.jsonl", '{"video_id": \n', "line 1: not JSON"),
    ("deep.jsonl", DEEP, "line 1: not JSON: it has lists or objects that are nested more than 100 deep"),
    ("empty.csv", "", "no rows"),
    ("headerless.csv", "a,a.mp4\n", "line 1: .* names of its columns, video_id and uri among them, not a, a.mp4"),
    # One open quote makes a cell of all that follows.
    ("quote.csv", f'video_id,uri\na,a.mp4\nb,"{"x" * 2**26}\n', r"quote\.csv, line 3: .* field limit \(67108864\)"),
]


@pytest.mark.parametrize(("name", "given", "message"), REFUSED)
def test_what_is_no_list_of_videos_is_refused_by_what_is_wrong_and_where(tmp_path, name, given, message):
    touch(tmp_path / "notes.txt")
    if given is not None:
        text = given if isinstance(given, str) else "\n".join(map(json.dumps, given))
        (tmp_path / name).write_text(text)
    with pytest.raises(ManifestError, match=message):
        read_manifest(str(tmp_path / name))


@pytest.mark.parametrize("double", ["video_id", "note"])
def test_a_column_that_is_there_twice_is_refused(tmp_path, double):
    """Which of the two is meant is not known."""
    names, cells = ["video_id", "uri", "note", double], ["a", "a.mp4", "1", "2"]
    (tmp_path / "m.csv").write_text(f"{','.join(names)}\n{','.join(cells)}\n")
    table = pa.Table.from_arrays([pa.array([cell]) for cell in cells], names)
    pq.write_table(table, tmp_path / "m.parquet")
    for read, *given in (
        (rows, tmp_path / "m.csv"),
        (rows, tmp_path / "m.parquet"),
        (rows, tmp_path / "m.parquet", double),
        (convert_given_videos, table),
    ):
        with pytest.raises(ManifestError, match=f"two columns have the name {double}"):
            read(*given)
    (tmp_path / "m.csv").write_text("video_id,uri,,\na,a.mp4,,\n")  # spreadsheets write such
    assert read_manifest(str(tmp_path / "m.csv"))["manifest"].to_pylist() == [None]


def test_a_name_that_is_too_long_and_a_pipe_are_refused_with_the_reason(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for message, *given in (
        ("xxx: cannot be read: File name too long", "x" * 300),
        (r"--video-root x+: no such folder", str(tmp_path), ["x" * 300]),
        ("neither a folder nor a file", str(tmp_path / "fifo")),
    ):
        with pytest.raises(ManifestError, match=message):
            read_manifest(*given)


def test_paths_that_escape_become_policy_rows(tmp_path):
    outside = touch(tmp_path / "outside/secret.mp4")
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "link.mp4").symlink_to(outside)
    names = ["../outside/secret.mp4", str(outside), "link.mp4", "http://host/v.mp4", "s3://k:s@b/v.mp4?sig=1", "ok.mp4"]
    manifest = write_questions(inside / "m.jsonl", [{"video_id": str(i), "uri": name} for i, name in enumerate(names)])
    found = rows(manifest)
    assert [row["policy"] is None for row in found] == [False] * 5 + [True]
    assert found[4]["uri"] == "s3://b/v.mp4"
    allowed = read_manifest(str(manifest), [str(tmp_path / "outside")]).to_pylist()
    assert [row["policy"] is None for row in allowed] == [True, True, True, False, False, True]


def test_a_folder_of_frames_is_a_video_where_a_manifest_names_it_and_nowhere_else(tmp_path):
    frames = touch(tmp_path / "frames_fps3" / "x" / "00001.jpg").parent
    touch(tmp_path / "a.mp4")
    inside = {"video_id": "x#t=1.5,9", "uri": "frames_fps3/x", "start_s": 1.5, "end_s": 9.0}
    first, outside = rows(write_questions(tmp_path / "m.jsonl", [inside, {"video_id": "/", "uri": "/"}]))
    assert (first["uri"], first["policy"], first["start_s"], first["end_s"]) == (str(frames), None, 1.5, 9.0)
    assert outside["policy"]
    assert ids_of(tmp_path) == ["a.mp4"]


@pytest.mark.parametrize("end", [-1, 0])
def test_parts_know_where_their_rows_stand(tmp_path, monkeypatch, end):
    """The last row is wrong, and the last of a part, or the first of the next one."""
    monkeypatch.setattr("pipeline.inputs.tables._PART_ROWS", 2**7)  # and 2**4 lines
    lines, n_rows = 2**4 + end, 2**7 + end
    bad = {"video_id": "bad", "uri": " "}
    path = write_questions(tmp_path / "m.jsonl", [*({"video_id": f"v{i}", "uri": "a.mp4"} for i in range(lines)), bad])
    table = pa.table({"video_id": [*map(str, range(n_rows)), "bad"], "uri": ["a.mp4"] * n_rows + [" "]})
    pq.write_table(table, tmp_path / "m.parquet")
    for read, given, place in (
        (rows, path, f"line {lines + 1}"),
        (rows, tmp_path / "m.parquet", f"row {n_rows}"),
        (convert_given_videos, table, f"row {n_rows}"),
    ):
        with pytest.raises(ManifestError, match=f"{place}: no uri"):
            read(given)


@pytest.mark.parametrize("kind", [pa.binary(), pa.dictionary(pa.int8(), pa.binary())])
def test_ids_and_uris_of_bytes_are_text(tmp_path, kind):
    """pyarrow and pandas write text as bytes in places; an id of ``b'a'`` would never match the user's own."""
    table = pa.table({name: pa.array([b"a", b"b"], kind) for name in ("video_id", "uri", "note")})
    pq.write_table(table, tmp_path / "m.parquet")
    for found in (read_manifest(str(tmp_path / "m.parquet")), *map(convert_given_videos, (table, table.to_pylist()))):
        assert ids(found) == [uri.rpartition("/")[2] for uri in found["uri"].to_pylist()] == ["a", "b"]
        assert [json.loads(text) for text in found["manifest"].to_pylist()] == [{"note": "a"}, {"note": "b"}]


def test_half_of_a_surrogate_pair_is_carried_as_a_question_mark(tmp_path):
    (tmp_path / "m.jsonl").write_text(
        r'{"video_id": "a", "uri": "a", "x": ["\ud83d", "\ud83d\ude00", 1e999], "\ude00": 1}'
    )
    (text,) = read_manifest(str(tmp_path / "m.jsonl"))["manifest"].to_pylist()
    assert text.isascii() and json.loads(text) == {"x": ["?", "😀", None], "?": 1}


@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.date64(), pa.duration("s")])
def test_a_time_that_python_has_no_date_for_is_carried_as_text(tmp_path, kind):
    """Databases export infinity as such a time."""
    times = pa.array([864 * 10**15, 0, None], pa.int64()).cast(kind)
    table = pa.table({"video_id": ["a", "b", "c"], "uri": ["a", "b", "c"], "at": times})
    pq.write_table(table, tmp_path / "m.parquet")
    for found in (read_manifest(str(tmp_path / "m.parquet")), convert_given_videos(table)):
        assert ids(found) == ["a", "b", "c"]
        infinite, zero, none = (text and json.loads(text) for text in found["manifest"].to_pylist())
        assert isinstance(infinite["at"], str) and isinstance(zero["at"], str) and none is None
    nested = table.set_column(2, "at", pa.array([[at] for at in times], pa.list_(kind)))
    assert_refused(nested, tmp_path / "m.parquet")


def assert_refused(table, path):
    """The videos, and the questions, of a table and of a file of it are refused in one line."""
    questions, of_questions = table.rename_columns({"uri": "prompt"}), path.with_name("q.parquet")
    questions = questions.append_column("question_id", questions["video_id"])
    pq.write_table(table, path)
    pq.write_table(questions, of_questions)
    mode = AnswerMode(Decoding())
    for read, *given in (
        (rows, path),
        (convert_given_videos, table),
        (read_questions, str(of_questions), mode),
        (read_given_questions, questions, mode),
    ):
        with pytest.raises((ManifestError, QuestionsError), match=r"cannot be read as (a manifest|questions)"):
            read(*given)


@pytest.mark.parametrize("column", ["video_id", "note"])
def test_text_that_is_not_utf8_is_refused(tmp_path, column):
    bad = pa.array([b"\xff"]).view(pa.string())
    assert_refused(pa.table({"video_id": ["a"], "uri": ["a"], column: bad}), tmp_path / "m.parquet")


WHOLE = {
    "int": pa.array([1, 20]),
    "float": pa.array([1.0, 20.0]),
    "decimal": pa.array([Decimal(1), Decimal(20)], pa.decimal128(38, 0)),
    "text": pa.array(["1", "20"]),
    "dictionary": pa.array([1, 20]).dictionary_encode(),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_number_is_the_same_id_as_a_number_of_any_type_and_as_text(tmp_path, kind):
    table = pa.table({"video_id": WHOLE[kind], "question_id": WHOLE[kind], "uri": ["a", "b"], "prompt": ["x", "y"]})
    pq.write_table(table, tmp_path / "m.parquet")
    dicts = table.to_pylist()
    assert ids_of(tmp_path / "m.parquet") == ids(convert_given_videos(table)) == ids(convert_given_videos(dicts))
    assert ids_of(tmp_path / "m.parquet") == ["1", "20"]
    mode = AnswerMode(Decoding())
    lists = [{**row, "video_id": [row["video_id"]]} for row in dicts]
    given = [read_given_questions(one, mode) for one in (table, dicts, lists)]
    for questions in (read_questions(str(tmp_path / "m.parquet"), mode), *given):
        assert questions["question_id"].to_pylist() == ["1", "20"]
        assert questions["video_ids"].to_pylist() == [["1"], ["20"]]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_text_is_never_changed_to_a_number_and_numbers_of_json_are_text(tmp_path, suffix):
    numbers = ["1", "01", "2.0", " 3", "1e3"]
    lines = {
        "jsonl": [f'{{"video_id": "{text}", "uri": "a"}}' for text in numbers],
        "csv": ["video_id,uri", *(f"{text},a" for text in numbers)],
    }[suffix]
    (tmp_path / f"m.{suffix}").write_text("\n".join(lines))
    assert ids_of(tmp_path / f"m.{suffix}") == numbers
    (tmp_path / "n.jsonl").write_text('{"video_id": 1.0, "uri": "a"}\n{"video_id": 2e3, "uri": "a"}\n')
    assert ids_of(tmp_path / "n.jsonl") == ["1", "2000"]


@pytest.mark.parametrize("column", ["video_id", "uri"])
@pytest.mark.parametrize(
    ("values", "row", "why"),
    [
        ([1.0, 2.0**53], 1, "of type float"),
        ([math.inf, 1.0], 0, "of type float"),
        ([0.5, 1.0], 0, "of type float"),
        ([Decimal("1.0"), Decimal("1.5")], 1, "of type Decimal"),
        ([b"a", b"\xff"], 1, r"bytes that are not UTF-8"),
        ([[0], [1]], 0, "of type list"),
        ([False, True], 0, "of type bool"),
    ],
)
def test_what_is_no_text_is_refused_by_column_and_row(tmp_path, column, values, row, why):
    table = pa.table({"video_id": ["a", "b"], "uri": ["a", "b"], column: values})
    pq.write_table(table, tmp_path / "m.parquet")
    for read, given in ((rows, tmp_path / "m.parquet"), (convert_given_videos, table.to_pylist())):
        with pytest.raises(ManifestError, match=f"row {row}: the {column} is .*{why}"):
            read(given)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_paths_are_called_by_their_names_and_may_be_anywhere_but_behind_a_link(tmp_path, here):
    (tmp_path / "other").mkdir()
    paths = [tmp_path / "other" / "a.mp4", "b.mp4", "s3://bucket/far/c.mp4"]
    found = convert_given_videos(paths).to_pylist()
    assert found == convert_given_videos(iter(paths)).to_pylist()
    assert [(row["video_id"], row["uri"], row["policy"]) for row in found] == [
        ("a.mp4", str(tmp_path / "other" / "a.mp4"), None),
        ("b.mp4", str(here / "b.mp4"), None),
        ("c.mp4", "s3://bucket/far/c.mp4", None),
    ]
    (tmp_path / "secret.mp4").write_text("x")
    (here / "a.mp4").symlink_to(tmp_path / "secret.mp4")
    assert "outside" in convert_given_videos(["a.mp4"])["policy"][0].as_py()
    assert convert_given_videos(["a.mp4"], [str(tmp_path)])["policy"][0].as_py() is None


def test_the_name_of_a_signed_address_is_without_its_secret():
    uris = ["https://host/a.mp4?sig=SEC", "s3://bucket/b.mp4?sig=SEC", "s3://bucket/c#1.mp4", "d?.mp4"]
    rows = convert_given_videos(uris)
    assert rows["video_id"].to_pylist() == ["a.mp4", "b.mp4", "c#1.mp4", "d?.mp4"]
    assert [bool(policy) for policy in rows["policy"].to_pylist()] == [True, True, False, False]
    assert "SEC" not in str(rows)


def test_a_file_uri_holds_a_path_alone(here):
    (here / "a b.mp4").write_text("x")
    refused = ["file://[x/a.mp4", "file://key@host/a.mp4", f"file://{here}/a.mp4?key=1", f"file://{here}/a.mp4#1"]
    refused.append("file:///x%00/a.mp4")
    uris = [f"file://{here}/a%20b.mp4", f"file://localhost{here}/a%20b.mp4", *refused]
    named = [{"video_id": str(number), "uri": uri} for number, uri in enumerate(uris)]
    rows = convert_given_videos(named, [str(here)]).to_pylist()
    assert [row["policy"] for row in rows[:2]] == [None, None] and rows[0]["uri"] == rows[1]["uri"] == f"{here}/a b.mp4"
    assert all("may hold a path only" in row["policy"] and "key" not in row["uri"] for row in rows[2:])


ROWS = [{"video_id": "a", "uri": "x.mp4", "start_s": 1.0, "topic": "cats"}, {"video_id": "b", "uri": "y.mp4"}]


NULL_WORD = pa.DictionaryArray.from_arrays([1, 0], ["a", None])
NO_LISTS = (ROWS[0], pa.chunked_array([["a"]]), 7)


def make_categories(rows):
    """The dictionaries of Polars hold views of text."""
    return polars.DataFrame(rows, schema_overrides={"video_id": polars.Categorical, "uri": polars.Categorical})


@pytest.mark.parametrize("kind", [list, tuple, iter, pa.Table.from_pylist, polars.DataFrame, make_categories])
def test_rows_are_those_of_a_manifest_in_the_current_folder(here, kind):
    (here / "m.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    assert convert_given_videos(kind(ROWS)).equals(read_manifest("m.jsonl"))


@pytest.mark.parametrize(
    ("videos", "said"),
    [
        ([], "the list is empty"),
        (["x/a.mp4", "y/a.mp4"], "2 paths end in 'a.mp4': give dicts with a video_id and a uri each"),
        ([{"video_id": "a"}], "videos, row 0: no uri"),
        (pa.table({"video_id": NULL_WORD, "uri": ["a.mp4", "b.mp4"]}), "videos, row 0: no video_id"),
        ([ROWS[0], "b.mp4"], "videos, row 1: expected a dict with video_id and uri, got str"),
        ([ROWS[0], ROWS[0]], "1 rows repeat a video_id"),
        *((one, f"a list of dicts or a table .*, got {type(one).__name__}") for one in NO_LISTS),
    ],
)
def test_what_is_no_list_of_videos_is_refused_by_name(videos, said):
    with pytest.raises(ManifestError, match=said):
        convert_given_videos(videos)


NAMES = st.text(st.sampled_from("ab./ \u3000\n:?é7"), max_size=8) | st.sampled_from(
    ["a/b.mp4", "/m/a.mp4", "/else/a.mp4", "s3://bucket/p/a.mp4", "s3://bucket/q/a.mp4", "s3://bucket/p/../a", "../a"]
)
OPTIONAL = {
    "end_s": st.sampled_from([None, 0, 1.5, "2.5", "", "soon", float("nan"), 10**400, True]),
    "size_bytes": st.sampled_from([None, 0, 5, 5.0, "7", "", -1, 2.5, "much", float("nan"), 2**60, 10**400, True]),
    "x": NAMES,
}


@pytest.mark.parametrize("base", [Path("/m"), "s3://bucket/p/"])
@hypothesis.settings(max_examples=40)
@hypothesis.given(rows=st.lists(st.fixed_dictionaries({"video_id": NAMES, "uri": NAMES}, optional=OPTIONAL)))
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


@pytest.fixture
def places(tmp_path):
    """Files inside of the folder ``in`` and outside, links between them, and tars."""
    for name in ("in/sub/a.mp4", "in/a#1.mp4", "in2/a.mp4", "out/a.mp4"):
        touch(tmp_path / name)
    (tmp_path / "in" / "link.mp4").symlink_to(tmp_path / "out" / "a.mp4")
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for name in ("in/a.tar", "out/a.tar"):
        with tarfile.open(tmp_path / name, "w") as tar:
            tar.add(tmp_path / "out" / "a.mp4", "a.mp4")
    return tmp_path


ROOTS = ("in", "s3://bucket/videos", "hf://datasets/me/clips")
INSIDE = ["in/sub/a.mp4", "in/a#1.mp4", "link/sub/a.mp4", "in/a.tar#a.mp4", "s3://bucket/videos/a.mp4"]
INSIDE += ["s3://bucket/videos/a.tar#b.mp4", "hf://datasets/me/clips/a.mp4"]
OUTSIDE = ["out/a.mp4", "in2/a.mp4", "in/link.mp4", "in/folder/a.mp4", "in/../out/a.mp4", "out/a.tar#in/a.mp4"]
OUTSIDE += ["in/folder/a.tar#a.mp4", "in/a\0.mp4", "s3://bucket/videos2/a.mp4", "s3://bucket/videos/../a.mp4"]
OUTSIDE += ["s3://other/videos/a.mp4", "s3://bucket/a.tar#s3://bucket/videos/a", "hf://datasets/me/clips2/a.mp4"]
ELSEWHERE = ["a.mp4", "", "http://169.254.169.254/latest", "file:///in/a.mp4", "s3://k:SECRET@bucket/videos/a.mp4"]


def ask(places, uri, roots):
    offset = 512 if ".tar#" in uri else None
    row = {"uri": uri, "source_offset": offset, "source_size": 1, "source_mark": None}
    return make_member_fetcher(row, Objects(), sort_roots([r if "://" in r else str(places / r) for r in roots]))


def place_of(places, name):
    return name if "://" in name else str(places / name)


@pytest.mark.parametrize("name", INSIDE)
def test_a_source_below_a_root_is_read(places, name):
    fetch = ask(places, place_of(places, name), ROOTS)
    assert (fetch is not None) == (".tar#" in name)
    with pytest.raises(VideoFault, match=r"^policy: "):
        ask(places, place_of(places, name), ())


@pytest.mark.parametrize("name", [*OUTSIDE, *ELSEWHERE])
def test_a_source_elsewhere_is_not_read_whatever_it_is_called(places, monkeypatch, name):
    monkeypatch.chdir(places / "in")  # which is no place that was named
    uri = name if name in ELSEWHERE else place_of(places, name)
    with pytest.raises(
        VideoFault, match="read only below folders and prefixes that you name: for this one --vi"
    ) as error:
        ask(places, uri, ROOTS)
    assert "SECRET" not in str(error.value)


def test_roots_that_are_none_are_refused(tmp_path, monkeypatch):
    for root in (str(tmp_path / "gone"), "s3://bucket/../a", "hf://datasets/../a"):
        with pytest.raises(ManifestError, match="--video-root"):
            sort_roots([root])
    monkeypatch.chdir(tmp_path)
    assert sort_roots(["sample"]).folders[0].name == "data"
    (tmp_path / "sample").mkdir()
    assert sort_roots(["sample"]).folders[0].samefile(tmp_path / "sample")


def test_a_page_sends_no_request_that_its_reader_did_not_allow(tmp_path, monkeypatch):
    path, video = decoded_clip(tmp_path)
    with S3Server("roots") as server:
        server.reach(monkeypatch)
        uri = server.upload("all/bikes.mp4", path.read_bytes())
        cache = build(tmp_path / "c", (path, video), uri=uri)
        for roots in ([], ["/"], [server.uri("al")], [server.uri("all/bikes")]):
            page = render_video_page(cache, VIDEO, video_roots=roots)
            assert page.missing.endswith(f"for this one --video-root {server.uri('all')}") and not server.requests
        for root in (server.uri("all"), server.uri()):
            assert len(pictures_of(render_video_page(cache, VIDEO, video_roots=[root]).html)) == FRAMES
        assert server.counts() == {"GET": 2}
