"""MVBench as published: both layouts, clips, folders of frames, one name in two folders, and the mean of its tasks."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.errors import QuestionsChanged, UsageError
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.benchmarks.items import make_clip_id
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.evaluate import describe_data, evaluate
from pipeline.evaluate.request import prepare
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.clips import KeepSize, numbers
from tests.pipeline.evaluate.layouts import by_id, commit_replies
from tests.pipeline.evaluate.mvbench import FRAMES, write_main, write_revision_video

MVBENCH, QUIET = BENCHMARKS["mvbench"], Console(quiet=True)
STAR, TVQA = "video/star/Charades_v1_480/-B1CD.mp4", f"video/tvqa/frames_fps3_hq/{FRAMES}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_main(tmp_path_factory.mktemp("main"))


@pytest.fixture(scope="module")
def loaded(data):
    return MVBENCH.load(data)


def frames_of(item, data, num_frames):
    """The numbers in the frames that jobs.prune is told to take."""
    (told,) = item.make_manifest_rows(data)
    clip = {name: told.get(name) for name in ("start_s", "end_s")}
    return numbers(decode_video(DecodeRequest(told["uri"], Sampling(num_frames), KeepSize(), **clip)).frames)


def test_an_id_carries_the_folder_and_a_clips_bounds(loaded):
    assert {name: item.video_id for name, item in by_id(loaded).items()} == {
        "action_sequence-0": f"{STAR}#t=1.5,9",
        "action_sequence-1": f"{STAR}#t=2,9",
        "action_prediction-0": f"{STAR}#t=1.5,9",
        "action_prediction-1": f"{STAR}#t=0,6.333333333333333",
        "action_antonym-0": "video/ssv2_video/166583.webm",
        **dict.fromkeys(["action_count-0", "action_count-1"], "video/perception/videos/video_1.mp4"),
        **{f"counterfactual_inference-{i}": "video/clevrer/video_validation/video_1.mp4" for i in range(3)},
        **{f"object_existence-{i}": "video/data0613/clevrer/video_validation/video_13.mp4" for i in range(2)},
        "episodic_reasoning-0": f"{TVQA}#t=0,4",
        "episodic_reasoning-1": f"{TVQA}#t=4.1,99",
    }


def test_clips_of_one_file_are_one_cluster(loaded):
    clusters = Counter(item.cluster for item in loaded.items)
    assert clusters["star/Charades_v1_480/-B1CD"] == 4 and clusters[f"tvqa/frames_fps3_hq/{FRAMES}"] == 2
    assert clusters["clevrer/video_validation/video_1"] == 3 and clusters["perception/videos/video_1"] == 2
    assert by_id(loaded)["action_prediction-1"].answer == 0  # of two options that are alike the first


def test_a_clip_has_the_published_frames_of_its_file_or_of_its_folder(loaded, data):
    """Of a folder from round(3 start), at least 1, to round(3 end)."""
    items = by_id(loaded)
    for name, frames in (
        ("action_sequence-0", range(6, 36)),  # four a second
        ("action_sequence-1", range(8, 36)),
        ("episodic_reasoning-0", range(1, 13)),
        ("episodic_reasoning-1", range(12, 31)),
    ):
        assert frames_of(items[name], data, len(frames)) == list(frames)
    assert items["action_sequence-0"].make_manifest_rows(Path("/d")) == [
        {"video_id": f"{STAR}#t=1.5,9", "uri": f"/d/{STAR}", "start_s": 1.5, "end_s": 9.0}
    ]


def test_results_of_both_layouts_never_share_a_place(data, tmp_path):
    """The questions have the same ids, and are about other videos."""
    given = {"benchmark": "mvbench", "out": str(tmp_path / "r"), "method": ["none"], "draws": 100}
    commit_replies(prepare(EvaluateConfig(data=str(data), **given), QUIET))
    write_revision_video(tmp_path / "v")
    with pytest.raises(QuestionsChanged, match="have changed"):
        evaluate(EvaluateConfig(data=str(tmp_path / "v"), **given), QUIET)
    assert evaluate(EvaluateConfig(data=str(data), **given), QUIET).table.original.tally.n_failed == 0


def test_tasks_without_a_question_are_said(loaded):
    lines = list(describe_data(loaded, MVBENCH))
    assert lines[0] == "MVBench: 14 questions to ask; 17 annotated of 4,000 in the whole benchmark"
    assert lines[1].startswith("note: no question of fine_grained_action, unexpected_action, ")
    assert lines[1].endswith("the score is the mean over 7 of the 20, and not the published one")
    items = (replace(loaded.items[0], splits={"task": task}) for task in MVBENCH.splits[0].parts)
    whole = replace(loaded, items=tuple(items))
    assert "no question of" not in "".join(describe_data(whole, MVBENCH))


def faults_about(data, task):
    return [fault for fault in MVBENCH.load(data).faults if task in (fault.question_id or "")]


def test_a_folder_of_frames_without_frames_is_missing(tmp_path):
    write_main(tmp_path)
    for path in (tmp_path / TVQA).iterdir():
        path.unlink()
    faults = faults_about(tmp_path, "episodic_reasoning")
    assert [fault.kind for fault in faults] == ["missing-video"] * 2
    assert f"the folder {TVQA!r} holds no frames (00001.jpg and so on)" in faults[0].message


def test_annotations_of_another_task_or_form_are_no_questions_and_bounds_are_seconds(tmp_path):
    file = write_main(tmp_path) / "json" / "action_antonym.json"
    (row,) = json.loads(file.read_text())
    file.write_text(json.dumps([row | {"start": start} for start in ("1.5", -1, True, float("nan"))]))
    faults = faults_about(tmp_path, "action_antonym")
    assert [fault.kind for fault in faults] == ["bad-row"] * 4
    assert all("start must be seconds, 0 or more" in fault.message for fault in faults)
    file = file.with_name("summary.json")
    file.write_text(json.dumps([row]))
    assert "task must be one of action_sequence" in MVBENCH.load(tmp_path).faults[-1].message
    for text, why in (('{"a": 1}', "expected a JSON list of objects; fetch it again"), ("version https:", "not JSON")):
        file.write_text(text)
        with pytest.raises(UsageError, match=rf"summary\.json: cannot be read: {why}"):
            MVBENCH.load(tmp_path)


def test_either_bound_of_a_clip_may_lack():
    ids = {(None, 9.0): "v#t=,9", (2.0, None): "v#t=2", (None, None): "v"}
    assert {bounds: make_clip_id("v", *bounds) for bounds in ids} == ids
