"""What is left to ask: the questions minus their live rows, and nothing that changed goes unnoticed."""

from dataclasses import replace
from datetime import timedelta
from unittest.mock import Mock

import pyarrow as pa
import pytest

from pipeline.errors import QuestionFault, QuestionsChanged
from pipeline.generate.answerer import ANSWERED_SCHEMA
from pipeline.generate.answers import AnswersTable, commit_answers, write_answers_header
from pipeline.generate.job import Questions
from pipeline.generate.late_pruning import PruningSpec
from pipeline.generate.remaining import format_answered, refuse_changed_questions, select_remaining_questions
from pipeline.generate.run import CommittedAnswers
from pipeline.generate.summary import summarize_answers
from pipeline.rewrite.compact import join_tokens
from pipeline.rewrite.remove import remove_videos
from pipeline.rows import make_failed_answer
from pipeline.storage.stores import LocalStore
from tests.builders.answers import SHAPE, lines_of, request_about, tiny_cache
from tests.builders.caches import encoded, random_tokens, write_shard

VIDEOS = {"ok": "a", "bad": "a", "tried": "a", "gone": "gone", "since": "b", "new": ["b", "failed"]}
ROWS = [{"question_id": name, "video_id": video, "prompt": "p"} for name, video in VIDEOS.items()]


@pytest.fixture
def job_of(tmp_path):
    """A checked request about a cache of the videos a and b, and of one that failed."""
    tiny_cache(tmp_path / "c", failed=("failed",))

    def job(rows=ROWS, **options):
        return request_about(tmp_path / "c", rows, **options)

    return job


def select_live_of(job):
    """The live answers to what a job asks."""
    return AnswersTable(job.store).select_live_answers(job.questions, job.setup.prunings)


def unanswered(job):
    """What a job is left to ask."""
    codes, cached = dict.fromkeys(job.setup.prunings), job.forecast.cached
    return select_remaining_questions(job.store, select_live_of(job), job.questions, codes, job.config, cached)


@pytest.fixture
def answered(job_of):
    """Rows of an earlier run for all of ROWS but the last."""
    store = job_of().store
    questions = {r["question_id"]: r for r in job_of().questions.to_pylist()}
    rows = [{**questions["ok"], "status": "ok", "attempts": 1}]
    failed = (("bad", "io", 1), ("tried", "io", 2), ("gone", "unknown-video", 2), ("since", "unknown-video", 2))
    for name, error_class, attempts in failed:
        rows.append({**make_failed_answer(questions[name], QuestionFault(error_class, "why")), "attempts": attempts})
    write_answers_header(store, job_of().identity)
    commit_answers(store, "run", 0, rows)
    return AnswersTable(store).live()


def test_what_has_a_row_is_not_asked_again_and_failed_questions_on_request_within_their_attempts(job_of, answered):
    assert [(r["question_id"], r["attempts"]) for r in unanswered(job_of())] == [("new", 1)]
    todo = unanswered(job_of(retry_failed=True, max_attempts=2))
    # The video of "since" is in the cache by now, whatever was tried before.
    assert [(r["question_id"], r["attempts"]) for r in todo] == [("bad", 2), ("since", 3), ("new", 1)]
    todo = unanswered(job_of(retry_failed=True, max_attempts=3))
    assert [r["question_id"] for r in todo] == ["bad", "tried", "gone", "since", "new"]


def test_a_ratio_that_the_method_does_not_keep_is_a_note(tmp_path):
    tiny_cache(tmp_path / "c", ("a",), ratio=1.0, method="none")
    note = "note: --pruner none keeps 1 of the tokens, not 0.1"
    for method, ratio, said in (("none", 0.1, [note]), ("none", 1.0, []), ("random", 0.1, [])):
        assert lines_of(request_about(tmp_path / "c", ROWS[:1], pruner=method, retention_ratio=ratio)) == said


