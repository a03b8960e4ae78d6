"""Small folders HF_HOME, in the layouts in which tasks of lmms-eval publish their videos and annotations.

Each ``write_`` function adds one task: its videos, its annotations with the columns and types that are published, and,
where it says so, rows that cannot be asked.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.builders.clips import write_jpegs
from tests.pipeline.evaluate.layouts import schema_of, write_table
from tests.pipeline.evaluate.videomme import write_moving

Rows = list[dict[str, Any]]


_SEGMENT = pa.struct([("path", pa.string()), ("start", pa.float64()), ("end", pa.float64())])
CHARADES = schema_of("video caption", timestamp=pa.list_(pa.float64()))
VSIBENCH = schema_of(
    "dataset scene_name question_type question ground_truth", id=pa.int64(), options=pa.list_(pa.string())
)
TEMPCOMPASS = schema_of("video_id question answer dim")
MMSI = schema_of(
    "type system_prompt task_prompt user_prompt format_prompt ground_truth",
    **{"id": pa.int64(), "video_list": pa.list_(_SEGMENT), "ref_images": pa.list_(pa.string())},
)
CAPTIONING = schema_of("video_id question answer dim mc_question mc_answer")
MULTIPLE_CHOICE = (
    *("object_rel_direction_easy", "object_rel_direction_medium", "object_rel_direction_hard"),
    *("object_rel_distance", "route_planning", "obj_appearance_order"),
)
NUMERIC = ("object_abs_distance", "object_counting", "object_size_estimation", "room_size_estimation")
#: A file beside HF_HOME, which no annotation may name.
OUTSIDE = "outside.mp4"


def write_annotations(home: Path, task: str, rows: Rows, schema: pa.Schema) -> Path:
    """Write the rows of a task where they replace those of the hub."""
    path = home / "annotations" / f"{task}.parquet"
    write_table(path, rows, schema)
    return path


def select_annotations(path: Path, numbers: Iterable[int], to: Path) -> Path:
    """Write some rows of annotations to another file, in this order."""
    pq.write_table(pq.read_table(path).take(list(numbers)), to)
    return to


def write_video(home: Path, path: str, seed: int) -> None:
    """Write a clip of 12 frames: a bright square that crosses a ground of random colors."""
    (home / path).parent.mkdir(parents=True, exist_ok=True)
    write_moving(home / path, np.random.default_rng(seed), 12)


def write_charades(home: Path, *, n_videos: int = 4, faults: bool = True) -> Rows:
    """Write Charades-STA: two captions a video, and the third row once more, as some of the published ones are.

    With ``faults`` there follow a missing video, a caption without its times, and a path out of HF_HOME.
    """
    rows: Rows = []
    for number in range(n_videos):
        video = f"{'ABCDEF'[number]}O8RW.mp4"
        write_video(home, f"charades_sta/Charades_v1_480/{video}", number)
        rows += [
            {"video": video, "caption": "person opens the door", "timestamp": [0.0, 1.0 + number / 10]},
            {"video": video, "caption": "a person is laughing while eating", "timestamp": [0.4, 1.3]},
        ]
    rows.append(rows[2])
    if faults:
        write_video(home.parent, OUTSIDE, 0)
        rows += [
            {"video": "ZZZZZ.mp4", "caption": "person sits down", "timestamp": [3.9, 7.2]},
            {"video": rows[0]["video"], "caption": "person runs", "timestamp": None},
            {"video": f"../../../{OUTSIDE}", "caption": "person stands up", "timestamp": [0.0, 1.0]},
        ]
    write_annotations(
        home, "temporal_grounding_charades", rows, schema_of("video caption", timestamp=pa.list_(pa.float64()))
    )
    return rows


def write_vsibench(home: Path, *, per_type: int = 1) -> Rows:
    """Write VSI-Bench: ``per_type`` questions of each of its ten types, of which four are answered by a number."""
    rows: Rows = []
    for number in range(per_type * len(MULTIPLE_CHOICE + NUMERIC)):
        question_type = (MULTIPLE_CHOICE + NUMERIC)[number % len(MULTIPLE_CHOICE + NUMERIC)]
        dataset, scene = ("scannet", "arkitscenes", "scannetpp")[number % 3], f"scene{number // 2:04}_00"
        if not (home / f"vsibench/{dataset}/{scene}.mp4").exists():
            write_video(home, f"vsibench/{dataset}/{scene}.mp4", 100 + number)
        is_number = question_type in NUMERIC
        rows.append(
            {
                "id": number,
                "dataset": dataset,
                "scene_name": scene,
                "question_type": question_type,
                "question": "How many chairs are in this room?" if is_number else "Where does the square go first?",
                "ground_truth": str(1 + number % 3) if is_number else "ABCD"[number % 4],
                "options": None if is_number else ["A. left", "B. right", "C. up", "D. down"],
            }
        )
    write_annotations(home, "vsibench", rows, VSIBENCH)
    return rows


def write_tempcompass(home: Path, *, n_videos: int = 4) -> tuple[Rows, Rows]:
    """Write the multiple choices and the yes-or-no questions of TempCompass; the first video's id begins with "-"."""
    choices: Rows = []
    yes_no: Rows = []
    for number in range(n_videos):
        video_id = f"{'-' if number == 0 else ''}10{number}2488318{'_reverse' if number % 2 else ''}"
        write_video(home, f"tempcompass/videos/{video_id}.mp4", 200 + number)
        ways, colors = ("left", "right", "up", "down"), ("red", "green", "blue", "white")
        for dim, question, options in (
            ("direction", "In which direction does the square move?", ways),
            ("attribute_change", "Which color does the square have in the end?", colors),
        ):
            named = [f"{letter}. {text}" for letter, text in zip("ABCD", options, strict=True)]
            answer = named[(number + len(dim)) % 4]
            text = "\n".join([question, *named])
            choices.append({"video_id": video_id, "question": text, "answer": answer, "dim": dim})
        answer = ("yes", "no")[number % 2]
        row = {"video_id": video_id, "question": "Is the square moving left?", "answer": answer, "dim": "direction"}
        yes_no.append(row)
    write_annotations(home, "tempcompass_multi_choice", choices, TEMPCOMPASS)
    write_annotations(home, "tempcompass_yes_no", yes_no, TEMPCOMPASS)
    return choices, yes_no


