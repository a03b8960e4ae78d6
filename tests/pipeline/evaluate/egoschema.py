"""A small EgoSchema in its published layouts, with faults as they occur: the hub's and the authors'."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.pipeline.evaluate.layouts import schema_of, write_json, write_table, write_videos

SCHEMA = schema_of("question_idx question video_idx answer", option=pa.list_(pa.string()))
#: q_uids; the last clip is missing. All but the first two are of one video of Ego4D.
UIDS = tuple(f"{number:08x}-11cb-497d-8d07-77c3a8127391" for number in range(1, 7))
GONE = UIDS[-1]
#: The right answers that are published; the last is none of the options.
ANSWERS: dict[str, int] = {UIDS[0]: 3, UIDS[2]: 0, UIDS[3]: 5}
OPTIONS = ("C cooks.", "C cleans. It shines.", "C reads.", "C paints.", "C sleeps.")


def options_of(uid: str) -> tuple[str, ...]:
    """Return the options of a question; those of the third question have the same text twice."""
    return (*OPTIONS[:4], OPTIONS[0]) if uid == UIDS[2] else OPTIONS


def write_hub(folder: Path, *, ego4d: bool = False) -> Path:
    """Write the hub's layout, unpacked, with ``ego4d`` the file of videos beside it; one suffix is in capitals."""
    for name, uids in (("Subset", tuple(ANSWERS)), ("GENERATION", UIDS)):
        rows = [_hub_row(number, uid, name == "Subset") for number, uid in enumerate(uids)]
        write_table(folder / name / "test-00000-of-00001.parquet", rows, SCHEMA)
    if ego4d:
        write_ego4d(folder)
    write_clips(folder)
    return folder


def write_authors(folder: Path) -> Path:
    """Write the authors' layout."""
    rows = [
        {"q_uid": uid, "google_drive_id": "1x", "question": question_of(uid)}
        | {f"option {number}": text for number, text in enumerate(options_of(uid))}
        for uid in UIDS
    ]
    write_json(folder / "questions.json", rows)
    write_json(folder / "subset_answers.json", ANSWERS)
    write_ego4d(folder)
    write_clips(folder)
    return folder


def write_ego4d(folder: Path) -> None:
    """Write which video of Ego4D a clip is of."""
    videos = {uid: f"ego4d-{min(number, 2)}" for number, uid in enumerate(UIDS)}
    clips = {uid: {"video_uid": name, "starting_sec": 240, "ending_sec": 420} for uid, name in videos.items()}
    write_json(folder / "uid_to_ego4d.json", clips)


def write_clips(folder: Path) -> None:
    write_videos(folder / "videos", [f"{uid}{'.MP4' if uid == UIDS[0] else '.mp4'}" for uid in UIDS if uid != GONE])


def question_of(uid: str) -> str:
    return f"What is c doing in {uid[:8]}?"


def _hub_row(number: int, uid: str, published: bool) -> dict[str, Any]:
    has_letters = [f"{letter}. {text}" for letter, text in zip("ABCDE", options_of(uid), strict=True)]
    answer = str(ANSWERS[uid]) if published else None
    row = {"question_idx": f"{number:05}", "question": question_of(uid), "video_idx": uid}
    return {**row, "option": has_letters, "answer": answer}
