"""A small LongVideoBench in its published layout, with faults as they occur: Parquet, JSON and videos."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.pipeline.evaluate.layouts import schema_of, write_json, write_table, write_videos

SCHEMA = schema_of(
    "video_id id video_path subtitle_path question question_category topic_category "
    "option0 option1 option2 option3 option4",
    **dict.fromkeys(("correct_choice", "duration_group"), pa.int64()),
    **dict.fromkeys(("duration", "starting_timestamp_for_subtitles"), pa.float64()),
)
#: video_id -> video_path; of a few it is another name.
PATHS = {"-Ab0xYz_9Qk": "-Ab0xYz_9Qk.mp4", "@cook-712": "712.mp4", "86CxyhFV9MI": "86CxyhFV9MI.mp4"}
FIVE = ("a cup", "a pan", "a knife", "a bowl", "a lid")


def row(question_id: str, answer: int, options: tuple[str, ...] = FIVE, group: int = 15, **more: Any) -> dict[str, Any]:
    """Return a row whose id begins with its video's."""
    video = question_id.rpartition("_")[0]
    listed = {f"option{number}": text for number, text in enumerate((*options, *["N/A"] * (5 - len(options))))}
    return {
        "video_id": video,
        "id": question_id,
        "video_path": PATHS.get(video, f"{video}.mp4"),
        "subtitle_path": f"{video}_en.json",
        "correct_choice": answer,
        "question": f"What is on the table in {question_id}?",
        **listed,
        "duration": 12.4,
        "duration_group": group,
        "question_category": "S2O",
        "topic_category": "LC-Lifestyle-Cooking-Recipes",
        "starting_timestamp_for_subtitles": 31.5,
        **more,
    }


ROWS = [
    row("-Ab0xYz_9Qk_0", 2),
    row("-Ab0xYz_9Qk_1", 3, FIVE[:4]),
    row("@cook-712_0", 0, FIVE[:3], 60),
    row("@cook-712_1", 1, ("a cup", "a pan", "a cup", "a lid"), 60),  # repeats one
    row("86CxyhFV9MI_0", 9, group=600),
    row("86CxyhFV9MI_1", 4, group=600, question="What is on the table in 86CxyhFV9MI_0?"),  # another one's question
    row("gone_0", 0, group=3600),
    row("86CxyhFV9MI_2", 0, group=600, question=None),
    row("86CxyhFV9MI_3", 0, group=600, video_path="../../outside.mp4"),
    row("86CxyhFV9MI_4", 0, group=61),
    row("86CxyhFV9MI_5", -1, group=600),  # as all of the test set
]


def write_longvideobench(folder: Path, *, json: bool = False) -> Path:
    """Write ``folder``, for ``--data``; with ``json`` the annotations are in the JSON file, which lists the options."""
    if json:
        write_json(folder / "lvb_val.json", [_as_json(one) for one in ROWS])
    else:
        write_table(folder / "validation-00000-of-00001.parquet", ROWS, SCHEMA)
        write_table(folder / "test-00000-of-00001.parquet", [one | {"correct_choice": -1} for one in ROWS], SCHEMA)
    write_videos(folder / "videos", PATHS.values())
    return folder


def _as_json(one: dict[str, Any]) -> dict[str, Any]:
    options = [one[f"option{number}"] for number in range(5)]
    kept = {name: cell for name, cell in one.items() if not name.startswith("option")}
    return {**kept, "candidates": [text for text in options if text != "N/A"], "level": "L2-Relation"}
