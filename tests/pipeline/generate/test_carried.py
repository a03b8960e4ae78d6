"""Columns of a questions' file beside the answers: names and types stay, whatever they hold and whatever joins them."""

import io
import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gstep.language import Decoding
from pipeline.cache.table import make_small_name
from pipeline.errors import QuestionsError
from pipeline.generate.answers import ANSWER_SCHEMA, commit_answers, merge_answers, read_answers, write_answers_header
from pipeline.generate.questions import QUESTION_SCHEMA, AnswerMode, read_given_questions, read_questions
from pipeline.generate.summary import summarize_answers
from pipeline.storage.stores import LocalStore
from tests.builders.answers import write_questions
from tests.paths import ROOT

PAGE = (ROOT / "pipeline/generate/README.md").read_text()
MODE = AnswerMode(Decoding())
GOOD = {"video_id": "v", "prompt": "p"}
TYPED = pa.table(
    {
        "question_id": ["10", "9"],
        "video_id": ["v", "v"],
        "prompt": ["p", "p"],
        "topic": pa.array(["x", None]),
        "points": pa.array([3, None], pa.int16()),
        "seen": pa.array([date(2026, 1, 2), None]),
        "tags": pa.array([["a"], []], pa.list_(pa.large_string())),
        "box": pa.array([{"w": 1}, None], pa.struct([("w", pa.int8()), ("h", pa.int8())])),
        "kind": pa.array(["a", "b"]).dictionary_encode(),
        "unused": pa.nulls(2),
        "status": pa.array([1, 2]),
    }
)


def test_the_page_lists_the_columns_of_the_answers_and_the_lines_of_the_summary():
    columns = PAGE.partition("| column of the answers |")[2]
    assert [name for name in ANSWER_SCHEMA.names if f"`{name}`" not in columns] == []
    summary = summarize_answers(ANSWER_SCHEMA.empty_table(), 1, set(), 1.0)
    lines = str(replace(summary, n_warned=1, warned=["v"], n_warned_videos=1)).splitlines()
    names = [line[:9].strip() for line in lines]
    assert {"questions", "warnings", "this run"} <= {*names}
    assert [name for name in names if f"`{name}`" not in columns] == []


def carried(table: pa.Table) -> pa.Table:
    return table.drop_columns(QUESTION_SCHEMA.names)


@pytest.fixture
def store(tmp_path):
    write_answers_header(LocalStore(tmp_path / "answers"), {})
    return LocalStore(tmp_path / "answers")


def test_views_of_text_and_bytes_which_polars_writes_become_text_and_bytes(tmp_path, store):
    """Arrow can neither filter nor sort them."""
    views = {
        "question_id": pa.array(["10", "9"], pa.string_view()),
        "video_id": pa.array(["v", "w"], pa.string_view()),
        "prompt": pa.array(["p", "p"], pa.string_view()),
        "topic": pa.array(["x", None], pa.string_view()),
        "raw": pa.array([b"1", b"2"], pa.binary_view()),
        "tags": pa.array([["a"], []], pa.list_(pa.string_view())),
        "box": pa.array([{"w": "1"}, None], pa.struct({"w": pa.string_view()})),
        "kind": pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", "b"], pa.string_view())),
        "extra": pa.ExtensionArray.from_storage(pa.opaque(pa.string(), "t", "v"), pa.array(["a", "b"])),
    }
    commit(store, read_given_questions(pa.table(views), MODE))
    answers = read_answers(str(store))
    plain = {"topic": [None, "x"], "raw": [b"2", b"1"], "tags": [[], ["a"]], "box": [None, {"w": "1"}]}
    for name, values in (plain | {"kind": ["b", "a"], "extra": ["b", "a"]}).items():
        assert answers[name].to_pylist() == values


def commit(store, questions: pa.Table, run="run", form="parquet") -> None:
    rows = questions.select(QUESTION_SCHEMA.names).to_pylist()
    commit_answers(store, run, 0, [{**row, "status": "ok", "attempts": 1} for row in rows], form, questions)


