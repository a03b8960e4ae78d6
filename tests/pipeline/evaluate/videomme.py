"""A small VideoMME in its published layout: annotations in Parquet, videos in ``data/``, and faults as they occur."""

from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa

from tests.builders.clips import add_stream
from tests.pipeline.evaluate.layouts import schema_of, write_table

TEXTS = "video_id duration domain sub_category url videoID question_id task_type question"
SCHEMA = schema_of(TEXTS).append(pa.field("options", pa.list_(pa.string()))).append(pa.field("answer", pa.string()))
DURATIONS = ("short", "medium", "long")
DOMAINS = (("Knowledge", "Geography"), ("Life Record", "Travel"), ("Multilingual", "Multilingual"))
TASKS = ("OCR Problems", "Counting Problem", "Action Reasoning")
SUFFIXES = (".mp4", ".mp4", ".MP4", ".mkv")
PER_VIDEO = 3  # questions
#: Rows beside those of the videos, none of which can be asked: three on a missing video, a bad one, one that leads out.
LEFT_OUT = 5
MISSING, OUTSIDE = "gone-Video_0", "../../outside"


def video_key(number: int) -> str:
    """Return the videoID of a video; that of the first one begins with a dash, as 13 of the published ones do."""
    return f"-Ab{number}xYz_9Qk" if number == 0 else f"vid{number}_Q-{number}k"


def video_id(number: int) -> str:
    """Return a video's path below the folder."""
    return f"data/{video_key(number)}{SUFFIXES[number % len(SUFFIXES)]}"


def write_videomme(folder: Path, *, n_videos: int = 6, seed: int = 0, faults: bool = True, videos: bool = True) -> Path:
    """Write ``n_videos`` videos of 16 to 24 small frames with three questions each, short, medium and long in turn.

    Args:
        seed: of options, answers and pictures.
        faults: the second question repeats an option, the third one's answer is none of its options, and LEFT_OUT rows
            that cannot be asked are added.
        videos: real ones; else empty files.

    Returns ``folder``, for ``--data``. The videos that are there are those of ``video_id``.
    """
    rng = np.random.default_rng(seed)
    rows = [_row(rng, video, ask) for video in range(n_videos) for ask in range(PER_VIDEO)]
    if faults:
        rows[1]["options"] = ["A. A cup.", "B. A kite.", "C. A cup.", "D. A door."]
        rows[2]["answer"] = "E"
        rows[PER_VIDEO:PER_VIDEO] = _left_out(rng, n_videos)
    write_rows(folder, rows)
    for number in range(n_videos):
        path = folder / video_id(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        if videos:
            write_moving(path, rng, 16 + number % 9)
        else:
            path.touch()
    return folder


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write the annotations."""
    path = folder / "videomme" / "test-00000-of-00001.parquet"
    write_table(path, rows, SCHEMA)
    return path


def write_moving(path: Path, rng: np.random.Generator, count: int, size: tuple[int, int] = (64, 96)) -> Path:
    """Write a clip of a bright square that crosses a ground of random colours."""
    height, width = size
    ground = np.kron(rng.integers(40, 200, (height // 16, width // 16, 3)), np.ones((16, 16, 1))).astype(np.uint8)
    with av.open(str(path), "w") as out:
        stream = add_stream(out, "libx264", size, 8, 10, "yuv420p", None)
        for number in range(count):
            image = ground.copy()
            left = number * (width - 16) // max(1, count - 1)
            image[24:40, left : left + 16] = 255
            out.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        out.mux(stream.encode(None))
    return path


def _row(rng: np.random.Generator, video: int, ask: int) -> dict[str, Any]:
    domain, sub_category = DOMAINS[video // len(DURATIONS) % len(DOMAINS)]
    things = rng.permutation(["A dog.", "A cup.", "A kite.", "A door.", "A boat.", "A bell."])[:4]
    return {
        "video_id": f"{video + 1:03}",
        "duration": DURATIONS[video % len(DURATIONS)],
        "domain": domain,
        "sub_category": sub_category,
        "url": f"https://example.org/{video}",
        "videoID": video_key(video),
        "question_id": f"{video + 1:03}-{ask + 1}",
        "task_type": TASKS[ask % len(TASKS)],
        "question": f"What is seen {('first', 'next', 'last')[ask]}?",
        "options": [f"{letter}. {thing}" for letter, thing in zip("ABCD", things, strict=True)],
        "answer": "ABCD"[rng.integers(4)],
    }


def _left_out(rng: np.random.Generator, n_videos: int) -> list[dict[str, Any]]:
    missing = [_row(rng, n_videos, ask) | {"videoID": MISSING} for ask in range(PER_VIDEO)]
    bad = _row(rng, n_videos + 1, 0) | {"videoID": video_key(0), "options": None}
    return [*missing, bad, _row(rng, n_videos + 2, 0) | {"videoID": OUTSIDE}]
