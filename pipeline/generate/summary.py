"""The counts over the questions of a file, computed from the stored rows of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.errors import QUESTION_FAULTS, list_first_names
from pipeline.runner.run_record import Outcome, as_text, count_failures

_MAX_EXAMPLES = 3  # videos that a summary names
_COLUMNS = (
    *("question_id", "video_ids", "pruning", "status", "error_class", "error_message"),
    *("decode_warnings", "finish"),
    *("n_visual_tokens", "n_prompt_tokens", "n_new_tokens", "load_s", "prefill_s", "decode_s", "batch_size"),
)


@dataclass(frozen=True, kw_only=True)
class AnswerSummary(Outcome):
    """The counts over the questions of a file, with mean tokens and seconds.

    Attributes:
        n_questions: questions times prunings, without those about removed videos.
        visual_tokens, prompt_tokens: means per answered prompt.
        new_tokens: generated tokens in total.
        seconds: seconds of this run by kind of work (load, prefill, decode); each batch counts once.
        n_cut: answers that ``max_new_tokens`` cut.
        n_warned: answers about videos that were decoded with warnings.
        n_warned_videos: those videos; several in one prompt count as one.
        warned: the first three of those videos.
        n_removed: questions about removed videos, which are counted nowhere else.
    """

    n_questions: int
    visual_tokens: float
    prompt_tokens: float
    new_tokens: int
    seconds: dict[str, float]
    n_cut: int = 0
    n_warned: int = 0
    n_warned_videos: int = 0
    n_removed: int = 0
    warned: list[str] = field(default_factory=list)

    def exit_code(self, failure_limit: int, infrastructure_limit: int | None = None) -> int:
        """Return 0 if every question is about a removed video; otherwise the code for the failures."""
        if self.n_removed and not self.n_questions:
            return 0
        return super().exit_code(failure_limit, infrastructure_limit)

    def __str__(self) -> str:
        return as_text(render_answers(self))


def summarize_answers(
    live: pa.Table, n_questions: int, new: Set[tuple[str, str | None]], wall_s: float
) -> AnswerSummary:
    """Count the live rows of a run's questions; ``out`` and ``log`` stay empty.

    If a question failed under several prunings, ``failed`` has one of the classes.

    Args:
        live: the live rows of these questions under the run's prunings.
        new: (question_id, pruning) of the questions that this run asked; seconds are those of their good rows.
    """
    rows = live.select(list(_COLUMNS)).to_pylist()
    good = [row for row in rows if row["status"] == "ok"]
    bad = [row for row in rows if row["status"] == "failed"]
    n_removed = len(rows) - len(good) - len(bad)
    failures, examples = count_failures(bad, "question_id")
    with_warnings = [row for row in good if (row["decode_warnings"] or 0) > 0]
    warned_videos = list(dict.fromkeys(" + ".join(row["video_ids"]) for row in with_warnings))
    new_good = [row for row in good if (row["question_id"], row["pruning"]) in new]
    return AnswerSummary(
        n_questions=n_questions - n_removed,
        n_removed=n_removed,
        n_ok=len(good),
        failures=failures,
        examples=examples,
        n_missing=n_questions - len(rows),
        n_new=len(new),
        n_new_failed=sum((row["question_id"], row["pruning"]) in new for row in bad),
        wall_s=wall_s,
        failed={row["question_id"]: row["error_class"] for row in bad},
        visual_tokens=_compute_column_mean(good, "n_visual_tokens"),
        prompt_tokens=_compute_column_mean(good, "n_prompt_tokens"),
        n_cut=sum(row["finish"] == "length" for row in good),
        n_warned=len(with_warnings),
        n_warned_videos=len(warned_videos),
        warned=warned_videos[:_MAX_EXAMPLES],
        new_tokens=sum(row["n_new_tokens"] or 0 for row in good),
        seconds={
            "load": sum(row["load_s"] for row in new_good),
            **{name: sum(row[f"{name}_s"] / row["batch_size"] for row in new_good) for name in ("prefill", "decode")},
        },
    )


def render_answers(summary: AnswerSummary) -> RenderableType:
    """Render the summary; failures are listed by class, with an example and the remedy."""
    table = Table.grid(padding=(0, 2))
    counts = f"{summary.n_ok} answered, {summary.n_failed} failed, {summary.n_missing} without a row"
    table.add_row("questions", counts)
    if summary.n_removed:
        table.add_row("removed", f"{summary.n_removed} questions about removed videos, which are never asked")
    table.add_row("tokens", f"{summary.visual_tokens:.0f} visual of {summary.prompt_tokens:.0f} in a prompt on average")
    cut = f"; {summary.n_cut:,} answers were cut by max_new_tokens" if summary.n_cut else ""
    table.add_row("answers", f"{summary.new_tokens:,} tokens generated{cut}")
    table.add_row("seconds", ", ".join(f"{name} {value:.2f}" for name, value in summary.seconds.items()))
    if summary.n_warned:
        table.add_row("warnings", Text(format_warned(summary)))
    table.add_row("this run", Text(summary.pace("question")))
    failures: list[RenderableType] = (
        ["", summary.make_failures_table("question", QUESTION_FAULTS)] if summary.failures else []
    )
    return Group(table, *failures)


def format_warned(summary: AnswerSummary) -> str:
    """Describe the answers about videos whose frames may be damaged, with the first videos."""
    names = list_first_names(summary.warned, summary.n_warned_videos)
    return (
        f"{summary.n_warned} answers are about videos that were decoded with warnings ({names}): their frames may be "
        "damaged"
    )


def _compute_column_mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean of a column; 0 without rows."""
    return sum(row[name] for row in rows) / len(rows) if rows else 0.0
