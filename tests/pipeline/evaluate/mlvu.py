"""A small MLVU in its published layouts, with faults as they occur: the authors' and lmms-eval's, dev and test."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.pipeline.evaluate.layouts import schema_of, write_json, write_table, write_videos

FOUR = ["Yellow", "Red", "Green", "Blue"]
SIX = ["Fighting", "Shoplifting", "Arrest", "Normal", "Shooting", "Vandalism"]
#: lmms-eval's columns.
PARQUET = "test-00000-of-00001.parquet"
_TEXTS = "video_name question answer task_type question_id"
SCHEMA = schema_of(_TEXTS, duration=pa.float64(), candidates=pa.list_(pa.string()))


def row(
    video: str, answer: str, kind: str, candidates: list[str] = FOUR, question: str = "What colour?"
) -> dict[str, Any]:
    """Return a row of the authors' files."""
    return {
        "video": video, "duration": 246, "question": question, "candidates": candidates, "answer": answer,
        "question_type": kind,
    }  # fmt: skip


#: File -> its rows. A video is in two tasks, under one name in two folders.
DEV: dict[str, list[dict[str, Any]]] = {
    "1_plotQA": [
        row("movie101_66.mp4", "Yellow", "plotQA"),
        row("movie101_66.mp4", "Red", "plotQA", question="And then?"),
        row("-xiaoliyu_6.mp4", "Blue", "plotQA", ["Blue", "Red", "Green", "Blue"]),  # repeats the right one
        row("-xiaoliyu_6.mp4", "There is", "plotQA", ["", "There is", "There is not", ""], "Is there archery?"),
    ],
    "2_needle": [row("needle_4.mp4", "Catching a drone", "findNeedle", ["Fishing", "Sunbathing", "Diving", "Rowing"])],
    "3_ego": [
        row("ego_35.mp4", "Green", "ego"),
        row("ego_35.mp4", "Green", "ego", ["Green", "Black", "White", "Pink"]),  # the same question again
    ],
    "4_count": [row("count_126.mp4", "1", "count", ["2", "1", "5", "4"])],
    "5_order": [row("order_126.mp4", "1->2", "order", ["2->1", "1->2", "1->3", "3->1"])],
    "6_anomaly_reco": [
        row("surveil_20.mp4", "Shooting", "anomaly_reco", [*SIX[:3], "Shooting"]),
        row("gone.mp4", "Arrest", "anomaly_reco", SIX[:4]),
    ],
    "7_topic_reasoning": [
        row("movie101_66.mp4", "Green", "topic_reasoning", question="What is it about?"),
        row("movie101_66.mp4", "Green", "unheard_of", question="What is it about?"),
        row("movie101_66.mp4", "Arrest", "topic_reasoning", SIX, "As of the test set?"),
    ],
}  # fmt: skip
#: Open questions, which have no options and are no part of the score.
OPEN = {"8_sub_scene": [{"video": "subPlot_1.mp4", "question": "Describe it.", "answer": "...", "question_type": "x"}]}
TEST = [
    {**row("test_surveil_27.mp4", "Shoplifting", "anomaly_reco", SIX), "question_id": "AR_0"},
    {**row("test_surveil_27.mp4", "Vandalism", "anomaly_reco", SIX, "And then?"), "question_id": "AR_1"},
    {**row("test_tutorial_1.mp4", "Step5", "tutorialQA", [f"Step{i}" for i in range(1, 7)]), "question_id": "TQ_7"},
]


def write_mlvu_dev(folder: Path) -> Path:
    """Write the authors' layout: a file and a folder of videos a task."""
    for name, rows in {**DEV, **OPEN}.items():
        write_json(folder / "json" / f"{name}.json", rows)
        videos = [f"{name}/{one['video']}" for one in rows if name in DEV and one["video"] != "gone.mp4"]
        write_videos(folder / "video", videos)
    return folder


def write_repacked_dev(folder: Path) -> Path:
    """Write lmms-eval's: one Parquet file, options in the question, answers as letters, all videos in one folder."""
    rows = [repacked(one) for rows in DEV.values() for one in rows]
    write_table(folder / PARQUET, rows, SCHEMA)
    write_videos(folder, [one["video_name"] for one in rows if one["video_name"] != "gone.mp4"])
    return folder


def write_repacked_test(folder: Path) -> Path:
    """Write lmms-eval's layout of the test set."""
    write_table(folder / PARQUET, [repacked(one) for one in TEST], SCHEMA)
    write_videos(folder, [one["video"] for one in TEST])
    return folder


def write_mlvu_test(folder: Path) -> Path:
    """Write the authors' layout of the test set."""
    write_json(folder / "test-ground-truth" / "test_mcq_gt.json", TEST)
    write_videos(folder / "MLVU_Test" / "video", [one["video"] for one in TEST])
    return folder


def repacked(one: dict[str, Any]) -> dict[str, Any]:
    lines = "".join(f"({letter}) {text}\n" for letter, text in zip("ABCDEF", one["candidates"], strict=False))
    answer = one["answer"]
    kind = one["question_type"].replace("findNeedle", "needle")
    return {
        "video_name": one["video"],
        "duration": 246.0,
        "question": f"{one['question']}\n{lines}",
        "candidates": one["candidates"],
        "answer": "ABCDEF"[one["candidates"].index(answer)] if answer in one["candidates"] else answer,
        "task_type": kind,
        "question_id": "Q0",
    }