def test_rows_that_are_committed_again_after_an_interrupt_count_once(job_of):
    """They may come with others. What the workers compute with is recorded once for each kind."""
    job, record = job_of(), Mock()
    job.store.make()
    done = CommittedAnswers(job, "run", record, Mock())
    asked = job.questions.to_pylist()[:3]
    failed = [make_failed_answer(question, QuestionFault("io", "why")) for question in asked]
    rows = [{**row, "attempts": 1, "runtime": runtime} for row, runtime in zip(failed, ("{}", "{}", "[]"), strict=True)]
    for number, end in enumerate((1, 1, 3)):
        done.commit(number, pa.Table.from_pylist(rows[:end], schema=ANSWERED_SCHEMA))
    assert done.n_failed == len(done.keys) == 3 and len(AnswersTable(job.store).live()) == 3
    assert [call.kwargs for call in record.save.call_args_list] == [{"runtimes": [{}]}, {"runtimes": [{}, []]}]


def test_the_shards_of_a_stream_are_numbered_behind_the_rows_that_need_no_model(job_of):
    job = job_of(questions_per_shard=2)
    job.store.make()
    questions = [{**question, "attempts": 1} for question in job.questions.to_pylist()]
    done = CommittedAnswers(job, "run", Mock(), Mock())
    done.commit_settled([make_failed_answer(question, QuestionFault("io", "why")) for question in questions[:5]])
    assert (done.n_settled_shards, done.n_failed, len(done.keys)) == (3, 5, 0)
    assert len(job.store.names("answers", ".parquet")) == 3


def test_questions_whose_rows_are_committed_are_not_asked_again_after_the_nodes_change(grid_job):
    """A question is one of a pruning."""
    questions = Questions(unanswered(grid_job()))
    rows = pa.table({"question_id": ["ok", "bad", "none"], "pruning": ["gstep@0.25", "none@1", "none@1"]})
    left = [("ok", "none@1"), ("ok", "fastv,K=1@0.1"), ("bad", "gstep@0.25"), ("bad", "fastv,K=1@0.1")]
    assert under(questions.without(rows).rows) == left and len(questions) == 6
    assert len(questions.without(rows.slice(0, 0))) == 6


def test_what_is_not_asked_again_is_said_with_the_way_to_ask_it(job_of, answered):
    def said(rows=ROWS, **options):
        job = job_of(rows, **options)
        return list(format_answered(select_live_of(job), job.n_questions, unanswered(job), job.config))

    (line,) = said()
    assert line == "5 of 6 questions have their answers already, 4 of them as errors (--retry-failed asks them again)"
    line, note = said(retry_failed=True, max_attempts=2)
    assert line == "3 of 6 questions have their answers already, 2 of them as errors"
    assert note.startswith("note: the failed questions have used their 2 attempts; --max-attempts")
    assert said(ROWS[:1]) == ["1 of 1 questions have their answers already"]
    assert said(ROWS[-1:]) == []


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"prompt": "q" * 200}, f"ok: prompt was 'p', is '{'q' * 96}...\n"),
        ({"video_id": "b"}, "ok: video_ids was ['a'], is ['b']"),
        ({"choices": ["x", "y"]}, "ok: choices was None, is ['x', 'y']"),
        ({"max_new_tokens": 3}, "ok: decoding was"),
    ],
)
def test_an_answered_question_that_changed_is_refused(job_of, answered, change, shown):
    with pytest.raises(QuestionsChanged) as error:
        unanswered(job_of([{**ROWS[0], **change}, *ROWS[1:]]))
    assert "1 questions with an answer" in str(error.value) and shown in str(error.value)
    # A corrected answer, and what is carried along, ask nothing else.
    assert unanswered(job_of([{**ROWS[0], "answer": "no", "topic": "x"}])) == []


def test_a_right_answer_that_was_corrected_after_the_question_is_said_not_to_count(job_of, answered):
    """Of the questions that failed nothing is said: they are wrong by any right answer."""

    def said(rows):
        job = job_of(rows)
        assert job.select_todo()[1] == []
        return [line for line in lines_of(job) if "right answer" in line]

    now, failed = {**ROWS[0], "answer": "no"}, {**ROWS[1], "answer": "no"}
    assert said([ROWS[0], failed]) == []
    (line,) = said([now, failed])
    assert line.startswith("note: 1 answered questions have another right answer now, e.g. ok: was None, is 'no'. ")
    assert f"{job_of().store} keeps the earlier one" in line and "--score" in line and "another --out" in line


