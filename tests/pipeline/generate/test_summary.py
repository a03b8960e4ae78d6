"""What the answers hold for a file of questions, counted from their rows."""

import pytest

from pipeline.generate.answers import AnswersTable, commit_answers
from pipeline.generate.resume import asked_rows
from pipeline.generate.summary import summarise_answers
from tests.pipeline.asking import request_about, tiny_cache

QUESTIONS = [{"question_id": name, "video_id": "a", "prompt": "p"} for name in ("ok", "bad")]


@pytest.fixture
def job(tmp_path):
    """A checked request to ask QUESTIONS."""
    tiny_cache(tmp_path / "c")
    return request_about(tmp_path / "c", QUESTIONS)


def test_seconds_of_a_batch_count_once(job):
    measured = {"load_s": 0.5, "prefill_s": 4.0, "decode_s": 2.0, "batch_size": 2, "n_visual_tokens": 10}
    rows = [
        {**r, "status": "ok", "attempts": 1, **measured, "n_prompt_tokens": 20 + 10 * i, "n_new_tokens": 3}
        for i, r in enumerate(job.questions.to_pylist())
    ]
    job.store.make()
    commit_answers(job.store, "run", 0, rows)
    summary = summarise_answers(AnswersTable(job.store).live(), 2, {("ok", None), ("bad", None)}, 2.0)
    assert summary.seconds == {"load": 1.0, "prefill": 4.0, "decode": 2.0}
    assert (summary.visual_tokens, summary.prompt_tokens, summary.new_tokens) == (10, 25, 6)
    assert (summary.n_ok, summary.n_new, summary.exit_code(0)) == (2, 2, 0)
    first = asked_rows(AnswersTable(job.store).live(), job.questions.slice(0, 1), job.prunings)
    part = summarise_answers(first, 1, {("ok", None)}, 2.0)
    assert (part.n_ok, part.n_missing, part.new_tokens) == (1, 0, 3)  # of this file of questions alone
