"""What the page of results says about questions that could not be asked and answers that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.evaluate.benchmarks.annotations import FaultKind
from pipeline.evaluate.benchmarks.items import AnnotationFault
from pipeline.evaluate.report.disagreements import Answers
from pipeline.evaluate.report.text import ratio_text, title_of
from pipeline.evaluate.statistics.score_matrix import ORIGINAL, Arm, arm_by_row

_EXAMPLES = 5
_WORDS: Mapping[FaultKind, str] = {
    "bad-row": "a needed column is empty or of another type",
    "missing-video": "the video is not in the data folder",
    "policy": "the path of the video leads outside the data folder",
    "repeated-question": "an id again, or the same question on the same video under another id",
    "repeated-candidate": "an option is there more than once",
    "blank-candidate": "an option is blank",
    "answer-no-candidate": "the right answer is none of the options: no reply can be right",
    "no-answer": "the right answer is not published",
}


class FaultCount(NamedTuple):
    """The count and examples of one kind of annotation fault."""

    kind: str
    words: str
    left_out: int
    kept: int
    examples: Sequence[str]


class FailureCount(NamedTuple):
    """The counts of failed answers of one error class."""

    error_class: str
    n_answers: int
    n_questions: int
    by_arm: Sequence[tuple[str, int]]


def fault_counts(faults: Sequence[AnnotationFault]) -> list[FaultCount]:
    """Count the faults by kind, the most frequent first."""
    found = []
    for kind, count in Counter(fault.kind for fault in faults).most_common():
        of_kind = [fault for fault in faults if fault.kind == kind]
        left_out = sum(fault.left_out for fault in of_kind)
        examples = [f"{one.question_id}: {one.message}" if one.question_id else one.message for one in of_kind]
        found.append(FaultCount(kind, _WORDS[kind], left_out, count - left_out, examples[:_EXAMPLES]))
    return found


def failure_counts(scores: pa.Table, answers: Answers) -> Iterator[FailureCount]:
    """Count the failed answers of the shown arms by error class, the most frequent first."""
    failed = scores.filter(pc.not_equal(scores["status"], "ok"))
    columns = (failed["error_class"].to_pylist(), failed["question_id"].to_pylist(), arm_by_row(failed))
    by_class: dict[str, list[tuple[str, Arm]]] = {}
    for error_class, question, arm in zip(*columns, strict=True):
        if arm in answers.arms:
            by_class.setdefault(error_class or "unknown", []).append((question, arm))
    for error_class, rows in sorted(by_class.items(), key=lambda item: -len(item[1])):
        by_arm = Counter(arm for _, arm in rows).most_common()
        named = [(_arm_text(arm), count) for arm, count in by_arm]
        yield FailureCount(error_class, len(rows), len({question for question, _ in rows}), named)


def warned_line(scores: pa.Table) -> str:
    """Say how many answers are about videos whose frames may be damaged; "" for none."""
    warned = scores.filter(pc.greater(pc.fill_null(scores["decode_warnings"], 0), 0))
    if not len(warned):
        return ""
    videos = len(pc.unique(warned["video_id"]))
    return (
        f"{len(warned):,} of {len(scores):,} answers, about {videos:,} videos, come from frames that were decoded with "
        "warnings and may be damaged"
    )


def _arm_text(arm: Arm) -> str:
    """Format an arm's title with its ratio."""
    title = title_of(arm.method)
    return title if arm == ORIGINAL else f"{title} at {ratio_text(arm.ratio)}"
