"""A benchmark's questions as jobs.generate asks them, and a row of scores for each, whatever became of the answer."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from gstep.language import Decoding
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.benchmarks.own import make_user_benchmark
from pipeline.evaluate.page import format_warned_line
from pipeline.evaluate.protocols import LETTER, PromptTemplate, Protocol
from pipeline.evaluate.scores import (
    SCORE_SCHEMA,
    AnsweredItems,
    Reply,
    make_question_table,
    make_score_table,
    read_answered_item,
    read_reply,
)
from pipeline.evaluate.statistics import ORIGINAL, MethodAtRatio
from pipeline.generate.answers import ANSWER_SCHEMA
from pipeline.generate.questions import QUESTION_SCHEMA, AnswerMode, read_questions, strip_reasoning
from pipeline.rows import AnswerRecord, drop_nulls
from tests.builders.answers import write_questions

FASTV = "fastv,K=3@0.25"
FREE = {"options": (), "answer": None}  # a question that is answered by a text
ARMS = {"none@1": ORIGINAL, FASTV: MethodAtRatio("fastv,K=3", 0.25)}


def item(question_id="q", options=("a dog", "a cat", "a kite"), answer=1, **more) -> Item:
    return Item(**{
        "question_id": question_id,
        "video_ids": ("v", "w"),
        "question": "What?",
        "options": options,
        "answer": answer,
        "expected": "a cat",
        "cluster": "c",
        **more,
    })  # fmt: skip


def row(answer="B", question_id="q", pruning="none@1", status="ok", **more):
    return {
        "question_id": question_id, "video_ids": ["v", "w"], "prompt": "p", "run_id": "r", "attempts": 1,
        "status": status, "answer": answer, "pruning": pruning, **more
    }  # fmt: skip


def by(rule, reasoning=()):
    """A protocol that reads replies by a rule."""
    return Protocol(name="mine", prompt=PromptTemplate("{question}"), parser=rule, reasoning=reasoning)


def scored(items, *answers, arms=ARMS, rule="letter"):
    table = pa.Table.from_pylist(list(answers), schema=ANSWER_SCHEMA)
    made = make_score_table(AnsweredItems.select(items, arms, table), by(rule))
    assert made.schema == SCORE_SCHEMA
    return made


def test_every_question_has_a_row_under_every_arm_in_their_order_and_without_an_answer_it_failed():
    """Answers under other prunings and to other questions are not looked at."""
    others = row("A", "1", pruning="gstep@0.25"), row("A", "other")
    failed = row(None, "1", FASTV, "failed", error_class="io")
    rows = scored([item("2"), item("1")], *others, row(question_id="1"), row(question_id="2", pruning=FASTV), failed)
    names = ("method", "retention_ratio", "question_id", "error_class", "reply")
    assert [tuple(one[name] for name in names) for one in rows.to_pylist()] == [
        ("none", 1.0, "2", "unanswered", None), ("none", 1.0, "1", None, "B"),
        ("fastv,K=3", 0.25, "2", None, "B"), ("fastv,K=3", 0.25, "1", "io", None),
    ]  # fmt: skip
    for one in rows.to_pylist():
        read = (one["status"], one["parsed"], one["right"], one["score"])
        assert read == (("ok", 1, True, 1.0) if one["reply"] else ("failed", None, False, 0.0))
        assert (one["answer"], one["n_options"]) == (1, 3)  # of the question it is known all the same


@pytest.mark.parametrize(("rule", "read"), [("extract-mcq-answer", (1, True, 1.0)), ("videomme-0.5", (0, False, 0.0))])
def test_a_reply_is_read_by_the_rule(rule, read):
    (one,) = scored([item()], row("Answer: B"), arms={"none@1": ORIGINAL}, rule=rule).to_pylist()
    assert (one["reply"], (one["parsed"], one["right"], one["score"])) == ("Answer: B", read)


@pytest.mark.parametrize(
    ("asked", "reply", "protocol", "read"),
    [
        *(({}, reply, by("letter"), Reply(None, False, 0.0)) for reply in ("", "I cannot say.", "E")),
        ({}, "no idea", by("egoschema"), Reply(None, False, pytest.approx(1 / 3), "drawn")),  # a draw's expectation
        ({"answer": None}, "no idea", by("egoschema"), Reply(None, False, 0.0, "drawn")),
        ({"answer": None}, "B", by("letter"), Reply(1, False, 0.0)),
        (FREE, " A cat. ", by("letter"), Reply(None, True, 1.0)),
        (FREE, "A cat, or a dog.", by("letter"), Reply(None, False, 0.0)),
        # What a reply thinks is not read for questions of one's own.
        ({}, "<think>The answer is C, or A.</think>\n\nB", LETTER, Reply(1, True, 1.0)),
        (FREE, "It is striped, a tiger?\n</think>\n\nA cat.", LETTER, Reply(None, True, 1.0)),
    ],
)
def test_a_reply_is_right_by_the_option_that_it_names_or_by_its_text(asked, reply, protocol, read):
    assert read_reply(item(**asked), row(reply), protocol) == read


@pytest.mark.parametrize(
    ("reply", "read"),
    [
        ("<think>A or C?</think> B", 1),
        ("so it is A</think>C", 2),  # the opening tag is in the prompt
        ("<think>first</think>A<think>no</think>", 0),
        ("<analysis>A</analysis>\nB", 1),
        ("<think>A", 0),  # never closed: it stays
        ("<THINK>C</THINK> B", 2),
    ],
)
def test_what_a_reply_thinks_is_not_read_by_the_protocol_of_lmms_eval_073(reply, read):
    newer, older = BENCHMARKS["longvideobench"].protocols
    assert strip_reasoning(f" {reply}", newer.reasoning).strip(" ") == strip_reasoning(reply, newer.reasoning)
    assert read_reply(item(), row(reply), newer).parsed == read
    assert read_reply(item(), row(reply), older) == read_reply(item(), row(reply), replace(newer, reasoning=()))


def test_a_scored_choice_counts_as_it_is():
    """Where texts are scored the answer is one, and a rule could read a letter out of it."""
    answer = row("A kite", choice=2, choice_scores=[-3.0, -2.0, -1.0])
    assert read_reply(item(answer=2), answer, by("videomme-0.5")) == Reply(2, True, 1.0)


def test_what_is_known_of_an_answer_stands_in_the_scores_and_one_line_counts_those_of_damaged_frames():
    choice_scores = [-3.0, -2.0, -1.0]
    rows = [
        row("Based on what I", "1", finish="length", decode_warnings=4, n_total=8, n_kept=3, kept_per_frame=[2, 1]),
        row("B", "2", finish="stop", decode_warnings=0, n_total=8, n_kept=2),
        row("hm", "3", finish="stop", choice=2, choice_scores=choice_scores),
        row("x", "4"),
    ]
    table = scored(map(item, "1234"), *rows, arms={"none@1": ORIGINAL}, rule="longvideobench")
    names = ("finish", "weak", "parsed", "decode_warnings", "n_total", "n_kept", "kept_per_frame", "choice_scores")
    assert [tuple(one[name] for name in names) for one in table.to_pylist()] == [
        ("length", "in-word", 1, 4, 8, 3, [2, 1], None),
        ("stop", None, 1, 0, 8, 2, None, None),
        ("stop", None, 2, None, None, None, None, choice_scores),
        (None, "drawn", None, None, None, None, None, None),
    ]
    assert format_warned_line(table) == (
        "1 of 4 answers, about 1 videos (v), come from frames that were decoded with warnings and may be damaged"
    )
    assert format_warned_line(table.slice(1)) == ""


VIDEOMME = BENCHMARKS["videomme"].protocol()
OWN = [
    {"question_id": 1, "video_id": "a", "prompt": "What?", "choices": ["x", "y"], "answer": "y", "split": "s"},
    {"question_id": "two", "video_id": ["a", "b"], "prompt": "Why?", "answer": "because"},
]


def test_where_a_reply_is_generated_the_prompt_is_the_protocols_whole_text():
    """Nothing is added to it: choices of its own would be put below once more."""
    asked = item("007-2", ("A. 1900.", "B. 1950."), video_ids=("data/-Ab3.mp4",), expected="B")
    table = make_question_table([asked], VIDEOMME, "llava_onevision")
    (row,) = table.to_pylist()
    assert table.schema == QUESTION_SCHEMA
    assert row["prompt"] == VIDEOMME.text(asked, "llava_onevision") and "B. 1950." in row["prompt"]
    assert (row["question_id"], row["video_ids"], row["choices"]) == ("007-2", ["data/-Ab3.mp4"], None)
    assert row["target"] == "B" and "target" not in row["decoding"]
    assert json.loads(row["decoding"]) == {
        "method": "generate", "system": "You are a helpful assistant.", "max_new_tokens": 16, "temperature": 0.0
    }  # fmt: skip


def test_own_questions_and_conversations_are_asked_as_jobs_generate_asks_them_and_told_apart(tmp_path):
    first = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A dog."}]
    rows = [
        {**OWN[0], "question_id": name, "prompt": None, "messages": [*turns, {"role": "user", "content": "What?"}]}
        for name, turns in (("long", first), ("short", []))
    ]
    file = str(write_questions(tmp_path / "q.jsonl", [*rows, OWN[1]]))
    loaded = make_user_benchmark(file).load(None)
    assert loaded.faults == ()  # the same last message on the same video is no repetition
    table = make_question_table(loaded.items, LETTER, "llava_onevision")
    asked = read_questions(file, AnswerMode(Decoding(64)))
    for name in ("question_id", "video_ids", "prompt", "conversation", "choices", "target", "decoding"):
        assert table[name].to_pylist() == asked[name].to_pylist(), name
    assert [text is None for text in table["conversation"].to_pylist()] == [False, False, True]
    for item, row in zip(loaded.items, answered(tmp_path / "q.jsonl", *rows, OWN[1]), strict=True):
        assert read_answered_item(row).conversation == item.conversation


def answered(path, *rows) -> list[AnswerRecord]:
    """What jobs.generate leaves of the questions of a file."""
    table = read_questions(str(write_questions(path, list(rows))), AnswerMode(Decoding(), "loglikelihood"))
    return [drop_nulls({**row, "status": "ok", "answer": "x"}, AnswerRecord) for row in table.to_pylist()]


def test_an_answered_question_is_the_one_that_its_file_held(tmp_path):
    file = write_questions(tmp_path / "q.jsonl", OWN)
    items = make_user_benchmark(str(file)).load(None).items
    found = [read_answered_item(row) for row in answered(file, *OWN)]
    assert [item.cluster for item in found] == ["", ""]  # none was named
    for item, same in zip(found, items, strict=True):
        assert {**vars(item), "cluster": None} == {**vars(same), "cluster": None}
    assert (found[0].options, found[0].answer, found[0].splits) == (("x", "y"), 1, {"split": "s"})
    assert (found[1].options, found[1].answer, found[1].video_ids) == ((), None, ("a", "b"))
    (named,) = answered(tmp_path / "q.jsonl", {**OWN[0], "split": 3, "cluster": "series", "topic": "x"})
    assert (read_answered_item(named).splits, read_answered_item(named).cluster) == ({"split": "3"}, "series")
    for answer in ("", " ", -1, "-1"):  # none, or not published
        (row,) = answered(tmp_path / "q.jsonl", {**OWN[0], "answer": answer})
        assert read_answered_item(row) is None


@pytest.mark.parametrize(("answer", "right"), [("y", 1), ("Y", 1), ("B", 1), (1, 1), ("1", 1), (1.0, 1), ("z", None)])
def test_an_answer_means_the_same_choice_asked_here_or_scored_afterwards(tmp_path, answer, right):
    (row,) = answered(tmp_path / "q.jsonl", {**OWN[0], "answer": answer})
    (item,) = make_user_benchmark(str(tmp_path / "q.jsonl")).load(None).items
    assert (item.answer, read_answered_item(row).answer) == (right, right)
