"""A small MVBench in both of its published layouts, with faults as they occur: eight of its 20 tasks."""

from pathlib import Path
from typing import Any

from tests.builders.clips import write_jpegs
from tests.pipeline.evaluate.layouts import write_json, write_videos

FRAMES = "castle_s07e04_seg02_clip_14"
N_FRAMES = 30  # three a second
Rows = list[dict[str, Any]]


def row(
    video: str, candidates: list[str], answer: str, question: str = "What happened?", **more: Any
) -> dict[str, Any]:
    return {"video": video, "question": question, "candidates": candidates, "answer": answer, **more}


FOUR, THREE = ["Ate.", "Slept.", "Read.", "Left."], ["not sure", "yes", "no"]
EVENTS = ["The cube falls", "The ball falls", "Nothing falls"]
#: Task -> rows, as the files of main have them. Bounds are those of clips.
MAIN: dict[str, Rows] = {
    "action_sequence": [
        row("-B1CD.mp4", FOUR, "Read.", start=1.5, end=9.0),
        row("-B1CD.mp4", FOUR, "Left.", start=2.0, end=9.0),  # another part of the same file
        row("-B1CD.mp4", FOUR, "Left.", start=9.0, end=2.0),  # none
    ],
    "action_prediction": [
        row("-B1CD.mp4", FOUR, "Ate.", "What will happen?", start=1.5, end=9.0),  # a clip of another task
        row("-B1CD.mp4", ["Ate.", "Ate.", "Read.", "Left."], "Ate.", "And then?", start=0.0, end=19 / 3),
    ],
    "action_antonym": [row("166583.webm", ["Not sure", "Scattering", "Piling up"], "Piling up")],
    "fine_grained_pose": [row("S010C002P017R002A005_rgb.avi", FOUR, "Ate.")],  # which the hub does not have
    "action_count": [row("video_1.mp4", ["3", "2", "4"], "3"), row("video_1.mp4", ["3", "2", "4"], "5", "Again?")],
    "counterfactual_inference": [
        row("video_1.mp4", EVENTS[:1], EVENTS[0], "Without the cube?"),  # one name in two folders; one option
        row("video_1.mp4", EVENTS[:2], EVENTS[1], "Without the ball?"),
        row("video_1.mp4", EVENTS, EVENTS[2], "Without both?"),
    ],
    "object_existence": [
        row("video_13.mp4", THREE, "yes", "Are there cubes?"),
        row("video_13.mp4", ["yes", "no", "not sure"], "yes", "Are there cubes?"),  # asked again
        row("../../../outside.mp4", THREE, "yes"),
    ],
    "episodic_reasoning": [
        row(FRAMES, [*FOUR, "Ran."], "Ran.", "Why?", subtitle="(A:)b", show_name="Castle", start=0.0, end=4.0, fps=3),
        row(FRAMES, [*FOUR, "Ran."], "Ate.", "How?", subtitle="", show_name="Castle", start=4.1, end=99.0, fps=3),
    ],
}  # fmt: skip
_STAR, _CLEVRER = "star/Charades_v1_480", "clevrer/video_validation"
FOLDERS = {
    **{"action_sequence": _STAR, "action_prediction": _STAR, "action_antonym": "ssv2_video"},
    **{"fine_grained_pose": "nturgbd", "action_count": "perception/videos", "counterfactual_inference": _CLEVRER},
    **{"object_existence": _CLEVRER, "episodic_reasoning": "tvqa/frames_fps3_hq"},
}
CUT = {
    **{_STAR: "star/Charades_segment", "ssv2_video": "ssv2_video_mp4", "nturgbd": "nturgbd_convert"},
    "tvqa/frames_fps3_hq": "tvqa/video_fps3_hq_segment",
}


def write_main(folder: Path) -> Path:
    """Write revision main: a file a task, clips by their bounds, frames as JPEG; one folder came in a later zip."""
    for task, rows in MAIN.items():
        write_json(folder / "json" / f"{task}.json", rows)
    video = folder / "video"
    write_videos(video, [f"{_STAR}/-B1CD.mp4"], count=40)  # ten seconds
    write_videos(video, ["ssv2_video/166583.webm", "perception/videos/video_1.mp4", f"{_CLEVRER}/video_1.mp4"])
    write_videos(video / "data0613", [f"{_CLEVRER}/video_13.mp4"])
    write_jpegs(video / "tvqa" / "frames_fps3_hq" / FRAMES, N_FRAMES, (48, 64))
    return folder


def write_revision_video(folder: Path) -> Path:
    """Write revision video: all tasks in one file, clips cut out as MP4 with their bounds in their names."""
    meta = {task: [_cut_row(one) for one in rows] for task, rows in MAIN.items()}
    root = {task: f"video/{CUT.get(where, where)}" for task, where in FOLDERS.items()}
    write_json(folder / "test.json", {"root": root, "meta": meta})
    there = [f"{root[task]}/{one['video']}" for task, rows in meta.items() for one in rows]
    write_videos(folder, [path for path in there if ".." not in path and "nturgbd" not in path])
    return folder


def _cut_row(one: dict[str, Any]) -> dict[str, Any]:
    bounds = f"_{one['start']}_{one['end']}" if "start" in one else ""
    kept = {name: one[name] for name in ("question", "candidates", "answer")}
    return {**kept, "video": f"{one['video'].rpartition('.')[0] or one['video']}{bounds}.mp4"}
