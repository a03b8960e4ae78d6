"""From answers to scores: a row for each question and arm, whatever became of the answer."""

from dataclasses import replace

import pyarrow as pa
import pytest

from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.page import warned_line
from pipeline.evaluate.parsers import without_reasoning
from pipeline.evaluate.protocols import Prompt, Protocol
from pipeline.evaluate.scores import SCORE_SCHEMA, Reply, read_reply, score_table
from pipeline.evaluate.statistics import ORIGINAL, Arm
from pipeline.generate.answers import ANSWER_SCHEMA

ARMS = {"none@1": ORIGINAL, "fastv,K=3@0.25": Arm("fastv,K=3", 0.25)}


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
    return Protocol(name="mine", prompt=Prompt("{question}"), parser=rule, reasoning=reasoning)


def scored(items, *answers, arms=ARMS, rule="letter"):
    table = score_table(items, arms, pa.Table.from_pylist(list(answers), schema=ANSWER_SCHEMA), by(rule))
    assert table.schema == SCORE_SCHEMA
    return table.to_pylist()


def test_every_question_has_a_row_under_every_arm_in_their_order():
    rows = scored([item("2"), item("1")], row(question_id="1"), row(question_id="2", pruning="fastv,K=3@0.25"))
    assert [(r["method"], r["retention_ratio"], r["question_id"], r["status"]) for r in rows] == [
        ("none", 1.0, "2", "failed"), ("none", 1.0, "1", "ok"),
        ("fastv,K=3", 0.25, "2", "ok"), ("fastv,K=3", 0.25, "1", "failed"),
    ]  # fmt: skip


def test_a_question_without_an_answer_counts_as_failed():
    (missing, failed) = scored([item()], row(None, pruning="fastv,K=3@0.25", status="failed", error_class="io"))
    assert (missing["status"], missing["error_class"], failed["error_class"]) == ("failed", "unanswered", "io")
    for one in (missing, failed):
        assert (one["reply"], one["parsed"], one["right"], one["score"]) == (None, None, False, 0.0)
        assert (one["answer"], one["n_options"]) == (1, 3)  # of the question it is known all the same


def test_a_row_says_of_its_question_what_tables_go_by():
    (one,) = scored([item(splits={"duration": "short"})], row(), arms={"none@1": ORIGINAL})
    assert (one["video_id"], one["cluster"], one["splits"]) == ("v", "c", [("duration", "short")])


def test_a_reply_is_read_by_the_rule():
    (one,) = scored([item()], row("Answer: B"), arms={"none@1": ORIGINAL}, rule="extract-mcq-answer")
    assert (one["reply"], one["parsed"], one["right"], one["score"]) == ("Answer: B", 1, True, 1.0)
    (other,) = scored([item()], row("Answer: B"), arms={"none@1": ORIGINAL}, rule="videomme-0.5")
    assert (other["parsed"], other["right"], other["score"]) == (0, False, 0.0)


@pytest.mark.parametrize("reply", ["", "I cannot say.", "E"])
def test_a_reply_that_names_no_option_is_wrong(reply):
    assert read_reply(item(), row(reply), by("letter")) == Reply(None, False, 0.0)


@pytest.mark.parametrize(
    ("reply", "read"),
    [
        ("<think>A or C?</think> B", 1),
        ("so it is A</think>C", 2),  # the opening tag is in the prompt
        ("<think>first</think>A<think>no</think>", 0),
        ("<analysis>A</analysis>\nB", 1),
        ("<think>A", 0),  # never closed: it stays
        ("</think>A<think>", None),
        ("<THINK>C</THINK> B", 2),
    ],
)
def test_what_a_reply_thinks_is_not_read_by_the_protocol_of_lmms_eval_073(reply, read):
    newer, older = BENCHMARKS["longvideobench"].protocols
    assert without_reasoning(f" {reply}", newer.reasoning).strip(" ") == without_reasoning(reply, newer.reasoning)
    if read is not None:
        assert read_reply(item(), row(reply), newer).parsed == read
    assert read_reply(item(), row(reply), older) == read_reply(item(), row(reply), replace(newer, reasoning=()))


def test_where_the_rule_draws_the_score_is_its_expectation_and_nothing_is_right():
    assert read_reply(item(), row("no idea"), by("egoschema")) == Reply(None, False, pytest.approx(1 / 3))
    assert read_reply(item(options=("a dog",), answer=0), row("no idea"), by("egoschema")) == Reply(None, False, 1.0)
    assert read_reply(item(answer=None), row("no idea"), by("egoschema")) == Reply(None, False, 0.0)


def test_a_question_whose_answer_is_no_option_is_never_right():
    assert read_reply(item(answer=None), row("B"), by("letter")) == Reply(1, False, 0.0)


def test_a_scored_choice_counts_as_it_is():
    """Where texts are scored the answer is one, and a rule could read a letter out of it."""
    answer = row("A kite", choice=2, choice_scores=[-3.0, -2.0, -1.0])
    assert read_reply(item(answer=2), answer, by("videomme-0.5")) == Reply(2, True, 1.0)
    (one,) = scored([item(answer=2)], answer, arms={"none@1": ORIGINAL})
    assert one["choice_scores"] == [-3.0, -2.0, -1.0] and one["reply"] == "A kite"


def test_a_choice_that_was_read_when_it_was_answered_is_read_again_by_the_rule():
    assert read_reply(item(), row("Answer: B", choice=1), by("videomme-0.5")).parsed == 0


def test_a_free_answer_is_right_by_its_text():
    free = item(options=(), answer=None)
    assert read_reply(free, row(" A cat. "), by("letter")) == Reply(None, True, 1.0)
    assert read_reply(free, row("A cat, or a dog."), by("letter")) == Reply(None, False, 0.0)


def test_counts_of_tokens_come_along_as_far_as_they_are_known():
    known = row(n_total=8, n_kept=3, kept_per_frame=[2, 1])
    inside = row(pruning="fastv,K=3@0.25", n_total=8, n_kept=2)
    first, second = scored([item()], known, inside)
    assert (first["n_total"], first["n_kept"], first["kept_per_frame"]) == (8, 3, [2, 1])
    assert (second["n_total"], second["n_kept"], second["kept_per_frame"]) == (8, 2, None)
    assert first["choice_scores"] is None


def test_answers_under_other_prunings_and_to_other_questions_are_not_looked_at():
    rows = scored([item()], row("A", pruning="gstep@0.25"), row("A", question_id="other"), row("B"))
    assert [(r["question_id"], r["reply"]) for r in rows] == [("q", "B"), ("q", None)]


def test_decode_warnings_reach_the_scores_and_one_line_of_them():
    rows = [row(question_id="1", decode_warnings=4), row(question_id="2", decode_warnings=0), row(question_id="3")]
    items = [item(name) for name in "123"]
    table = score_table(items, {"none@1": ORIGINAL}, pa.Table.from_pylist(rows, schema=ANSWER_SCHEMA), by("letter"))
    assert table["decode_warnings"].to_pylist() == [4, 0, None]
    assert warned_line(table) == (
        "1 of 3 answers, about 1 videos, come from frames that were decoded with warnings and may be damaged"
    )
    assert warned_line(table.slice(1)) == ""
