"""Video-MME (Fu et al., CVPR 2025): 900 videos of 11 s to an hour, with three questions of four options each.

Sources of the prompts: ``tasks/videomme/utils.py`` and ``videomme.yaml`` of lmms-eval, and the README of
github.com/MME-Benchmarks/Video-MME.
"""

from __future__ import annotations

from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.protocols import LMMS_EVAL_0_7, PromptTemplate, Protocol, make_lmms_eval_protocols

_TASK = "Select the best answer to the following multiple-choice question based on the video{}. Respond with only the "
_LETTERS = "letter (A, B, C, or D) of the correct option.\n{{question}}\n{{options}}\n{}"
# lmms-eval's prompt mentions subtitles although the task gives none.
_LMMS_EVAL = PromptTemplate(
    _TASK.format(" and the subtitles")
    + _LETTERS.format("\nAnswer with the option's letter from the given choices directly.")
)
_LETTER_ONLY = PromptTemplate("Question: {question}\nOptions:\n{options}\nAnswer with the option letter only.")
_QWEN3 = {"qwen3_vl": _LETTER_ONLY, "qwen3_vl_moe": _LETTER_ONLY}
_OFFICIAL = PromptTemplate(_TASK.format("") + _LETTERS.format("The best answer is:"))

VIDEOMME = Benchmark(
    name="videomme",
    title="VideoMME",
    protocols=(
        *make_lmms_eval_protocols(_LMMS_EVAL, "extract-mcq-answer", "videomme-0.5", newer_prompts=_QWEN3),
        # The authors leave frames, sizes and decoding to the model; lmms-eval's choices make the numbers comparable.
        Protocol(name="official", prompt=_OFFICIAL, models=LMMS_EVAL_0_7, parser="videomme-0.5"),
    ),
    source="the data set lmms-eval/Video-MME of the Hugging Face hub, with its videos_*.zip unpacked",
    files=("videomme/test-*.parquet", "test-*.parquet"),
    paths=tuple(
        f"{folder}{{videoID}}{suffix}"
        for folder in ("data/", "videos/", "video/", "")
        for suffix in (".mp4", ".MP4", ".mkv")
    ),
    answer_rule="letter",
    splits=(
        Split("duration", "Duration", {"short": "Short", "medium": "Medium", "long": "Long"}),
        Split("domain", "Domain"),
        Split("sub_category", "Sub-category"),
        Split("task_type", "Task"),
    ),
    cluster="videoID",
    n_questions=2700,
)