def write_mmsi_video(home: Path) -> Rows:
    """Write MMSI-Video-Bench, whose documents show a video, several, or a picture too.

    Five documents show one video each; the others show two, and one beside a picture.
    """
    for number in range(3):
        write_video(home, f"mmsi_video/videos/{number}.mp4", 500 + number)
    write_jpegs(home / "mmsi_video/ref_images", 1)
    planning, motion = "Planning", "(Motion Understanding) Camera Motion"
    kinds = [(planning, [0], []), ("(Cross-Video) Memoery Update", [0, 1], []), (motion, [1], [])]
    kinds += [(planning, [1], ["00001.jpg"]), (motion, [2], []), ("Prediction", [2], []), (motion, [0], [])]
    rows: Rows = [
        {
            "id": 1000 + number,
            "type": kind,
            "video_list": [{"path": f"{video}.mp4", "start": 0.0, "end": 1.5} for video in videos],
            "ref_images": images,
            "system_prompt": "You are a multiple-choice question answering assistant.",
            "task_prompt": "<video>" * len(videos) + "<image>" * len(images),
            "user_prompt": f"What happens in scene {number}?\nA: it turns\nB: it stops\nC: it leaves\nD: nothing\n",
            "format_prompt": "Answer with the option's letter.",
            "ground_truth": "ABCD"[number % 4],
        }
        for number, (kind, videos, images) in enumerate(kinds)
    ]
    write_annotations(home, "mmsi_video", rows, MMSI)
    return rows


def write_nextqa(home: Path, count: int = 12) -> Rows:
    """Write multiple choices of NExT-QA about one video; where a reply names no option its code draws one."""
    write_video(home, "nextqa/NExTVideo/4010069381.mp4", 600)
    rows: Rows = [
        {
            "video": 4010069381,
            "qid": number,
            "question": f"why did the boy clap at {number}",
            "type": ("CW", "TN", "DC")[number % 3],
            "answer": number % 5,
            **{f"a{i}": text for i, text in enumerate(("hungry", "playing", "to sit", "to eat", "excited"))},
        }
        for number in range(count)
    ]
    schema = schema_of("question type a0 a1 a2 a3 a4", **dict.fromkeys(("video", "answer", "qid"), pa.int64()))
    write_annotations(home, "nextqa_mc_test", rows, schema)
    return rows


def write_captioning(home: Path) -> Rows:
    """Write captions of TempCompass, all of which a judge scores."""
    write_video(home, "tempcompass/videos/1.mp4", 700)
    choices = "Where does the square go?\nA. left\nB. right"
    row = {"video_id": "1", "question": "Describe the video.", "answer": "it goes right", "dim": "direction"}
    rows: Rows = [{**row, "mc_question": choices, "mc_answer": "B. right"}]
    write_annotations(
        home, "tempcompass_captioning", rows, schema_of("video_id question answer dim mc_question mc_answer")
    )
    return rows


def write_temporalbench(home: Path, *, n_videos: int = 3) -> Rows:
    """Write TemporalBench, two questions a video; its second number counts videos of which all answers are right."""
    rows: Rows = []
    for number in range(n_videos):
        video = f"short_video/Charades/{number}.mp4"
        write_video(home, f"temporalbench/{video}", 800 + number)
        for ask in range(2):
            text = f"Which is right, {number}.{ask}?\nA. The square moves.\nB. The square rests.\nAnswer A or B."
            row = {"idx": f"{number}_{ask}", "dataset": "Charades", "video_name": video, "category": "Action Order"}
            rows.append({**row, "question": text, "GT": "AB"[number * ask % 2]})
    write_annotations(home, "temporalbench_short_qa", rows, schema_of("idx dataset video_name question GT category"))
    return rows
