"""MVBench (Li et al., CVPR 2024): 20 tasks of 200 questions each, of one to five options, on clips of seconds.

Two layouts are published on the hub (OpenGVLab/MVBench). In *main*, ``json/`` has a file a task, five of which have
``start`` and ``end``: clips of longer videos, and in one of them of folders of JPEG frames, three a second. Revision
*video*, which lmms-eval reads, has all clips cut out as MP4 in folders of other names; its ``test.json`` has all tasks.
Clips of *main* are near, but not those very frames: compare within one layout; results of both never share a place.
An id of a video carries its folder (20 file names are in two of them) and a clip's bounds.

The score is the mean over the tasks, which is that over the questions where none is missing. lmms-eval prints no mean,
and leaves empty replies out of a task's; here they are wrong, as methods are compared on the same questions. The
authors' own way of asking takes 16 frames at the middles of segments and begins the model's answer, and is not here.
"""

from __future__ import annotations

import re

from pipeline.evaluate.benchmarks.annotations import AnnotationRow
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.protocols import PromptTemplate, lmms_eval
from pipeline.inputs.tables import UserRow

_STAR, _STAR_CUT = "star/Charades_v1_480", "star/Charades_segment"
_CLEVRER, _PERCEPTION = "clevrer/video_validation", "perception/videos"
# Task -> (its letters in the paper, folder in main, folder in revision video where that is another one).
_TASKS: dict[str, tuple[str, str, str]] = {
    "action_sequence": ("AS", _STAR, _STAR_CUT),
    "action_prediction": ("AP", _STAR, _STAR_CUT),
    "action_antonym": ("AA", "ssv2_video", "ssv2_video_mp4"),
    "fine_grained_action": ("FA", "Moments_in_Time_Raw/videos", ""),
    "unexpected_action": ("UA", "FunQA_test/test", ""),
    "object_existence": ("OE", _CLEVRER, ""),
    "object_interaction": ("OI", _STAR, _STAR_CUT),
    "object_shuffle": ("OS", _PERCEPTION, ""),
    "moving_direction": ("MD", _CLEVRER, ""),
    "action_localization": ("AL", "sta/sta_video", "sta/sta_video_segment"),
    "scene_transition": ("ST", "scene_qa/video", ""),
    "action_count": ("AC", _PERCEPTION, ""),
    "moving_count": ("MC", _CLEVRER, ""),
    "moving_attribute": ("MA", _CLEVRER, ""),
    "state_change": ("SC", _PERCEPTION, ""),
    "fine_grained_pose": ("FP", "nturgbd", "nturgbd_convert"),
    "character_order": ("CO", _PERCEPTION, ""),
    "egocentric_navigation": ("EN", "vlnqa", ""),
    "episodic_reasoning": ("ER", "tvqa/frames_fps3_hq", "tvqa/video_fps3_hq_segment"),
    "counterfactual_inference": ("CI", _CLEVRER, ""),
}
_ROOTS = ("video/", "", "video/data0613/", "data0613/")
# The bounds in the name of a clip that was cut out: NBMH9_21.4_37.6.mp4 is part of NBMH9.
_BOUNDS = re.compile(r"_\d+(?:\.\d+)?_\d+(?:\.\d+)?(?=\.mp4$)")


def _with_folders(row: UserRow, place: AnnotationRow) -> UserRow:
    """Add to a row its task, its id, the folders that may hold its video, and the video that its clip is from.

    A ``prefix`` that the row has stays. A row of an unknown task gets the folder "?", and is left out as a bad row
    later.
    """
    _, whole, cut = _TASKS.get(place.part, ("", "?", ""))
    has_clip = cut.endswith("_segment")
    source = _BOUNDS.sub("", str(row.get("video"))) if has_clip else str(row.get("video"))
    return {
        "prefix": cut or whole,
        **row,
        "task": place.part,
        "question_id": f"{place.part}-{place.number}",
        "whole": whole,
        "cut": cut or whole,
        "cluster": f"{whole}/{source.removesuffix('.mp4')}",
    }


MVBENCH = Benchmark(
    name="mvbench",
    title="MVBench",
    protocols=lmms_eval(
        PromptTemplate("Question:{question}\nOption:\n{options}\nOnly give the best option.\n", "({letter}) {text}"),
        "mvbench",
        "mvbench",
        metric="task",
    ),
    source="the data set OpenGVLab/MVBench of the Hugging Face hub: revision video (test.json), or main (json/), with "
    "its zip files unpacked beside them",
    files=("test.json", "json/*.json"),
    adapt=_with_folders,
    paths=tuple(f"{root}{{whole}}/{{video}}" for root in _ROOTS),
    cut_paths=("{prefix}/{video}", *(f"{root}{{cut}}/{{video}}" for root in _ROOTS)),
    options="candidates",
    answer_rule="text",
    clip=("start", "end"),
    splits=(Split("task", "Task", {task: title for task, (title, _, _) in _TASKS.items()}),),
    cluster="cluster",
    n_questions=4000,
)
