"""The reports of answers, and the lines and records of those that failed."""

import json

from pipeline.generate.answers import commit_answers, write_answers_header
from pipeline.inspect.answers import MAX_SHOWN, Answers, render_answers_report, render_question_report
from pipeline.storage.stores import LocalStore
from tests.pipeline.pages import shown

IDENTITY = {
    "cache": {"pruner": {"method": "gstep"}, "retention_ratio": 0.25},
    "model": {"type": "llava_onevision", "weights": "hub:x@1"},
    "retention_ratio": 0.1,
}
GOOD = {
    "status": "ok", "attempts": 1, "n_visual_tokens": 6, "n_prompt_tokens": 10, "n_new_tokens": 3, "n_total": 60,
    "n_kept": 6, "load_s": 0.5, "prefill_s": 0.5, "decode_s": 0.5, "batch_size": 1, "answer": "this",
}  # fmt: skip
FAILED = {"status": "failed", "attempts": 2, "error_class": "io", "error_message": "it cannot be read"}


def row(question_id: str, values=GOOD, **more):
    return {"question_id": question_id, "video_ids": ["v.mp4"], "prompt": "What?", **values, **more}


def stored(tmp_path, *rows) -> LocalStore:
    store = LocalStore(tmp_path / "answers")
    store.make()
    write_answers_header(store, IDENTITY)
    commit_answers(store, "run", 0, rows)
    return store


def test_counts_failures_and_the_first_questions_are_shown(tmp_path):
    rows = [row(f"q{n:02}", target="[/b]") for n in range(MAX_SHOWN + 2)]
    said = shown(render_answers_report(Answers.open(stored(tmp_path, *rows, row("b", FAILED, target=None)))))
    assert f"{MAX_SHOWN + 2} answered, 1 failed" in said and "hub:x@1" in said and "gstep at 0.25" in said
    assert "failed: io" in said and "it cannot be read" in said and "--retry-failed" in said
    assert "q00" in said and f"q{MAX_SHOWN:02}" not in said and "... and 3 more" in said
    assert next(line for line in said.splitlines() if "q00" in line).split("│")[3:] == [" this       ", " [/b]   "]


def test_the_letter_of_a_choice_is_followed_by_its_text(tmp_path):
    plain = row("q1", answer="B", choices=["red", "yellow"], choice=1)
    lettered = row("q2", answer="A", choices=["A. red", "B. yellow"], choice=0)
    written = row("q3", answer="It is red", choices=["red", "yellow"], choice=0)
    store = stored(tmp_path, plain, lettered, written, row("q4", answer="B"))
    lines = shown(render_answers_report(Answers.open(store))).splitlines()
    answers = {cells[0].strip(): cells[3].strip() for cells in (line.split("│") for line in lines) if len(cells) == 5}
    assert answers == {"q1": "B. yellow", "q2": "A. red", "q3": "It is red", "q4": "B"}
    assert "B. yellow" in shown(render_question_report(Answers.open(store, "q1")))


def test_a_question_is_shown_whole_under_each_pruning(tmp_path):
    choices = {"choices": ["a dog", "a cat"], "choice": 1, "choice_scores": [-2.0, float("-inf")]}
    store = stored(
        tmp_path, row("q", pruning="gstep@0.1", **choices), row("q", FAILED, pruning="uniform@0.1"), row("other")
    )
    answers = Answers.open(store, "q")
    said = shown(render_question_report(answers))
    assert "a dog  (log-probability -2.000)" in said and "gstep@0.1" in said and "io: it cannot be read" in said
    assert "6 of 60" in said and "other" not in said
    assert "gstep@0.1" in shown(render_answers_report(Answers.open(store)))


def test_a_conversation_is_shown_turn_by_turn(tmp_path):
    turns = [
        {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Who is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A dog."}]},
        {"role": "user", "content": [{"type": "text", "text": "What?"}]},
    ]
    store = stored(tmp_path, row("q", conversation=json.dumps(turns)))
    lines = [line.split() for line in shown(render_question_report(Answers.open(store, "q"))).splitlines()]
    assert ["user", "(video)", "Who", "is", "it?"] in lines and ["assistant", "A", "dog."] in lines
    assert ["prompt", "What?"] in lines
