"""What the server of a benchmark without published answers returned, typed in by whoever asked it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import pyarrow as pa

from pipeline.errors import UsageError
from pipeline.evaluate.statistics.score_matrix import Arm, arm_by_row
from pipeline.storage.stores import Store

FORM = "submissions/server.json"
_CLUSTER = "server"  # the server returns only the mean, from which no error can be estimated


def submission_name(arm: Arm) -> str:
    """Return an arm's name as a file name, even if the method is named by an import path."""
    return f"{re.sub(r'[^A-Za-z0-9=.,+-]+', '-', arm.method)}@{arm.ratio:g}"


def write_form(store: Store, arms: Iterable[Arm]) -> None:
    """Write the form with a line for each submission's score, keeping what was typed in. Raises UsageError, OSError."""
    form = {**dict.fromkeys(map(submission_name, arms)), **_read(store)}
    store.put(FORM, json.dumps(form, indent=1).encode())


def with_server_scores(store: Store, scores: pa.Table) -> pa.Table:
    """Return scores whose means are the percentages typed into the form; arms without one stay unscored.

    Args:
        scores: SCORE_SCHEMA, of a benchmark without published answers.

    Raises UsageError where a number is none, or no percentage.
    """
    typed = _read(store)
    of_row = [typed.get(submission_name(arm)) for arm in arm_by_row(scores)]
    columns = {
        "score": pa.array([None if value is None else value / 100 for value in of_row], pa.float64()),
        "cluster": pa.repeat(_CLUSTER, len(of_row)),
        # The server counts a missing reply as wrong, so its number covers failed answers.
        "status": pa.repeat("ok", len(of_row)),
    }
    for name, values in columns.items():
        place = scores.schema.get_field_index(name)
        scores = scores.set_column(place, scores.schema.field(name), values)
    return scores


def unknown_names(store: Store, arms: Iterable[Arm]) -> list[str]:
    """Return the names with a score in the form for which these results have no submission."""
    known = set(map(submission_name, arms))
    return [name for name, value in _read(store).items() if value is not None and name not in known]


def _read(store: Store) -> dict[str, float | None]:
    """Read the scores that were typed into the form, by submission; {} without a form. Raises UsageError."""
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
