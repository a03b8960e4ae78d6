"""Answers on disk: which row counts, what damage says, and the columns of the questions that they carry along."""

import io
import json
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gstep.language import Decoding
from pipeline.cache.schema import write_parquet
from pipeline.cache.table import make_small_name
from pipeline.errors import CorruptShard, NotAnswers, QuestionsError
from pipeline.generate.answers import (
    ANSWER_SCHEMA,
    AnswersTable,
    commit_answers,
    merge_answers,
    read_answers,
    try_merge_answers,
    write_answers_header,
)
from pipeline.generate.questions import QUESTION_SCHEMA, AnswerMode, read_given_questions, read_questions
from pipeline.generate.summary import summarize_answers
from pipeline.storage.stores import LocalStore
from tests.builders.answers import write_questions
from tests.paths import ROOT
from tests.pipeline.damage import flip


def row(question_id="1", status="ok", attempts=1, **more):
    asked = {"question_id": question_id, "video_ids": ["v"], "prompt": "p"}
    return {**asked, "status": status, "attempts": attempts, **more}


@pytest.fixture
def store(tmp_path):
    write_answers_header(LocalStore(tmp_path), {})
    return LocalStore(tmp_path)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_what_is_committed_is_read_back(store, form):
    kept = {"pruning": "gstep@0.25", "n_total": 8, "n_kept": 2, "kept_per_frame": [2, 0], "retention_ratio": 0.25}
    scores_choices = {"choices": ["a", "b"], "choice": 1, "choice_scores": [-2.5, -0.5], "target": "B", "batch_size": 3}
    full = row(answer="line\u2028\nB", **scores_choices, **kept)
    commit_answers(store, "run", 0, [full, row("2", "failed", error_class="io")], form)
    (path,) = (Path(str(store)) / "answers").iterdir()
    assert path.suffix == f".{form}"
    table = read_answers(str(store))
    assert table.schema == ANSWER_SCHEMA
    first, second = table.to_pylist()
    assert first == {**dict.fromkeys(ANSWER_SCHEMA.names), **full, "run_id": "run"}
    assert (second["status"], second["error_class"], second["answer"]) == ("failed", "io", None)


def test_lines_are_strict_json_also_where_a_choice_is_impossible(store):
    commit_answers(store, "run", 0, [row(choice_scores=[float("-inf"), -1.0])], "jsonl")
    (path,) = (Path(str(store)) / "answers").iterdir()
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["choice_scores"] == [None, -1.0]


