"""Reports of ``jobs.inspect`` on answers: counts, failures, and some questions with their answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cache.near_ids import suggest_ids
from pipeline.errors import QUESTION_FAULTS, UsageError
from pipeline.generate.answers import (
    ANSWER_SCHEMA,
    AnswersIdentity,
    AnswersTable,
    read_answers_header,
    sort_naturally,
)
from pipeline.generate.conversation import load_messages
from pipeline.generate.summary import AnswerSummary, format_warned, summarize_answers
from pipeline.inspect.report import Failures, format_values, list_failed_rows, render_facts
from pipeline.rows import AnswerRecord, JsonObject
from pipeline.storage.stores import Store

MAX_SHOWN = 20  # questions in the terminal
_TEXT = 72  # characters of a prompt or an answer in a table
_OWN_COLUMNS = frozenset(ANSWER_SCHEMA.names)


@dataclass(frozen=True)
class Answers:
    """The answers at one location, read for display.

    Attributes:
        place: the location as it was named.
        rows: the live row of each question under each pruning, in natural order of the ids.
    """

    place: str
    identity: AnswersIdentity
    rows: pa.Table

    @classmethod
    def open(cls, store: Store, question_id: str | None = None) -> Answers:
        """Read all answers, or those to one question.

        Raises:
            NotAnswers: the store holds no answers.
            UsageError: the question has no row; the message suggests a similar id.
            CorruptShard: a file of the answers is damaged.
        """
        identity = read_answers_header(store)["identity"]
        rows = AnswersTable(store, identity).live()
        if question_id is not None:
            ids, rows = rows["question_id"], rows.filter(pc.equal(rows["question_id"], question_id))
            if not len(rows):
                near = suggest_ids(question_id, ids)
                raise UsageError(f"{question_id!r} is not among the {len(ids)} answers in {store}{near}")
        return cls(str(store), identity, sort_naturally(rows))

    @cached_property
    def summary(self) -> AnswerSummary:
        """The counts of these answers."""
        return summarize_answers(self.rows, len(self.rows), frozenset(), 0.0)

    @cached_property
    def prunings(self) -> list[str]:
        """The names of the prunings of the rows, "none" for a row without one; [] if no row has one."""
        names = pc.unique(self.rows["pruning"]).to_pylist()
        return [name or "none" for name in names] if any(names) else []

    def as_record(self) -> JsonObject:
        """Return location, identity and counts as a JSON-able dict, without the answers."""
        counts = self.summary.standing()
        del counts["n_outside"], counts["seconds"]  # answers record neither of the two
        return {"answers": self.place, "identity": cast(JsonObject, self.identity), **counts}

    def failed(self) -> Failures:
        """List the failed questions in row order."""
        return list_failed_rows(self.rows, ("question_id", "pruning", "error_class", "error_message", "attempts"))


def render_answers_report(answers: Answers) -> RenderableType:
    """Render counts, failures by class, and the first MAX_SHOWN rows with prompt, answer and target."""
    parts: list[RenderableType] = [render_facts(_iter_answers_facts(answers)), ""]
    if answers.summary.failures:
        parts += [answers.summary.make_failures_table("question", QUESTION_FAULTS), ""]
    table = Table(show_edge=False)
    for name in ("question", "video", *(["pruning"] if answers.prunings else []), "prompt", "answer", "target"):
        table.add_column(name, overflow="fold")
    for row in answers.rows.slice(0, MAX_SHOWN).to_pylist():
        answer = {"ok": _format_answer(row), "removed": f"removed: {row['error_message']}"}.get(
            row["status"], f"failed: {row['error_class']}"
        )
        pruning = [row["pruning"] or ""] if answers.prunings else []
        videos = ", ".join(row["video_ids"])
        cells = [row["question_id"], videos, *pruning, *map(_shorten, (row["prompt"], answer, row["target"]))]
        table.add_row(*map(Text, cells))  # texts come from files: never markup
    more = len(answers.rows) - MAX_SHOWN
    return Group(*parts, table, *([f"... and {more} more"] if more > 0 else []))


def render_question_report(answers: Answers) -> RenderableType:
    """Render all rows of one question in full, one block per pruning."""
    parts: list[RenderableType] = []
    for row in answers.rows.to_pylist():
        parts += [render_facts(_iter_question_facts(row)), ""]
    return Group(*parts[:-1])


def _iter_answers_facts(answers: Answers) -> Iterator[tuple[str, str]]:
    """Yield (name, value) pairs of the answers' identity and counts, without names that the identity lacks."""
    identity = answers.identity
    counts = answers.summary
    yield "answers", answers.place
    if model := identity.get("model"):
        yield "model", f"{model.get('type')}  {model.get('weights')}"
    cache = identity.get("cache", {})
    if "pruner" in cache:
        yield "cache", f"{cache['pruner'].get('method')} at {cache.get('retention_ratio')}"
    if pruner := identity.get("pruner"):
        yield "pruner", format_values(pruner)
    if answers.prunings:
        yield "prunings", ", ".join(answers.prunings)
    elif (ratio := identity.get("retention_ratio")) is not None:
        yield "answered at", f"{ratio} of the visual tokens"
    for name in ("prompt", "decoding"):
        if name in identity:
            yield name, format_values(identity[name])
    if counts.n_warned:
        yield "warnings", format_warned(counts)
    removed = f", {counts.n_removed} removed" if counts.n_removed else ""
    yield "questions", f"{counts.n_ok} answered, {counts.n_failed} failed{removed}"
    tokens = f"{counts.visual_tokens:.0f} visual of {counts.prompt_tokens:.0f} in a prompt on average"
    yield "tokens", f"{tokens}, {counts.new_tokens:,} generated"