def test_right_answers_that_are_counted_from_1_are_noted_before_anything_is_asked(job_of):
    def said(answers):
        rows = [{**ROWS[0], "question_id": i, "choices": ["x", "y"], "answer": a} for i, a in enumerate(answers)]
        job = job_of(rows)
        assert len(job.select_todo()[1]) == len(rows)
        return lines_of(job)

    assert said([0, 1, None]) == []
    (line,) = said([1, 2, None])
    assert line.startswith("note: of 2 right answers that are numbers, 1 are the number of choices and none is 0")


def test_answers_on_a_video_that_was_encoded_again_are_said_to_be_of_the_earlier_tokens(job_of, answered, tmp_path):
    def said():
        job = job_of()
        assert [question["question_id"] for question in job.select_todo()[1]] == ["new"]
        return [line for line in lines_of(job) if "encoded again" in line]

    assert said() == []
    cache = LocalStore(tmp_path / "c")
    write_shard(cache, "run1", encoded("b", random_tokens(7, SHAPE), 0.25, "gstep", attempts=2))
    assert said() == []  # its question has failed
    write_shard(cache, "run2", encoded("a", random_tokens(8, SHAPE), 0.25, "gstep", attempts=2))
    (line,) = said()
    assert line.startswith("note: 1 answered questions are about videos that were encoded again since, e.g. ok. ")
    assert f"{job_of().store} keeps the answers from the earlier tokens" in line and "another --out" in line


def test_of_tokens_that_were_moved_the_run_that_made_them_is_not_known(job_of, tmp_path):
    def said():
        job = job_of(ROWS[:1])
        job.select_todo()
        return sum("encoded again" in line for line in lines_of(job))

    job = job_of(ROWS[:1])
    write_answers_header(job.store, job.identity)
    commit_answers(job.store, "an earlier run", 0, [{**job.questions.to_pylist()[0], "status": "ok", "attempts": 1}])
    assert said() == 1
    cache = LocalStore(tmp_path / "c")
    write_shard(cache, "run1", encoded("c", random_tokens(7, SHAPE), 0.25, "gstep"))
    join_tokens(cache, lambda line: None, timedelta(0))
    assert said() == 0


def test_questions_that_changed_are_named_up_to_five(job_of):
    store = job_of().store
    refuse_changed_questions([], store)
    with pytest.raises(QuestionsChanged, match=r"(?s)^7 questions with .*\n  4: prompt[^5]*name another --out"):
        refuse_changed_questions([f"{i}: prompt was 'p', is 'q'" for i in range(7)], store)


def test_a_corrected_question_that_failed_may_be_asked_again(job_of, answered):
    rows = [*ROWS[:2], {**ROWS[2], "prompt": "corrected"}]
    assert unanswered(job_of(rows)) == []
    assert [r["prompt"] for r in unanswered(job_of(rows, retry_failed=True))] == ["p", "corrected"]


def test_what_the_index_decides_needs_no_model_under_any_pruning(job_of, grid_job):
    job = job_of()
    ask, rows = job.forecast.split(unanswered(job))
    assert [r["question_id"] for r in ask] == ["ok", "bad", "tried", "since"]
    assert [(r["question_id"], r["error_class"], r["retryable"]) for r in rows] == [
        ("gone", "unknown-video", True), ("new", "failed-video", True)
    ]  # fmt: skip
    assert "'failed' failed: corrupt: damaged" in rows[1]["error_message"]
    job = grid_job(ROWS[3:4])
    ask, rows = job.forecast.split(unanswered(job))
    assert ask == [] and under(rows) == [("gone", pruning) for pruning in GRID]


def test_a_question_on_a_removed_video_costs_no_other_one(job_of, tmp_path):
    job_of()
    remove_videos(LocalStore(tmp_path / "c"), ["a"], "asked for", lambda line: None, timedelta(0))
    job = job_of(ROWS[::4])
    ask, (row,) = job.forecast.split(unanswered(job))
    assert [r["question_id"] for r in ask] == ["since"] and (row["status"], row["prompt"]) == ("removed", "")
    assert "'a' was removed from the cache" in row["error_message"] and row["error_message"].endswith(": asked for")


