"""Files for the server of a benchmark whose right answers are not published: the option that each reply names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import pyarrow as pa
from rich.console import Console

from pipeline.cache.schema import write_parquet
from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.files import SCORES
from pipeline.evaluate.run import ScoredQuestions
from pipeline.evaluate.server_scores import FORM, submission_name, write_form
from pipeline.evaluate.statistics.score_matrix import Arm, arm_by_row, arms_of
from pipeline.storage.stores import Store

FOLDER = "submissions"


class Submission(NamedTuple):
    """The options that one method at one ratio chose.

    Attributes:
        choices: question_id -> index of an option, from 0; failed questions are left out, and wrong there.
        n_drawn: replies that name no option, for which one was drawn.
    """

    choices: dict[str, int]
    n_drawn: int


def submissions(items: Sequence[Item], scores: pa.Table) -> dict[Arm, Submission]:
    """Return the submission of every method and ratio.

    Where a reply names no option, one is drawn as lmms-eval does, by the question's id: it is the same for all methods
    and in every run.
    """
    known = {item.question_id: item for item in items}
    made = {arm: Submission({}, 0) for arm in arms_of(scores)}
    rows = scores.select(["question_id", "status", "parsed"]).to_pylist()
    for arm, row in zip(arm_by_row(scores), rows, strict=True):
        if row["status"] == "ok":
            item = known[row["question_id"]]
            drawn = row["parsed"] is None
            made[arm].choices[item.question_id] = _draw(item) if drawn else row["parsed"]
            made[arm] = made[arm]._replace(n_drawn=made[arm].n_drawn + drawn)
    return made


def write_submissions(store: Store, done: ScoredQuestions, console: Console) -> list[str]:
    """Write the scores without a score, a file for each method and ratio, and the form for what the server returns.

    Returns their names. Raises OSError; UsageError where somebody made the form unreadable.
    """
    store.put(SCORES, write_parquet(done.scores))
    names = [SCORES]
    for arm, submission in submissions(done.loaded.items, done.scores).items():
        names.append(f"{FOLDER}/{submission_name(arm)}.json")
        store.put(names[-1], json.dumps(submission.choices, indent=1).encode())
        for line in _said(submission, len(done.loaded.items)):
            console.print(f"note: {names[-1]}: {line}", highlight=False, markup=False, soft_wrap=True)
    write_form(store, arms_of(done.scores))
    return [*names, FORM]


def _draw(item: Item) -> int:
    """Return the option drawn for a question whose reply names none, by a hash of the question's id."""
    return int.from_bytes(blake2b(item.question_id.encode(), digest_size=8).digest()) % len(item.options)


def _said(submission: Submission, n_questions: int) -> Iterator[str]:
    """Yield lines about drawn options and failed questions."""
    if submission.n_drawn:
        yield f"{submission.n_drawn} replies name no option; one is drawn for each, by the question's id"
    if missing := n_questions - len(submission.choices):
        yield f"{missing} questions failed, and are left out"