def test_columns_keep_name_type_and_value_and_stand_behind_the_answers_own(tmp_path, store):
    pq.write_table(TYPED, tmp_path / "q.parquet")
    read = (read_questions(str(tmp_path / "q.parquet"), MODE), read_given_questions(TYPED, MODE))
    for number, questions in enumerate(read):
        place = LocalStore(tmp_path / str(number))
        write_answers_header(place, {})
        commit(place, questions)
        answers = read_answers(str(place))
        assert answers.column_names[: len(ANSWER_SCHEMA)] == ANSWER_SCHEMA.names
        assert answers["question_id"].to_pylist() == ["9", "10"]  # as people sort
        for name in ("topic", "points", "seen", "tags", "box", "unused"):
            assert answers.schema.field(name).type == TYPED.schema.field(name).type
            assert answers[name].to_pylist() == TYPED[name].to_pylist()[::-1]
        assert answers["kind"].to_pylist() == ["b", "a"] and answers.schema.field("kind").type == pa.string()
        # A name that answers need themselves.
        assert answers["question_status"].to_pylist() == [2, 1] and answers["status"].to_pylist() == ["ok", "ok"]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_what_has_no_type_of_its_own_is_text(tmp_path, store, form):
    rows = [
        {"mixed": 1, "ragged": {"a": 1}, "empty": {}, "real": 1, "half": "\ud800", "list": [1]},
        {"mixed": "1é", "ragged": {"b": 2}, "empty": {}, "real": float("nan"), "half": "x", "list": []},
        {"mixed": None, "real": 2.5},
    ]
    questions = [{"question_id": number, **GOOD, **row} for number, row in enumerate(rows)]
    commit(store, read_questions(str(write_questions(tmp_path / "q.jsonl", questions)), MODE), form=form)
    answers = read_answers(str(store))
    assert answers["mixed"].to_pylist() == ["1", "1é", None]
    assert [text and json.loads(text) for text in answers["ragged"].to_pylist()] == [{"a": 1}, {"b": 2}, None]
    assert answers["empty"].to_pylist() == ["{}", "{}", None] and answers["list"].to_pylist() == [[1], [], None]
    assert answers["half"].to_pylist() == ['"\\ud800"', "x", None]
    first, second, third = answers["real"].to_pylist()
    assert (first, third) == (1.0, 2.5) and (second != second if form == "parquet" else second is None)  # noqa: PLR0124
    if form == "jsonl":  # strict, and letters as they are
        (path,) = (Path(str(store)) / "answers").iterdir()
        assert "1é" in path.read_text()
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)


def test_rows_of_pandas_and_of_python_objects_are_kept(store):
    frame = pd.DataFrame([{"question_id": "a", **GOOD, "when": pd.Timestamp("2026-01-02", tz="UTC"), "n": 4}])
    assert carried(read_given_questions(frame, MODE)).to_pylist() == [{"when": frame["when"][0], "n": 4}]
    rows = [{"question_id": "a", **GOOD, "path": Path("x/y"), "raw": b"\x00"}]
    assert carried(read_given_questions(rows, MODE)).to_pylist() == [{"path": '"x/y"', "raw": b"\x00"}]
    stream = pa.RecordBatchReader.from_batches(TYPED.schema, TYPED.to_batches())  # is read once
    assert carried(read_given_questions(stream, MODE))["points"].type == pa.int16()


@pytest.mark.parametrize(
    ("more", "message"),
    [({"status": 1, "question_status": 2}, "'question_status' in the answers"), ({"\ud800": 1}, "not valid text")],
)
def test_a_name_that_cannot_be_is_refused(tmp_path, more, message):
    path = write_questions(tmp_path / "q.jsonl", [{"question_id": 1, **GOOD, **more}])
    with pytest.raises(QuestionsError, match=f"q.jsonl: .*{message}.*rename it"):
        read_questions(str(path), MODE)


def test_files_with_other_columns_and_types_join_and_merge(store):
    def given(question_id, **more):
        return read_given_questions([{"question_id": question_id, **GOOD, **more}], MODE)

    def stored():
        return [(row["points"], row["own"]) for row in read_answers(str(store)).to_pylist()]

    commit(store, given("1", points=1, own=1.5), "run1")
    commit(store, given("2", points=2.5), "run2", "jsonl")
    assert stored() == [(1.0, 1.5), (2.5, None)]
    commit(store, given("3", points=["a"], own=date(2026, 1, 2)), "run3")
    commit(store, given("4"), "run4")
    expected = [("1", "1.5"), ("2.5", None), ('["a"]', '"2026-01-02"'), (None, None)]
    assert stored() == expected
    merge_answers(store, 2)
    assert stored() == expected


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_answers_from_before_show_the_same_columns(store, form):
    """They hold JSON of the columns in question_extra."""
    row = {"video_ids": ["v"], "prompt": "p", "status": "ok", "attempts": 1, "run_id": "run"}
    extras = ['{"topic": "x", "n": 3}', None]
    rows = [{**row, "question_id": str(i), "question_extra": extra} for i, extra in enumerate(extras)]
    schema = pa.schema([*ANSWER_SCHEMA, pa.field("question_extra", pa.string())])
    table, file = pa.Table.from_pylist(rows, schema), io.BytesIO()
    pq.write_table(table, file)
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
    data = lines if form == "jsonl" else file.getvalue()
    store.put(make_small_name("answers", "run", 0, data, f".{form}"), data)
    commit(store, read_given_questions([{"question_id": "new", **GOOD, "topic": "y"}], MODE), "run2")
    answers = read_answers(str(store))
    assert "question_extra" not in answers.column_names
    assert [(row["topic"], row["n"]) for row in answers.to_pylist()] == [("x", 3), (None, None), ("y", None)]
