"""Answers on disk: which row counts, what damage says, and what is left to ask."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.errors import CorruptShard, NotAnswers, QuestionFault, QuestionsChanged
from pipeline.generate.answers import ANSWER_SCHEMA, AnswersTable, commit_answers, read_answers, write_answers_header
from pipeline.generate.config import GenerateConfig
from pipeline.generate.request import prepare
from pipeline.generate.resume import in_blocks, said_of_the_rest, unanswered, without_model
from pipeline.generate.summary import summarise_answers
from pipeline.rows import failed_answer
from pipeline.storage.stores import LocalStore
from tests.pipeline.asking import tiny_cache, write_questions


def row(question_id="1", status="ok", attempts=1, **more):
    return {
        "question_id": question_id, "video_ids": ["v"], "prompt": "p", "status": status, "attempts": attempts, **more
    }  # fmt: skip


@pytest.fixture
def store(tmp_path):
    write_answers_header(LocalStore(tmp_path), {})
    return LocalStore(tmp_path)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_what_is_committed_is_read_back(store, form):
    full = row(choices=["a", "b"], choice=1, choice_scores=[-2.5, -0.5], answer="line\u2028\nB", batch_size=3)
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


def test_the_live_row_is_ok_before_failed_then_the_last_attempt(store):
    commit_answers(store, "run1", 0, [row("1", answer="good"), row("2", "failed"), row("3", answer="first")])
    commit_answers(store, "run2", 0, [row("1", "failed", 2), row("2", "failed", 2), row("3", "ok", 2, answer="last")])
    rows = read_answers(str(store)).to_pylist()
    assert [(r["question_id"], r["status"], r["attempts"], r["answer"]) for r in rows] == [
        ("1", "ok", 1, "good"), ("2", "failed", 2, None), ("3", "ok", 2, "last")
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_flipped_bit_is_seen(store, form):
    commit_answers(store, "run", 0, [row(answer="yes")], form)
    (path,) = (Path(str(store)) / "answers").iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptShard, match="does not have the hash"):
        read_answers(str(store))


def test_a_folder_without_answers_is_said_to_be_none(tmp_path):
    with pytest.raises(NotAnswers, match=r"no answers\.json"):
        read_answers(tmp_path)
    for text, message in (
        ("{", "not JSON"),
        ('{"schema_version": 9}', "version 9"),
        ('{"schema_version": 1}', "identity"),
    ):
        (tmp_path / "answers.json").write_text(text)
        with pytest.raises(NotAnswers, match=message):
            read_answers(tmp_path)


ROWS = [
    {"question_id": "ok", "video_id": "a", "prompt": "p"},
    {"question_id": "bad", "video_id": "a", "prompt": "p"},
    {"question_id": "tried", "video_id": "a", "prompt": "p"},
    {"question_id": "gone", "video_id": "gone", "prompt": "p"},
    {"question_id": "since", "video_id": "b", "prompt": "p"},
    {"question_id": "new", "video_id": ["b", "failed"], "prompt": "p"},
]


@pytest.fixture
def job_of(tmp_path):
    """A checked request about a cache of the videos a and b, and of one that failed."""
    tiny_cache(tmp_path / "c", failed=("failed",))

    def job(rows=ROWS, **options):
        path = write_questions(tmp_path / "q.jsonl", rows)
        config = GenerateConfig(cache=str(tmp_path / "c"), questions=str(path), out=str(tmp_path / "o"), **options)
        return prepare(config, Console(quiet=True))

    return job


@pytest.fixture
def answered(job_of):
    """Rows of an earlier run for all of ROWS but the last."""
    store = job_of().store
    questions = {r["question_id"]: r for r in job_of().questions.to_pylist()}
    rows = [{**questions["ok"], "status": "ok", "attempts": 1}]
    for name, error_class, attempts in (
        ("bad", "io", 1), ("tried", "io", 2), ("gone", "unknown-video", 2), ("since", "unknown-video", 2)
    ):  # fmt: skip
        rows.append({**failed_answer(questions[name], QuestionFault(error_class, "why")), "attempts": attempts})
    write_answers_header(store, job_of().identity)
    commit_answers(store, "run", 0, rows)
    return AnswersTable(store).live()


def test_what_has_a_row_is_not_asked_again(job_of, answered):
    assert [(r["question_id"], r["attempts"]) for r in unanswered(job_of(), answered)] == [("new", 1)]


def test_failed_questions_are_asked_again_on_request_within_their_attempts(job_of, answered):
    todo = unanswered(job_of(retry_failed=True), answered)
    # The video of "since" is in the cache by now, whatever was tried before.
    assert [(r["question_id"], r["attempts"]) for r in todo] == [("bad", 2), ("since", 3), ("new", 1)]
    todo = unanswered(job_of(retry_failed=True, max_attempts=3), answered)
    assert [r["question_id"] for r in todo] == ["bad", "tried", "gone", "since", "new"]


def test_what_is_not_asked_again_is_said_with_the_way_to_ask_it(job_of, answered):
    def said(rows=ROWS, **options):
        job = job_of(rows, **options)
        return said_of_the_rest(job, answered, unanswered(job, answered))

    assert said() == ["5 of 6 questions have their answers already, 4 of them as errors"]
    assert said(retry_failed=True) == [
        "3 of 6 questions have their answers already, 2 of them as errors",
        "note: they have had their 2 attempts; raise --max-attempts for more",
    ]
    assert said(ROWS[:1]) == ["1 of 1 questions have their answers already"]
    assert said(ROWS[-1:]) == []


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"prompt": "q"}, "ok: prompt was 'p', is 'q'"),
        ({"video_id": "b"}, "ok: video_ids was ['a'], is ['b']"),
        ({"choices": ["x", "y"]}, "ok: choices was None, is ['x', 'y']"),
        ({"max_new_tokens": 3}, "ok: decoding was"),
    ],
)
def test_an_answered_question_that_changed_is_refused(job_of, answered, change, shown):
    with pytest.raises(QuestionsChanged) as error:
        unanswered(job_of([{**ROWS[0], **change}, *ROWS[1:]]), answered)
    assert "1 questions with an answer" in str(error.value) and shown in str(error.value)


def test_a_corrected_question_that_failed_may_be_asked_again(job_of, answered):
    rows = [*ROWS[:2], {**ROWS[2], "prompt": "corrected"}]
    assert unanswered(job_of(rows), answered) == []
    assert [r["prompt"] for r in unanswered(job_of(rows, retry_failed=True), answered)] == ["p", "corrected"]


def test_what_the_index_decides_needs_no_model(job_of):
    job = job_of()
    ask, rows = without_model(job, unanswered(job, AnswersTable(job.store).live()))
    assert [r["question_id"] for r in ask] == ["ok", "bad", "tried", "since"]
    assert [(r["question_id"], r["error_class"], r["retryable"]) for r in rows] == [
        ("gone", "unknown-video", True), ("new", "failed-video", True)
    ]  # fmt: skip
    assert "'failed' failed: corrupt: damaged" in rows[1]["error_message"]


def ids(blocks):
    return [[r["question_id"] for r in block] for block in blocks]


def test_questions_on_a_video_stay_together_unless_they_are_many():
    rows = [{"question_id": i, "video_ids": [v]} for i, v in enumerate("abcabcabaa")]
    assert ids(in_blocks(rows, 4)) == [[0, 3, 6, 8], [9, 1, 4, 7], [2, 5]]
    assert ids(in_blocks(rows, 5)) == [[0, 3, 6, 8, 9], [1, 4, 7, 2, 5]]
    assert ids(in_blocks(rows, 100)) == [[0, 3, 6, 8, 9, 1, 4, 7, 2, 5]]
    assert sorted(i for (i,) in ids(in_blocks(rows, 1))) == list(range(10))
    assert in_blocks([], 4) == []


def test_seconds_of_a_batch_count_once(job_of):
    job = job_of(ROWS[:2])
    measured = {"load_s": 0.5, "prefill_s": 4.0, "decode_s": 2.0, "batch_size": 2, "n_visual_tokens": 10}
    rows = [
        {**r, "status": "ok", "attempts": 1, **measured, "n_prompt_tokens": 20 + 10 * i, "n_new_tokens": 3}
        for i, r in enumerate(job.questions.to_pylist())
    ]
    commit_answers(job.store, "run", 0, rows)
    summary = summarise_answers(AnswersTable(job.store).live(), job.questions, {"ok", "bad"}, 2.0)
    assert summary.seconds == {"load": 1.0, "prefill": 4.0, "decode": 2.0}
    assert (summary.visual_tokens, summary.prompt_tokens, summary.new_tokens) == (10, 25, 6)
    assert (summary.n_ok, summary.n_new, summary.exit_code(0)) == (2, 2, 0)
    part = summarise_answers(AnswersTable(job.store).live(), job.questions.slice(0, 1), {"ok"}, 2.0)
    assert (part.n_ok, part.n_missing, part.new_tokens) == (1, 0, 3)  # of this file of questions alone
