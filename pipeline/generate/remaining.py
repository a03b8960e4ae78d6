"""The questions that a run must ask, and notes about questions that have answers already."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import QuestionsChanged, make_printable
from pipeline.generate.answers import KEYS, iter_answers, make_answer_key
from pipeline.generate.config import GenerateConfig
from pipeline.generate.conversation import load_messages
from pipeline.rows import AnswerRecord, QuestionRecord, drop_nulls
from pipeline.storage.stores import Store

# Columns of a question that determine its answer.
COMPARED_COLUMNS = ("video_ids", "prompt", "conversation", "choices", "decoding")
# Columns that decide whether a question is asked again.
_DECIDING_COLUMNS = ("question_id", "pruning", "status", "attempts", "error_class", "video_ids")


def select_remaining_questions(
    store: Store,
    live: pa.Table,
    questions: pa.Table,
    codes: Mapping[str, str | None],
    config: GenerateConfig,
    cached_ids: Collection[str],
    removed_ids: Collection[str] = (),
) -> list[QuestionRecord]:
    """Select the questions that a run must ask, under each pruning, with the number of the attempt.

    A question is asked if it has no live row. A failed one is asked again only with ``--retry-failed``, and only if it
    has changed, has attempts left, or failed for lack of videos that are cached now. A removed row is final. A failed
    question about a video that was removed since is returned too, to get a removed row.

    Args:
        live: the live rows of these questions under these prunings.
        codes: pruning -> the hashes of its user code (``find_code``).
        cached_ids: the ids of videos with tokens.
        removed_ids: those of videos that were removed from the cache or the answers.

    Raises:
        QuestionsChanged: a question with a good answer has changed.
    """
    by_id = {row["question_id"]: drop_nulls(row, QuestionRecord) for row in questions.to_pylist()}
    answers_by_key: dict[tuple[str, str | None], tuple[AnswerRecord, str | None]] = {}
    for row in iter_answers(live.select(list(dict.fromkeys([*_DECIDING_COLUMNS, *COMPARED_COLUMNS])))):
        # Only these columns stay in memory, because a question may have a hundred answers.
        decision = cast(AnswerRecord, {name: value for name, value in row.items() if name in _DECIDING_COLUMNS})
        answers_by_key[make_answer_key(row)] = decision, describe_change(by_id[row["question_id"]], row)
    remaining: list[QuestionRecord] = []
    changes: list[str] = []
    for question in _pair_with_prunings(by_id.values(), codes):
        answer, change = answers_by_key.get(make_answer_key(question), (None, None))
        if answer is None:
            remaining.append({**question, "attempts": 1})
        elif answer["status"] == "ok":
            changes += [change] if change else []
        elif answer["status"] == "removed":
            continue
        elif any(video_id in removed_ids for video_id in question["video_ids"]):
            remaining.append({**question, "attempts": answer["attempts"] + 1})
        elif config.retry_failed:
            lacked_videos = answer["error_class"] in {"unknown-video", "failed-video"}
            videos_came = lacked_videos and all(video_id in cached_ids for video_id in answer["video_ids"])
            if change or answer["attempts"] < config.max_attempts or videos_came:
                remaining.append({**question, "attempts": answer["attempts"] + 1})
    refuse_changed_questions(changes, store)
    return remaining


def _pair_with_prunings(
    questions: Iterable[QuestionRecord], codes: Mapping[str, str | None]
) -> Iterator[QuestionRecord]:
    """Yield every question under every pruning, with the code; those of one question follow each other."""
    for question in questions:
        for pruning, code in codes.items():
            row: QuestionRecord = {**question, "pruning": pruning} if pruning else question
            yield row if code is None else {**row, "method_code": code}


def describe_change(question: QuestionRecord, answer: AnswerRecord) -> str | None:
    """Describe the first of COMPARED_COLUMNS in which a question and its answered version differ; None if equal."""
    for name in COMPARED_COLUMNS:
        before, now = answer.get(name), question.get(name)
        if before != now:
            label = name
            if name == "conversation":  # the first message that differs; None if one side has fewer
                conversations = [load_messages(row.get("conversation", "[]")) for row in (answer, question)]
                pairs = enumerate(zip_longest(*conversations), 1)
                label, before, now = next((f"message {i}", old, new) for i, (old, new) in pairs if old != new)
            return f"{make_printable(question['question_id'])}: {label} was {_shorten(before)}, is {_shorten(now)}"
    return None


def _shorten(value: object) -> str:
    """Return the repr of a value, cut to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def refuse_changed_questions(changes: Sequence[str], store: Store) -> None:
    """Raise QuestionsChanged with the first five of these descriptions, unless there are none."""
    if changes:
        raise QuestionsChanged(
            f"{len(changes)} questions with an answer in {store} have changed:\n  "
            + "\n  ".join(changes[:5])
            + "\nGive new questions new ids, or name another --out."
        )