def _iter_question_facts(row: AnswerRecord) -> Iterator[tuple[str, str]]:
    """Yield (name, value) pairs of one row: question, choices, answer, token counts, carried columns, run."""
    yield "question", row["question_id"]
    if row["pruning"] is not None:
        yield "pruning", row["pruning"]
    yield "videos", ", ".join(row["video_ids"])
    yield from _iter_earlier_messages(row)
    yield "prompt", row["prompt"]
    scores = row["choice_scores"] or []
    for number, choice in enumerate(row["choices"] or []):
        score = scores[number] if scores else None
        yield f"choice {number}", choice if score is None else f"{choice}  (log-probability {score:.3f})"
    if row["status"] == "ok":
        yield "answer", _format_answer(row)
    elif row["status"] == "removed":
        yield "removed", row["error_message"] or ""
    else:
        yield "failed", f"{row['error_class']}: {row['error_message']}"
    if row["target"] is not None:
        yield "target", row["target"]
    if row["decode_warnings"]:
        yield "warnings", f"{row['decode_warnings']} while its videos were decoded: their frames may be damaged"
    if row["n_kept"] is not None:
        yield "tokens", f"{row['n_kept']} of {row['n_total']} visual ones, {row['n_prompt_tokens']} in the prompt"
    for name, value in row.items():
        if name not in _OWN_COLUMNS and value is not None:
            yield name, str(value)
    yield "run", f"{row['run_id']}, attempt {row['attempts']}"


def _format_answer(row: AnswerRecord) -> str:
    """Return the answer for display: if it is a choice's letter, the choice's text follows it; "" without an answer."""
    answer, choices, number = row["answer"] or "", row["choices"], row["choice"]
    if choices is None or number is None or len(answer) != 1:
        return answer
    return choices[number] if choices[number].startswith(answer) else f"{answer}. {choices[number]}"


def _iter_earlier_messages(row: AnswerRecord) -> Iterator[tuple[str, str]]:
    """Yield (role, text) of the messages before the prompt; a video is shown as "(video)"."""
    for message in load_messages(row["conversation"] or "[]")[:-1]:
        yield message["role"], " ".join(part.get("text", "(video)") for part in message["content"])


def _shorten(text: str | None) -> str:
    """Put a text on one line of at most _TEXT characters, with "..." at the end if it is cut; None gives ""."""
    line = " ".join((text or "").split())
    return line if len(line) <= _TEXT else f"{line[: _TEXT - 3]}..."
