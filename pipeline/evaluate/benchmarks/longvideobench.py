"""LongVideoBench (Wu et al., NeurIPS 2024), validation: 1,337 questions on 753 videos of 8 s to an hour.

The prompt is that of lmms-eval's ``longvideobench_val_v``, which shows no subtitles. Videos are found by
``video_path``, which differs from ``video_id`` in 135 rows.
"""

from __future__ import annotations

from gstep.language import Decoding
from pipeline.evaluate.benchmarks.annotations import AnnotationRow
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.protocols import PromptTemplate, make_lmms_eval_protocols
from pipeline.inputs.tables import UserRow

_NONE = "N/A"  # the value of missing options, which come last


def _add_candidates(row: UserRow, place: AnnotationRow) -> UserRow:
    """Add the list ``candidates`` to a row of the Parquet file: option0 to option4 without trailing "N/A".

    Rows of the JSON file, which have the list, are returned unchanged.
    """
    if "option0" not in row:
        return row
    options = [row.get(f"option{number}") for number in range(5)]
    while options and options[-1] == _NONE:
        options.pop()
    return {**row, "candidates": options}


LONGVIDEOBENCH = Benchmark(
    name="longvideobench",
    title="LongVideoBench",
    protocols=make_lmms_eval_protocols(
        PromptTemplate(
            "{question}\n{options}\nAnswer with the option's letter from the given choices directly.\n",
            "{letter}. {text}",
        ),
        "longvideobench",
        "longvideobench",
        decoding=Decoding(max_new_tokens=32),
    ),
    source="the data set longvideobench/LongVideoBench of the Hugging Face hub, with its videos unpacked (cat "
    "videos.tar.part.* | tar x)",
    files=("validation-*.parquet", "*/validation-*.parquet", "lvb_val.json"),
    adapt=_add_candidates,
    paths=("videos/{video_path}", "{video_path}"),
    question_id="id",
    options="candidates",
    answer="correct_choice",
    answer_rule="index",
    cluster="video_path",
    splits=(
        Split(
            "duration_group",
            "Duration",
            {"15": "8-15 s", "60": "15-60 s", "600": "3-10 min", "3600": "15-60 min"},
        ),
        Split("question_category", "Question"),
        Split("topic_category", "Topic"),
    ),
    n_questions=1337,
)
