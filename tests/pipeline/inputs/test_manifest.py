"""What to process: folders, globs, files and manifests become rows, or one clear refusal."""

import json
import math
import os
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gstep.language import Decoding
from pipeline.errors import ManifestError, QuestionsError
from pipeline.generate.questions import AnswerMode, read_given_questions, read_questions
from pipeline.inputs.manifest import convert_given_videos
from tests.builders.answers import write_questions
from tests.builders.clips import SAMPLES
from tests.builders.manifests import ids, read_manifest, rows


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path


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
def test_parts_know_where_their_rows_stand(tmp_path, end):
    """The last row is wrong, and the last of a part, or the first of the next one."""
    lines, n_rows = 2**13 + end, 2**16 + end
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
