"""The synthetic videos of ``python -m jobs.testbed make``, in VideoMME's layout."""

from __future__ import annotations

from dataclasses import replace

from pipeline.evaluate.benchmarks.annotations import AnnotationRow, strip_option_letter
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.protocols import LETTER, FrameRule, ModelRules
from pipeline.inputs.tables import UserRow

# A frame lasts a second, and the longest video has 32: all frames of every video are sampled, each once.
_EVERY_FRAME = ModelRules(frames=FrameRule(32, "round", even=True))


def _strip_option_letters(row: UserRow, place: AnnotationRow) -> UserRow:
    """Remove the letters from a row's options, because the protocol adds letters."""
    options = row.get("options")
    if not isinstance(options, list):
        return row
    return {**row, "options": [strip_option_letter(text) if isinstance(text, str) else text for text in options]}


SHAPES = Benchmark(
    name="shapes",
    title="Shapes",
    protocols=(replace(LETTER, models={}, others=_EVERY_FRAME),),
    source="what python -m jobs.testbed make DIR writes",
    files=("videomme/test-*.parquet",),
    adapt=_strip_option_letters,
    paths=("data/{videoID}.mp4",),
    answer_rule="letter",
    splits=(
        Split("duration", "Duration", {"short": "Short", "medium": "Medium", "long": "Long"}),
        Split("task_type", "Question"),
        Split("sub_category", "Thing"),
        Split("domain", "Hardness"),
    ),
    cluster="videoID",
)
