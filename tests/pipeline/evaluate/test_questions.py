"""Questions of a benchmark as jobs.generate asks them, and answers of jobs.generate as questions that can be scored."""

import json

import pytest

from gstep.language import Decoding
from pipeline.errors import QuestionsError
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.benchmarks.own import own_benchmark
from pipeline.evaluate.protocols import LETTER
from pipeline.evaluate.scores import answered_item, question_table, way_of
from pipeline.generate.questions import QUESTION_SCHEMA, Way, read_questions
from pipeline.rows import AnswerRecord, without_nulls
from tests.pipeline.asking import write_questions

VIDEOMME = BENCHMARKS["videomme"].protocol()
ITEM = Item(
    question_id="007-2",
    video_ids=("data/-Ab3.mp4",),
    question="Which year?",
    options=("A. 1900.", "B. 1950.", "C. 1980.", "D. 2001."),
    answer=1,
    expected="B",
    cluster="-Ab3",
)
OWN = [
    {"question_id": 1, "video_id": "a", "prompt": "What?", "choices": ["x", "y"], "answer": "y", "split": "s"},
    {"question_id": "two", "video_id": ["a", "b"], "prompt": "Why?", "answer": "because"},
]


def test_all_questions_are_answered_as_the_protocol_says():
    way = way_of(VIDEOMME, "llava_onevision")
    assert way == Way(Decoding(16, 0.0), "generate", "You are a helpful assistant.")
    assert way_of(VIDEOMME, "qwen2_5_vl").system is None
    assert way_of(LETTER, "llava_onevision") == Way(Decoding(64, 0.0), "letter", None)


def test_where_a_reply_is_generated_the_prompt_is_the_protocols_whole_text():
    """Nothing is added to it: choices of its own would be put below once more."""
    table = question_table([ITEM], VIDEOMME, "llava_onevision")
    (row,) = table.to_pylist()
    assert table.schema == QUESTION_SCHEMA
    assert row["prompt"] == VIDEOMME.text(ITEM, "llava_onevision") and "B. 1950." in row["prompt"]
    assert (row["question_id"], row["video_ids"], row["choices"]) == ("007-2", ["data/-Ab3.mp4"], None)
    assert row["target"] == "B" and "target" not in row["decoding"]
    assert json.loads(row["decoding"]) == {
        "method": "generate", "system": "You are a helpful assistant.", "max_new_tokens": 16, "temperature": 0.0
    }  # fmt: skip


def test_the_text_goes_by_the_type_of_the_model():
    asked = {kind: question_table([ITEM], VIDEOMME, kind)["prompt"][0].as_py() for kind in ("qwen2_5_vl", "qwen3_vl")}
    assert asked["qwen2_5_vl"] != asked["qwen3_vl"] and asked["qwen3_vl"].startswith("Question: Which year?")


def test_own_questions_are_asked_as_jobs_generate_asks_them(tmp_path):
    file = str(write_questions(tmp_path / "q.jsonl", OWN))
    table = question_table(own_benchmark(file).load(None).items, LETTER, "llava_onevision")
    asked = read_questions(file, Way(Decoding(64)))
    for name in ("question_id", "video_ids", "prompt", "choices", "target", "decoding"):
        assert table[name].to_pylist() == asked[name].to_pylist(), name


def answered(path, *rows) -> list[AnswerRecord]:
    """What jobs.generate leaves of the questions of a file."""
    table = read_questions(str(write_questions(path, list(rows))), Way(Decoding(), "loglikelihood"))
    return [without_nulls({**row, "status": "ok", "answer": "x"}, AnswerRecord) for row in table.to_pylist()]


def test_an_answered_question_is_the_one_that_its_file_held(tmp_path):
    file = write_questions(tmp_path / "q.jsonl", OWN)
    items = own_benchmark(str(file)).load(None).items
    found = [answered_item(row) for row in answered(file, *OWN)]
    assert [item.cluster for item in found] == ["", ""]  # none was named
    for item, same in zip(found, items, strict=True):
        assert {**vars(item), "cluster": None} == {**vars(same), "cluster": None}
    assert (found[0].options, found[0].answer, found[0].splits) == (("x", "y"), 1, {"split": "s"})
    assert (found[1].options, found[1].answer, found[1].video_ids) == ((), None, ("a", "b"))


def test_a_split_and_a_cluster_that_the_file_names_are_kept(tmp_path):
    (row,) = answered(tmp_path / "q.jsonl", {**OWN[0], "split": 3, "cluster": "series", "topic": "x"})
    item = answered_item(row)
    assert (item.splits, item.cluster) == ({"split": "3"}, "series")


def test_a_question_that_nobody_gave_an_answer_to_is_none(tmp_path):
    (row,) = answered(tmp_path / "q.jsonl", {name: OWN[0][name] for name in ("question_id", "video_id", "prompt")})
    assert answered_item(row) is None


def test_what_cannot_be_scored_is_said_with_its_question(tmp_path):
    (row,) = answered(tmp_path / "q.jsonl", {**OWN[0], "split": [1]})
    with pytest.raises(QuestionsError, match="question 1: split must be text or a whole number"):
        answered_item(row)


@pytest.mark.parametrize("answer", ["", " ", -1, "-1"])
def test_an_empty_answer_and_one_that_is_not_published_is_none(tmp_path, answer):
    (row,) = answered(tmp_path / "q.jsonl", {**OWN[0], "answer": answer})
    assert answered_item(row) is None


def test_as_many_choices_as_jobs_generate_takes_can_be_scored(tmp_path):
    choices = [f"choice {i}" for i in range(27)]
    (row,) = answered(tmp_path / "q.jsonl", {**OWN[0], "choices": choices, "answer": choices[26]})
    assert answered_item(row).answer == 26


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("y", 1),
        ("Y", 1),
        ("B", 1),
        (1, 1),
        ("1", 1),
        (1.0, 1),
        ("z", None),
    ],
)
def test_an_answer_means_the_same_choice_asked_here_or_scored_afterwards(tmp_path, answer, right):
    (row,) = answered(tmp_path / "q.jsonl", {**OWN[0], "answer": answer})
    (item,) = own_benchmark(str(tmp_path / "q.jsonl")).load(None).items
    assert (item.answer, answered_item(row).answer) == (right, right)
