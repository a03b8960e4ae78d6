"""EgoSchema (Mangalam et al., NeurIPS 2023): 5,031 clips of 180 s from Ego4D, with a question of five options each.

The right answers of 500 questions are published; these are ``egoschema-subset``, which has a score. ``egoschema`` has
all questions, and produces a file {q_uid: index} for the authors' server.

Two layouts are read: that of the hub (lmms-eval/egoschema), and that of the authors (github.com/egoschema/EgoSchema).
lmms-eval 0.5 sets no length of replies, so the model's default applies, which is 1,024 on LLaVA-OneVision. Standard
errors are clustered by Ego4D video if ``uid_to_ego4d.json`` exists; otherwise clips count as independent, and errors
are too small.
"""

from __future__ import annotations

from dataclasses import replace

from gstep.language import Decoding
from pipeline.evaluate.benchmarks.annotations import AnnotationRow
from pipeline.evaluate.benchmarks.base import Benchmark
from pipeline.evaluate.protocols import PromptTemplate, make_lmms_eval_protocols
from pipeline.generate.questions import list_letters
from pipeline.inputs.tables import UserRow

_ANSWERS, _EGO4D = "subset_answers.json", "uid_to_ego4d.json"
_REPOSITORY = "of github.com/egoschema/EgoSchema"
_VIDEOS = f"videos/ (of the hub the unpacked videos_chunked_*.zip), and {_EGO4D} {_REPOSITORY} for errors by video"
_NEWER, _OLDER = make_lmms_eval_protocols(
    PromptTemplate("{question}\n{options}\nAnswer with the option's letter from the given choices directly."),
    "egoschema",
    "egoschema",
)


def _adapt_any_row(row: UserRow, place: AnnotationRow) -> UserRow:
    """Add ``cluster`` to a row: the Ego4D video, or the clip itself if that is unknown.

    A row of the authors also gets the hub's columns ``video_idx`` and ``option`` (with letters).
    """
    if "q_uid" in row:
        names = zip(list_letters(5), (row.get(f"option {number}") for number in range(5)), strict=True)
        options = [f"{letter}. {text}" if isinstance(text, str) else text for letter, text in names]
        row = {**row, "video_idx": row["q_uid"], "option": options}
    source = place.tables[_EGO4D].get(str(row.get("video_idx")))
    video = source.get("video_uid") if isinstance(source, dict) else None
    return {**row, "cluster": video or row.get("video_idx")}


def _adapt_subset_row(row: UserRow, place: AnnotationRow) -> UserRow | None:
    """Convert a row of either layout to the hub's, and add ``cluster`` and, to a row of the authors, its answer.

    Returns None for a row of the authors whose answer is not published.
    """
    if "q_uid" in row:
        answers = place.tables[_ANSWERS]
        if str(row["q_uid"]) not in answers:
            return None
        row = {**row, "answer": answers[str(row["q_uid"])]}
    return _adapt_any_row(row, place)


EGOSCHEMA = Benchmark(
    name="egoschema",
    title="EgoSchema full set",
    protocols=(_NEWER, replace(_OLDER, decoding=Decoding(max_new_tokens=1024))),
    source=f"GENERATION/ of the data set lmms-eval/egoschema of the Hugging Face hub, or questions.json {_REPOSITORY}; "
    + _VIDEOS,
    files=("GENERATION/test-*.parquet", "questions.json"),
    adapt=_adapt_any_row,
    tables=(_EGO4D,),
    paths=tuple(f"{folder}{{video_idx}}{suffix}" for folder in ("videos/", "") for suffix in (".mp4", ".MP4")),
    question_id="video_idx",
    options="option",
    answer_rule="index",
    cluster="cluster",
    n_questions=5031,
    submission=f"python validate.py --f FILE {_REPOSITORY}, or the competition egoschema-public on Kaggle",
)

EGOSCHEMA_SUBSET = replace(
    EGOSCHEMA,
    name="egoschema-subset",
    title="EgoSchema subset",
    source=f"Subset/ of the data set lmms-eval/egoschema of the Hugging Face hub, or questions.json and {_ANSWERS} "
    f"{_REPOSITORY}; {_VIDEOS}",
    files=("Subset/test-*.parquet", "questions.json"),
    adapt=_adapt_subset_row,
    tables=(_ANSWERS, _EGO4D),
    n_questions=500,
    submission="",
)
