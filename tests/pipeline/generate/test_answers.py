"""Answers on disk: which row counts, and what damage says."""

import json
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.cache.schema import write_parquet
from pipeline.cache.table import make_small_name
from pipeline.errors import CorruptShard, NotAnswers
from pipeline.generate.answers import (
    ANSWER_SCHEMA,
    AnswersTable,
    commit_answers,
    merge_answers,
    read_answers,
    try_merge_answers,
    write_answers_header,
)
from pipeline.storage.stores import LocalStore


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
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
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