def test_the_live_row_is_ok_before_failed_then_the_last_attempt_under_every_pruning_and_without_one(store):
    first = [row("1", answer="good"), row("2", "failed"), row("3", answer="first")]
    first += [row("1", pruning="a@0.1", answer="a"), row("1", "failed", pruning="b@0.1")]
    second = [row("1", "failed", 2), row("2", "failed", 2), row("3", "ok", 2, answer="last")]
    second += [row("1", "failed", 2, pruning="a@0.1"), row("1", "ok", 2, pruning="b@0.1", answer="b")]
    commit_answers(store, "run1", 0, first)
    commit_answers(store, "run2", 0, second)
    rows = read_answers(str(store)).to_pylist()
    assert {(r["question_id"], r["pruning"], r["status"], r["attempts"], r["answer"]) for r in rows} == {
        ("1", None, "ok", 1, "good"), ("2", None, "failed", 2, None), ("3", None, "ok", 2, "last"),
        ("1", "a@0.1", "ok", 1, "a"), ("1", "b@0.1", "ok", 2, "b"),
    }  # fmt: skip
    assert len(rows) == 5


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_flipped_bit_is_seen(store, form):
    commit_answers(store, "run", 0, [row(answer="yes")], form)
    (path,) = (Path(str(store)) / "answers").iterdir()
    flip(path, path.stat().st_size // 2)
    with pytest.raises(CorruptShard, match="does not have the hash"):
        read_answers(str(store))


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_copy_of_a_shard_under_another_name_is_left_out_and_keeps_its_shard(store, form):
    for number in range(2):
        commit_answers(store, "run", number, [row(str(number), answer="yes")], form)
    name = AnswersTable(store).names()[0]
    copy = f"answers/{Path(name).stem} (1).{form}"
    store.put(copy, store.read(name))
    before = read_answers(str(store))
    assert before["question_id"].to_pylist() == ["0", "1"] and copy not in AnswersTable(store).names()
    for _ in range(2):  # the second merge deletes the sources of the first
        merge_answers(store, 1, timedelta(0))
        assert read_answers(str(store)).equals(before)
    assert store.exists(name)
    store.put(copy, store.read(name)[:-1])  # no shard has this content: it may be a damaged one
    with pytest.raises(CorruptShard, match="does not have the hash"):
        read_answers(str(store))


def test_a_folder_without_answers_is_said_to_be_none(tmp_path):
    versions = [(f'{{"schema_version": {number}}}', said) for number, said in ((9, "version 9"), (2, "id"))]
    for text, message in ((None, r"no answers\.json"), ("{", "not JSON"), *versions):
        if text is not None:
            (tmp_path / "answers.json").write_text(text)
        with pytest.raises(NotAnswers, match=message):
            read_answers(tmp_path)


def test_many_files_are_merged_and_every_answer_stays(store):
    """A run that goes on reads what it holds already; files of before are deleted by a later merge."""
    reader = AnswersTable(store)
    for number in range(5):
        rows = [row(str(number), answer=f"a{number}"), row("x", "failed", number + 1)]
        commit_answers(store, "run", number, rows)
    before = reader.live()
    merge_answers(store, 5)
    assert len(reader.names()) == 5
    merge_answers(store, 4)
    assert len(reader.names()) == 6 and reader.live().equals(before)
    commit_answers(store, "run", 5, [row("new", answer="n")])
    merge_answers(store, 4, timedelta(0))
    assert len(reader.names()) == 2
    assert read_answers(str(store)).num_rows == len(before) + 1 == len(reader.rows())


def test_a_merge_deletes_merged_files_that_are_sources_of_later_ones(store):
    """Their names, which begin with no number that grows, come in any order."""
    for number in range(8):
        commit_answers(store, "run", number, [row(str(number), answer="yes")])
        merge_answers(store, 0)
    before = read_answers(str(store))
    merge_answers(store, 99, timedelta(0))
    assert len(AnswersTable(store).names()) == 1 and read_answers(str(store)).equals(before)


def test_a_merge_that_cannot_be_is_told_of(store):
    for number in range(3):
        commit_answers(store, "run", number, [row(str(number))])
    (Path(str(store)) / "answers" / "run-000009-ff.parquet").write_bytes(b"PAR1")
    said: list[str] = []
    try_merge_answers(store, 1, said.append)
    assert len(said) == 1 and "were not merged" in said[0] and len(AnswersTable(store).names()) == 4


def test_rows_of_other_code_than_the_header_names_do_not_count_and_stay_when_files_are_merged(store):
    """Rows without the column, as versions before wrote them, are of a header that names no code."""
    names = [name for name in ANSWER_SCHEMA.names if name != "method_code"]
    table = pa.Table.from_pylist([row(answer="before", attempts=3, run_id="r")], schema=ANSWER_SCHEMA).select(names)
    data = write_parquet(table)
    store.put(make_small_name("answers", "r", 0, data), data)
    for number, code in enumerate("ab"):
        commit_answers(store, "run", number, [row(answer=code, method_code=code)])
    merge_answers(store, 0)
    for code, answer in ((None, "before"), ("a", "a"), ("b", "b")):
        method = {"method": "m:C", "params": {}, **({} if code is None else {"code": code})}
        write_answers_header(store, {"pruner": method})
        assert read_answers(str(store))["answer"].to_pylist() == [answer]


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
    }
    commit(store, read_given_questions(pa.table(views), MODE))
    answers = read_answers(str(store))
    plain = {"topic": [None, "x"], "raw": [b"2", b"1"], "tags": [[], ["a"]], "box": [None, {"w": "1"}]}
    for name, values in (plain | {"kind": ["b", "a"]}).items():
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