def format_answered(
    live: pa.Table, n_questions: int, remaining: Sequence[QuestionRecord], config: GenerateConfig
) -> Iterator[str]:
    """Yield a line with the number of answered questions, if any, and how many of them failed.

    Removed rows are not counted. The line, or a second one, says how failed questions can be asked again: with
    ``--retry-failed``, or by a larger ``--max-attempts``.

    Args:
        n_questions: the number of questions times prunings.
        remaining: the questions that the run asks.
    """
    n_removed = pc.sum(pc.equal(live["status"], "removed")).as_py() or 0
    n_questions -= n_removed
    n_with_answers = n_questions - len(remaining)
    if not n_with_answers:
        return
    failed_rows = live.filter(pc.equal(live["status"], "failed"))
    keys = set(zip(*(failed_rows[name].to_pylist() for name in KEYS), strict=True))
    n_failed = len(keys - {make_answer_key(question) for question in remaining})
    text = f"{n_with_answers} of {n_questions} questions have their answers already"
    if not n_failed:
        yield text
    elif not config.retry_failed:
        yield f"{text}, {n_failed} of them as errors (--retry-failed asks them again)"
    else:
        yield f"{text}, {n_failed} of them as errors"
        yield f"note: the failed questions have used their {config.max_attempts} attempts; --max-attempts allows more"


def format_new_targets(store: Store, live: pa.Table, questions: pa.Table) -> Iterator[str]:
    """Yield a note if the right answers of answered questions have changed in the questions file.

    Such questions are not asked again, and ``store`` keeps the earlier right answers.
    """
    good = live.filter(pc.equal(live["status"], "ok"))
    rows_of_questions = pc.index_in(good["question_id"], value_set=questions["question_id"].combine_chunks())
    targets = zip(*(rows["target"].to_pylist() for rows in (good, questions.take(rows_of_questions))), strict=True)
    ids = good["question_id"].to_pylist()
    changes = [
        f"{name}: was {_shorten(before)}, is {_shorten(now)}"
        for name, (before, now) in zip(ids, targets, strict=True)
        if before != now
    ]
    if changes:
        yield (
            f"note: {len(changes)} answered questions have another right answer now, e.g. {changes[0]}. {store} keeps "
            "the earlier one, and jobs.evaluate --score compares with it: ask with another --out to score by the new "
            "one"
        )


def format_encoded_again(store: Store, live: pa.Table, videos: pa.Table) -> Iterator[str]:
    """Yield a note if good answers are about videos that were encoded again since.

    A video was encoded again if its run id, which begins with a time, is greater than the answer's.

    Args:
        videos: ``video_id``, ``status``, ``run_id`` and ``rewritten`` of the live rows of their videos. Rows with
            ``rewritten`` are skipped: their run only moved the tokens.
    """
    runs = {
        row["video_id"]: row["run_id"] for row in videos.to_pylist() if row["status"] == "ok" and not row["rewritten"]
    }
    good = live.filter(pc.equal(live["status"], "ok"))
    answers = zip(*(good[name].to_pylist() for name in ("question_id", "run_id", "video_ids")), strict=True)
    names = [name for name, run_id, ids in answers if any(runs.get(video_id, "") > run_id for video_id in ids)]
    if names:
        yield (
            f"note: {len(names)} answered questions are about videos that were encoded again since, e.g. {names[0]}. "
            f"{store} keeps the answers from the earlier tokens: ask with another --out for new ones"
        )


def format_removed(
    store: Store, live: pa.Table, remaining: Sequence[QuestionRecord], reasons: Mapping[str, str]
) -> Iterator[str]:
    """Yield up to two notes about removed videos: on questions not asked, and on good answers that stay.

    The second note has the command that removes them. ``reasons`` has the reason for each removed video.
    """
    if not reasons:
        return
    barred_questions = [
        (row["question_id"], reasons[name]) for row in remaining for name in row["video_ids"] if name in reasons
    ]
    if barred_questions:
        n_questions = len({name for name, _ in barred_questions})
        name, reason = barred_questions[0]
        yield (
            f"note: {n_questions} questions are about removed videos, e.g. {name}: {reason}. They are not asked, and "
            "count as neither failed nor missing"
        )
    good = live.filter(pc.equal(live["status"], "ok")).select(["question_id", "video_ids"]).to_pylist()
    if names := [row["question_id"] for row in good if not reasons.keys().isdisjoint(row["video_ids"])]:
        yield (
            f"note: {len(names)} answers are about videos that were removed since, e.g. {names[0]}. {store} keeps "
            f"them: python -m jobs.remove {store} --ids FILE --reason TEXT removes them too"
        )
