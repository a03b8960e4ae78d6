"""A benchmark whose right answers are not published: files for its server, and the scores that the server returned."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import pyarrow as pa
from rich.console import Console

from pipeline.cache.schema import write_parquet
from pipeline.console import speaker
from pipeline.errors import UsageError
from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.run import ScoredQuestions
from pipeline.evaluate.scores import SCORES
from pipeline.evaluate.statistics import MethodAtRatio, arm_by_row, arms_of, set_arm_scores
from pipeline.storage.stores import Store

FOLDER = "submissions"
FORM = f"{FOLDER}/server.json"


class Submission(NamedTuple):
    """The options that one method at one ratio chose.

    Attributes:
        choices: question_id -> index of an option, from 0; failed questions are left out, and wrong there.
        n_drawn: replies that name no option, for which one was drawn.
    """

    choices: dict[str, int]
    n_drawn: int


def submissions(items: Sequence[Item], scores: pa.Table) -> dict[MethodAtRatio, Submission]:
    """Return the submission of every method and ratio.

    If a reply names no option, an option is drawn as lmms-eval does. The draw depends on the question's id alone, so it
    is the same for all methods and in every run.
    """
    items_by_id = {item.question_id: item for item in items}
    submission_of = {arm: Submission({}, 0) for arm in arms_of(scores)}
    rows = scores.select(["question_id", "status", "parsed"]).to_pylist()
    for arm, row in zip(arm_by_row(scores), rows, strict=True):
        if row["status"] == "ok":
            name, choice = row["question_id"], row["parsed"]
            if choice is None:
                hashed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
                choice = hashed % len(items_by_id[name].options)
                submission_of[arm] = submission_of[arm]._replace(n_drawn=submission_of[arm].n_drawn + 1)
            submission_of[arm].choices[name] = choice
    return submission_of


def write_submissions(store: Store, scored: ScoredQuestions, console: Console) -> list[str]:
    """Write the scores, all null, a file for each method and ratio, and the form for the server's scores.

    Numbers that were typed into the form stay. Prints the number of drawn options and of failed questions. Returns the
    names of the files. Raises OSError; UsageError for a form that cannot be read.
    """
    store.put(SCORES, write_parquet(scored.scores))
    names, say = [SCORES], speaker(console)
    for arm, submission in submissions(scored.loaded.items, scored.scores).items():
        names.append(f"{FOLDER}/{submission_name(arm)}.json")
        store.put(names[-1], json.dumps(submission.choices, indent=1).encode())
        if n_drawn := submission.n_drawn:
            say(f"note: {names[-1]}: {n_drawn} replies name no option; one is drawn for each, by the question's id")
        if missing := len(scored.loaded.items) - len(submission.choices):
            say(f"note: {names[-1]}: {missing} questions failed, and are left out")
    form = {**dict.fromkeys(map(submission_name, arms_of(scored.scores))), **server_scores(store)}
    store.put(FORM, json.dumps(form, indent=1).encode())
    return [*names, FORM]


def submission_name(arm: MethodAtRatio) -> str:
    """Return an arm's name as a file name, even if the method is named by an import path."""
    return f"{re.sub(r'[^A-Za-z0-9=.,+-]+', '-', arm.method)}@{arm.ratio:g}"


def with_server_scores(store: Store, scores: pa.Table) -> pa.Table:
    """Return the scores of arms as the percentages typed into the form; arms without a percentage have no score.

    Every row of an arm gets the arm's mean, since the server returns only that. Every row counts as answered, and as
    about one video, so that no interval is drawn. Raises UsageError for a form with anything but percentages.
    """
    typed = server_scores(store)
    percentages = {arm: typed.get(submission_name(arm)) for arm in arms_of(scores)}
    return set_arm_scores(scores, {arm: None if value is None else value / 100 for arm, value in percentages.items()})


def unknown_names(store: Store, arms: Iterable[MethodAtRatio]) -> list[str]:
    """Return the names with a score in the form for which these results have no submission."""
    known_names = set(map(submission_name, arms))
    return [name for name, value in server_scores(store).items() if value is not None and name not in known_names]


def server_scores(store: Store) -> dict[str, float | None]:
    """Read the form: the percentage typed for each submission, None where none is typed; {} without a form.

    Raises UsageError for anything but percentages. Numbers that are all 1 or less are taken for shares, and refused.
    """
    if not store.exists(FORM):
        return {}
    try:
        form = json.loads(store.read(FORM))
    except ValueError as error:
        raise UsageError(f"{store}: {FORM} is no JSON: {error}") from error
    if not isinstance(form, dict):
        raise UsageError(f'{store}: {FORM} must be an object such as {{"gstep@0.25": 59.2}}')
    typed = {name: value for name, value in form.items() if value is not None}
    for name, value in typed.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
            raise UsageError(f"{store}: {FORM}: {name} must be a percentage of right answers, got {value!r}")
    if typed and max(typed.values()) <= 1:
        raise UsageError(f"{store}: {FORM}: percentages are wanted, 59.2 and not 0.592")
    return form
