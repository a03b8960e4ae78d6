"""What ``jobs.inspect ANSWERS --html`` writes: one self-contained page of questions with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

from pipeline.errors import QUESTION_FAULTS
from pipeline.inspect.answers import Answers
from pipeline.inspect.facts import fault_rows
from pipeline.inspect.page_files import asset, render, write_file
from pipeline.rows import AnswerRecord

MOST = 1000  # questions on a page, failed ones first: browsers stay quick, and the page below some megabytes


@dataclass(frozen=True)
class Choice:
    """A choice that a question offers, with the letter it is named by.

    ``share`` is its probability among them in percent, None where none was computed.
    """

    letter: str
    text: str
    chosen: bool
    share: float | None


def write_answers_page(answers: Answers, file: Path) -> str:
    """Write the page; return a line for the user about it. Raises UsageError if ``file`` cannot be written."""
    size = write_file(file, answers_page(answers))
    shown, of = min(len(answers.rows), MOST), len(answers.rows)
    which = f"{shown} answers" if shown == of else f"{shown} of {of} answers, failed ones first"
    return f"{file}: {size / 1000:,.0f} kB, {which}"


def answers_page(answers: Answers) -> str:
    """Render the page as HTML; whatever a question or a model says is text there, never markup."""
    rows = answers.as_records()
    rows.sort(key=lambda row: row["status"] == "ok")  # the sort is stable: answers stay in the order of their ids
    return render(
        "answers.html",
        style=asset("page.css") + asset("answers.css"),
        place=answers.place,
        counts=answers.summary,
        faults=fault_rows(answers.summary, QUESTION_FAULTS),
        facts=answers.facts(),
        rows=[{**row, "offered": choices_of(row)} for row in rows[:MOST]],
        n_rows=len(rows),
    )


def choices_of(row: AnswerRecord) -> Sequence[Choice]:
    """List the choices that a row's question offers, with the probability that the model gave each."""
    texts, scores = row["choices"] or [], row["choice_scores"]
    if scores is None:
        shares: list[float | None] = [None] * len(texts)
    else:
        best = max((score for score in scores if score is not None), default=0.0)
        weights = [0.0 if score is None else exp(score - best) for score in scores]
        shares = [100 * weight / (sum(weights) or 1.0) for weight in weights]
    return [
        Choice(chr(ord("A") + number), text, row["choice"] == number, share)
        for number, (text, share) in enumerate(zip(texts, shares, strict=True))
    ]
