"""MVBench (Li et al., CVPR 2024): 20 tasks of 200 questions each, with one to five options, on clips of seconds.

The hub has two layouts (OpenGVLab/MVBench). In *main*, five tasks have ``start`` and ``end``: clips of longer videos,
in one task of folders of JPEG frames at 3 fps. In revision *video*, which lmms-eval reads, all clips are MP4 files in
folders with other names. Frames differ slightly between the layouts, so compare results only within one.

The score is the mean over the tasks. lmms-eval leaves empty replies out of a task's score; here they count as wrong,
because methods are compared on the same questions.
"""

from __future__ import annotations

import re

from pipeline.evaluate.benchmarks.annotations import AnnotationRow
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.protocols import PromptTemplate, make_lmms_eval_protocols
from pipeline.inputs.tables import UserRow

_STAR, _STAR_CUT = "star/Charades_v1_480", "star/Charades_segment"
_CLEVRER, _PERCEPTION = "clevrer/video_validation", "perception/videos"
# Task -> (its abbreviation in the paper, its folder in main, its folder in revision video or "" if it is the same).
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
# The bounds in the name of a clip that was cut out: NBMH9_21.4_37.6.mp4 is a clip of NBMH9.
_BOUNDS = re.compile(r"_\d+(?:\.\d+)?_\d+(?:\.\d+)?(?=\.mp4$)")


def _add_folders(row: UserRow, place: AnnotationRow) -> UserRow:
    """Add the task, the id, the folders of both layouts (``whole``, ``cut``, ``prefix``) and the cluster to a row.

    The task is the row's ``part``. The cluster is the source video with its folder, without the bounds in the name of a
    cut clip. A ``prefix`` in the row is kept. The folder of an unknown task is "?".
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
    protocols=make_lmms_eval_protocols(
        PromptTemplate("Question:{question}\nOption:\n{options}\nOnly give the best option.\n", "({letter}) {text}"),
        "mvbench",
        "mvbench",
        metric="task",
    ),
    source="the data set OpenGVLab/MVBench of the Hugging Face hub: revision video (test.json), or main (json/), with "
    "its zip files unpacked beside them",
    files=("test.json", "json/*.json"),
    adapt=_add_folders,
    paths=tuple(f"{root}{{whole}}/{{video}}" for root in _ROOTS),
    cut_paths=("{prefix}/{video}", *(f"{root}{{cut}}/{{video}}" for root in _ROOTS)),
    options="candidates",
    answer_rule="text",
    clip=("start", "end"),
    splits=(Split("task", "Task", {task: title for task, (title, _, _) in _TASKS.items()}),),
    cluster="cluster",
    n_questions=4000,
)
