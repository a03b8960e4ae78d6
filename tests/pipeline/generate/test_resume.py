"""What is left to ask: the questions minus their live rows, and nothing that changed goes unnoticed."""

import pytest

from pipeline.errors import QuestionFault, QuestionsChanged
from pipeline.generate.answers import AnswersTable, commit_answers, write_answers_header
from pipeline.generate.resume import in_blocks, said_of_the_rest, unanswered, without_model
from pipeline.rows import failed_answer
from tests.pipeline.asking import request_about, tiny_cache

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
        return request_about(tmp_path / "c", rows, **options)

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
