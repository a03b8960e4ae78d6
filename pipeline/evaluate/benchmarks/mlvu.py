"""MLVU (Zhou et al., CVPR 2025), multiple choice.

The dev set has 2,175 questions of four options on 1,122 videos of 3 min to 2 h; the test set has 502 questions of six
options. The score is the mean over the tasks (M-Avg).

In the authors' layout, options are a list and the answer is one of them. In that of lmms-eval, the question's text
contains the options and the answer is a letter. Rows of the first are converted to the second.

The reply rule of lmms-eval 0.7.3 knows only the letters A to D, also for the test set, where E and F are never right.
"""

from __future__ import annotations

from pipeline.evaluate.benchmarks.annotations import AnnotationRow, find_answer_index
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.protocols import PromptTemplate, make_lmms_eval_protocols
from pipeline.generate.questions import list_letters
from pipeline.inputs.tables import UserRow, UserValue

# Task -> (its abbreviation in the paper, the authors' folder).
_DEV = {
    "topic_reasoning": ("TR", "7_topic_reasoning"),
    "anomaly_reco": ("AR", "6_anomaly_reco"),
    "needle": ("NQA", "2_needle"),
    "ego": ("ER", "3_ego"),
    "plotQA": ("PQA", "1_plotQA"),
    "order": ("AO", "5_order"),
    "count": ("AC", "4_count"),
}
_TEST = {
    **{"topic_reasoning": "TR", "anomaly_reco": "AR", "needleQA": "NQA", "ego": "ER", "plotQA": "PQA"},
    **{"sportsQA": "SQA", "order": "AO", "count": "AC", "tutorialQA": "TQA"},
}


def _adapt_mlvu_row(row: UserRow, place: AnnotationRow) -> UserRow:
    """Convert a row of either layout to lmms-eval's, and add the task's ``folder`` and an id (task and row number).

    The folder of a test task is the name of the task. The task "findNeedle" becomes "needle".
    """
    if "question_type" in row:
        row = _add_letters(row)
    task = str(row.get("task_type")).replace("findNeedle", "needle")
    folder = _DEV[task][1] if task in _DEV else task
    # The authors' dev has no ids, and the ids of lmms-eval may repeat.
    return {**row, "task_type": task, "folder": folder, "question_id": f"{task}-{place.number}"}


def _add_letters(row: UserRow) -> UserRow:
    """Convert an authors' row: move its options into the question, and replace the answer by its letter.

    Also adds ``task_type`` and ``video_name``. If options are not a list of texts, question and answer stay unchanged;
    so does an answer that is not an option.
    """
    options = row.get("candidates")
    answer = row.get("answer")
    more: dict[str, UserValue] = {"task_type": row["question_type"], "video_name": row.get("video")}
    # A row with other options is recorded as a bad row later.
    if isinstance(options, list) and all(isinstance(text, str) for text in options):
        pairs = zip(list_letters(len(options)), options, strict=False)
        more["question"] = f"{row.get('question')}\n" + "".join(f"({letter}) {text}\n" for letter, text in pairs)
        index = find_answer_index("text", answer, options) if isinstance(answer, str) else None
        more["answer"] = dict(enumerate(list_letters(len(options)))).get(-1 if index is None else index, answer)
    return {**row, **more}


MLVU_DEV = Benchmark(
    name="mlvu-dev",
    title="MLVU dev",
    protocols=make_lmms_eval_protocols(
        PromptTemplate("{question}\nOnly give the best option.\nBest option: ("),
        "extract-mcq-answer",
        "mlvu-0.5",
        metric="task_type",
    ),
    source="the data set MLVU/MVLU of the Hugging Face hub (json/ and video/), or sy1998/MLVU_dev with its "
    "video_part_*.zip unpacked into one folder",
    files=("json/[1-7]_*.json", "MLVU/json/[1-7]_*.json", "test-*.parquet", "*/test-*.parquet"),
    adapt=_adapt_mlvu_row,
    paths=(
        *("video/{folder}/{video_name}", "MLVU/video/{folder}/{video_name}"),
        *("{video_name}", "video/{video_name}", "videos/{video_name}", "mlvu/{video_name}"),
    ),
    options="candidates",
    n_options=4,
    splits=(Split("task_type", "Task", {task: title for task, (title, _) in _DEV.items()}),),
    cluster="video_name",
    n_questions=2175,
)

MLVU_TEST = Benchmark(
    name="mlvu-test",
    title="MLVU test",
    protocols=make_lmms_eval_protocols(
        PromptTemplate("{question}"), "extract-mcq-answer", "mlvu-0.5", metric="task_type"
    ),
    source="the data set MLVU/MLVU_Test of the Hugging Face hub (test-ground-truth/ and, unpacked, video/), or "
    "sy1998/MLVU_Test with its videos unpacked into one folder",
    files=("test-ground-truth/test_mcq_gt.json", "test_mcq_gt.json", "test-*.parquet", "*/test-*.parquet"),
    adapt=_adapt_mlvu_row,
    paths=(
        *("MLVU_Test/video/{video_name}", "video/{video_name}", "{video_name}", "videos/{video_name}"),
        "mlvu_test/{video_name}",
    ),
    options="candidates",
    n_options=6,
    splits=(Split("task_type", "Task", _TEST),),
    cluster="video_name",
    n_questions=502,
)