GRID = {
    "none@1": None,
    "gstep@0.25": PruningSpec("gstep", 0.25),
    "fastv,K=1@0.1": PruningSpec("fastv", 0.1, {"K": "1"}),
}


@pytest.fixture
def grid_job(tmp_path):
    """A checked request about a cache of all tokens, under every pruning of GRID."""
    (tmp_path / "grid").mkdir()
    tiny_cache(tmp_path / "grid" / "c", ratio=1.0, method="none")

    def job(rows=ROWS[:2], **options):
        return request_about(tmp_path / "grid" / "c", rows, GRID, **options)

    return job


def under(questions):
    return [(question["question_id"], question.get("pruning")) for question in questions]


def test_every_question_is_left_under_each_pruning_that_it_has_no_row_of(grid_job):
    """The first is answered without pruning, and failed under gstep; the second one has a row of another grid."""
    job = grid_job()
    first, second = job.questions.to_pylist()
    rows = [{**first, "pruning": "none@1", "status": "ok", "attempts": 1}]
    rows.append({**make_failed_answer(first, QuestionFault("io", "why")), "pruning": "gstep@0.25", "attempts": 1})
    rows.append({**second, "pruning": "uniform@0.5", "status": "ok", "attempts": 1})
    write_answers_header(job.store, job.identity)
    commit_answers(job.store, "run", 0, rows)
    job = grid_job()
    left = [("ok", "fastv,K=1@0.1"), *(("bad", pruning) for pruning in GRID)]
    assert under(unanswered(job)) == left
    assert under(select_live_of(job).to_pylist()) == [("ok", "gstep@0.25"), ("ok", "none@1")]
    (line,) = format_answered(select_live_of(job), job.n_questions, unanswered(job), job.config)
    assert line.startswith("2 of 6 questions have their answers already, 1 of them as errors (--retry-failed")
    again = unanswered(grid_job(retry_failed=True))
    assert under(again) == [("ok", "gstep@0.25"), *left] and [row["attempts"] for row in again] == [2, 1, 1, 1, 1]
    with pytest.raises(QuestionsChanged, match="1 questions with an answer"):
        unanswered(grid_job([{**ROWS[0], "prompt": "q"}]))


def test_seconds_of_a_batch_count_once(job_of):
    job = job_of([{"question_id": name, "video_id": "a", "prompt": "p"} for name in ("ok", "bad")])
    measured = {"load_s": 0.5, "prefill_s": 4.0, "decode_s": 2.0, "batch_size": 2, "n_visual_tokens": 10}
    shared = {"status": "ok", "attempts": 1, "n_new_tokens": 3, **measured}
    ends = ({"n_prompt_tokens": 20, "finish": "stop"}, {"n_prompt_tokens": 30, "finish": "length"})
    job.store.make()
    questions = job.questions.to_pylist()
    commit_answers(job.store, "run", 0, [{**row, **shared, **end} for row, end in zip(questions, ends, strict=True)])
    summary = summarize_answers(AnswersTable(job.store).live(), 2, {("ok", None), ("bad", None)}, 2.0)
    assert summary.seconds == {"load": 1.0, "prefill": 4.0, "decode": 2.0}
    assert (summary.visual_tokens, summary.prompt_tokens, summary.new_tokens) == (10, 25, 6)
    assert (summary.n_ok, summary.n_new, summary.exit_code(0)) == (2, 2, 0)
    assert summary.n_cut == 1 and "6 tokens generated; 1 answers were cut by max_new_tokens" in str(summary)
    assert "crashed workers are in [old]/r.log" in str(replace(summary, log="[old]/r.log"))  # a path is no markup
    first = AnswersTable(job.store).select_live_answers(job.questions.slice(0, 1), job.setup.prunings)
    part = summarize_answers(first, 1, {("ok", None)}, 2.0)
    assert (part.n_ok, part.n_missing, part.new_tokens) == (1, 0, 3)  # of this file of questions alone
