"""What is left to ask: the questions minus the live rows of the answers; and what needs no model to be answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import QuestionFault, QuestionsChanged
from pipeline.generate.answers import KEYS
from pipeline.generate.asking import too_long
from pipeline.generate.request import GenerateRequest, answerable
from pipeline.rows import AnswerRecord, QuestionRecord, failed_answer, without_nulls
from pipeline.storage.stores import Store

COMPARED = ("video_ids", "prompt", "choices", "decoding")  # columns of a question that its answer depends on


def unanswered(request: GenerateRequest, live: pa.Table) -> list[QuestionRecord]:
    """Return the questions that this run must ask, under each pruning, with the number of the attempt.

    A failed row counts as done unless ``--retry-failed``. Raises QuestionsChanged where a question that has an answer
    is another one now.
    """
    asked = {row["question_id"]: without_nulls(row, QuestionRecord) for row in request.questions.to_pylist()}
    done: dict[tuple[str, str], tuple[AnswerRecord, str | None]] = {}
    for row in answer_rows(live.select(list(dict.fromkeys([*_KEPT, *COMPARED])))):
        question = asked.get(row["question_id"])
        if question is not None:  # of an answer no more is kept than decides: there may be a hundred for each question
            kept = cast(AnswerRecord, {name: value for name, value in row.items() if name in _KEPT})
            done[row["question_id"], row.get("pruning", "")] = kept, difference(question, row)
    todo: list[QuestionRecord] = []
    changed: list[str] = []
    for question in _under(asked.values(), request.prunings):
        old, different = done.get((question["question_id"], question.get("pruning", "")), (None, None))
        if old is None:
            todo.append({**question, "attempts": 1})
        elif different and old["status"] == "ok":
            changed.append(different)
        elif old["status"] != "ok" and request.config.retry_failed and (different or _may_retry(request, old)):
            todo.append({**question, "attempts": old["attempts"] + 1})
    refuse_changed(changed, request.store)
    return todo


def difference(question: QuestionRecord, old: AnswerRecord) -> str | None:
    """Describe how a question differs from the one that was answered; None where it does not."""
    different = [name for name in COMPARED if question.get(name) != old.get(name)]
    if not different:
        return None
    name = different[0]
    return f"{question['question_id']}: {name} was {_shown(old.get(name))}, is {_shown(question.get(name))}"


def refuse_changed(changed: Sequence[str], store: Store) -> None:
    """Raise QuestionsChanged if any question was ``changed``; each entry describes one."""
    if changed:
        raise QuestionsChanged(
            f"{len(changed)} questions with an answer in {store} are others now:\n  "
            + "\n  ".join(changed[:5])
            + "\nGive new questions new ids, or name another --out."
        )


_KEPT = ("question_id", "pruning", "status", "attempts", "error_class", "video_ids")
_ROWS_AT_ONCE = 4096


def answer_rows(table: pa.Table) -> Iterator[AnswerRecord]:
    """Yield the rows of answers; only a few at a time are in memory as Python objects."""
    for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
        for row in batch.to_pylist():
            yield without_nulls(row, AnswerRecord)


def _under(questions: Iterable[QuestionRecord], prunings: Iterable[str]) -> Iterator[QuestionRecord]:
    """Yield every question under every pruning; the prunings of one question follow each other."""
    for question in questions:
        for pruning in prunings:
            yield {**question, "pruning": pruning} if pruning else question


def _may_retry(request: GenerateRequest, old: AnswerRecord) -> bool:
    """Return whether a failed question may be asked again: it has attempts left, or its videos are cached by now."""
    if old["attempts"] < request.config.max_attempts:
        return True
    waits_for_videos = old["error_class"] in {"unknown-video", "failed-video"}
    return waits_for_videos and all(answerable(request.videos.get(name)) for name in old["video_ids"])


def notes_on_answered(request: GenerateRequest, live: pa.Table, todo: list[QuestionRecord]) -> list[str]:
    """Return lines for the user about questions that are not in ``todo`` because they have rows."""
    total = len(request.questions) * len(request.prunings)
    there = total - len(todo)
    if not there:
        return []
    mine = asked_rows(live, request.questions, request.prunings)
    bad = mine.filter(pc.not_equal(mine["status"], "ok"))
    again = {(question["question_id"], question.get("pruning")) for question in todo}
    failed = len(set(zip(*(bad[name].to_pylist() for name in KEYS), strict=True)) - again)
    answers = f"{there} of {total} questions have their answers already"
    if not failed:
        return [answers]
    lines = [f"{answers}, {failed} of them as errors"]
    if request.config.retry_failed:
        lines.append(f"note: they have had their {request.config.max_attempts} attempts; raise --max-attempts for more")
    return lines


def asked_rows(live: pa.Table, questions: pa.Table, prunings: Iterable[str]) -> pa.Table:
    """Select the live rows of the answers that belong to questions and prunings; "" is none."""
    mine = pc.is_in(live["question_id"], value_set=questions["question_id"].combine_chunks())
    under = pa.array([name or None for name in prunings], pa.string())
    return live.filter(pc.and_(mine, pc.is_in(live["pruning"], value_set=under)))


def _shown(value: object) -> str:
    """Return the repr of a value, shortened to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def split_decided(
    request: GenerateRequest, todo: list[QuestionRecord]
) -> tuple[list[QuestionRecord], list[AnswerRecord]]:
    """Split questions into those for the model, and the error rows of those that the cache alone decides."""
    ask: list[QuestionRecord] = []
    rows: list[AnswerRecord] = []
    for question in todo:
        failure = _failure(request, question)
        if failure is None:
            ask.append(question)
        else:
            rows.append(failure)
    return ask, rows


def _failure(request: GenerateRequest, question: QuestionRecord) -> AnswerRecord | None:
    """Return the error row of a question whose videos are missing, removed, failed or too long; else None."""
    rows = []
    for video_id in question["video_ids"]:
        row = request.videos.get(video_id)
        if row is None:
            message = f"{video_id!r} is not in the cache {request.cache}: prune it, then --retry-failed"
            return failed_answer(question, QuestionFault("unknown-video", message))
        if row["status"] == "removed":
            message = f"{video_id!r} was removed from the cache {request.cache}: {row.get('error_message', '')}"
            return failed_answer(question, QuestionFault("unknown-video", message))
        if row["status"] != "ok":
            message = f"{video_id!r} failed: {row['error_class']}: {row['error_message']}"
            return failed_answer(question, QuestionFault("failed-video", message))
        rows.append(row)
    n_visual, context = request.n_visual(rows, question.get("pruning", "")), request.builder.context_length
    if n_visual > context:
        counted: AnswerRecord = {**cast(AnswerRecord, question), "n_visual_tokens": n_visual}
        return failed_answer(counted, too_long(n_visual, context))
    return None


def in_blocks(questions: Sequence[QuestionRecord], size: int) -> list[list[QuestionRecord]]:
    """Group questions into blocks of about ``size``; those on the same videos stay together where they fit.

    Of the same videos, those under the same pruning stand together, which share what goes before the question.
    """
    places = {name: place for place, name in enumerate(dict.fromkeys(row.get("pruning", "") for row in questions))}
    ordered = sorted(questions, key=lambda row: (row["video_ids"], places[row.get("pruning", "")]))
    blocks: list[list[QuestionRecord]] = []
    for _, same_videos in groupby(ordered, key=itemgetter("video_ids")):
        group = list(same_videos)
        for start in range(0, len(group), size):
            part = group[start : start + size]
            if not blocks or len(blocks[-1]) + len(part) > size:
                blocks.append([])
            blocks[-1] += part
    return blocks
