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
from tests.pipeline.evaluate.layouts import by_id, commit_replies, faults_of, faulty, printed, replied
from tests.pipeline.evaluate.mvbench import FRAMES, MAIN, write_main, write_revision_video

MVBENCH, QUIET = BENCHMARKS["mvbench"], Console(quiet=True)
STAR, TVQA = "video/star/Charades_v1_480/-B1CD.mp4", f"video/tvqa/frames_fps3_hq/{FRAMES}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_main(tmp_path_factory.mktemp("main"))


@pytest.fixture(scope="module")
def loaded(data):
    return MVBENCH.load(data)


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    return MVBENCH.load(write_revision_video(tmp_path_factory.mktemp("video")))


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


def test_clips_of_one_file_are_one_cluster_in_both_layouts(loaded, cut):
    clusters = Counter(item.cluster for item in loaded.items)
    assert clusters["star/Charades_v1_480/-B1CD"] == 4 and clusters[f"tvqa/frames_fps3_hq/{FRAMES}"] == 2
    assert clusters["clevrer/video_validation/video_1"] == 3 and clusters["perception/videos/video_1"] == 2
    assert set(clusters) - {"ssv2_video/166583.webm"} == {item.cluster for item in cut.items} - {"ssv2_video/166583"}


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


def test_every_fault_is_counted_and_what_can_be_asked_is(loaded, cut):
    assert loaded.n_annotated == sum(map(len, MAIN.values()))
    assert faults_of(loaded) == {
        ("bad-row", True): 1,  # a clip that ends before it starts
        ("missing-video", True): 1,
        ("policy", True): 1,
        ("repeated-candidate", False): 1,
        ("answer-no-candidate", False): 1,
        ("repeated-question", False): 1,
    }
    assert faulty(loaded, "missing-video") == ["fine_grained_pose-0"] and faulty(loaded, "bad-row") == [
        "action_sequence-2"
    ]
    assert faulty(loaded, "repeated-question") == ["object_existence-1"]
    assert faulty(loaded, "answer-no-candidate") == ["action_count-1"]
    assert faults_of(cut) == faults_of(loaded) - Counter({("bad-row", True): 1})
    assert by_id(loaded)["action_prediction-1"].answer == 0  # the first of the two


def test_both_layouts_ask_the_same(loaded, cut):
    there = by_id(cut)
    for name, item in by_id(loaded).items():
        other = there[name]
        assert (other.question, other.options, other.answer) == (item.question, item.options, item.answer)
        assert other.splits == item.splits == {"task": name.rpartition("-")[0]}


def test_it_is_asked_in_the_words_of_lmms_eval(loaded):
    item = by_id(loaded)["action_antonym-0"]
    for protocol in MVBENCH.protocols:
        assert protocol.text(item, "qwen3_vl") == (
            "Question:What happened?\nOption:\n(A) Not sure\n(B) Scattering\n(C) Piling up\n"
            "Only give the best option.\n"
        )
        assert (protocol.decoding.max_new_tokens, protocol.parser, protocol.metric) == (16, "mvbench", "task")


REPLIES = {
    **{"action_sequence-0": "C", "action_sequence-1": "c) Read."},  # 1 of 2
    **{"action_prediction-0": "(A) Ate.", "action_prediction-1": "A"},  # 2 of 2
    "action_antonym-0": "",  # 0 of 1
    **{"action_count-0": "A. 3", "action_count-1": "A"},  # 1 of 2: the other one's answer is none of its options
    **{f"counterfactual_inference-{i}": "a" for i in range(3)},  # 1 of 3
    **{"object_existence-0": "B", "object_existence-1": "B"},  # 1 of 2
    **{"episodic_reasoning-0": "E", "episodic_reasoning-1": "E"},  # 1 of 2
}


def test_the_score_is_the_mean_over_the_tasks(loaded):
    done = replied(MVBENCH, loaded, REPLIES)
    assert printed(MVBENCH, done) == {
        "AS": "50.0", "AP": "100.0", "AA": "0.0", "OE": "50.0", "AC": "50.0", "ER": "50.0", "CI": "33.3",
        "Overall": "47.6",  # (1/2 + 1 + 0 + 1/2 + 1/2 + 1/2 + 1/3) / 7; of the 14 questions 7 are right, 50.0
    }  # fmt: skip


def test_tasks_without_a_question_are_said(loaded):
    lines = list(describe_data(loaded, MVBENCH))
    assert lines[0] == "MVBench: 14 questions to ask; 17 annotated of 4,000 in the whole benchmark"
    assert lines[1].startswith("note: no question of fine_grained_action, unexpected_action, ")
    assert lines[1].endswith("the score is the mean over 7 of the 20, and not the published one")
    whole = replace(
        loaded, items=tuple(replace(loaded.items[0], splits={"task": task}) for task in MVBENCH.splits[0].parts)
    )
    assert "no question of" not in "".join(describe_data(whole, MVBENCH))


def test_a_folder_of_frames_without_frames_is_missing(tmp_path):
    write_main(tmp_path)
    for path in (tmp_path / TVQA).iterdir():
        path.unlink()
    faults = [fault for fault in MVBENCH.load(tmp_path).faults if "episodic_reasoning" in (fault.question_id or "")]
    assert [fault.kind for fault in faults] == ["missing-video"] * 2
    assert f"the folder {TVQA!r} holds no frames (00001.jpg and so on)" in faults[0].message


def test_annotations_of_another_task_or_form_are_no_questions(tmp_path):
    write_main(tmp_path)
    file = tmp_path / "json" / "summary.json"
    file.write_text('[{"video": "a.mp4", "question": "Q", "candidates": ["x"], "answer": "x"}]')
    assert "task must be one of action_sequence" in MVBENCH.load(tmp_path).faults[-1].message
    for text, why in (('{"a": 1}', "expected a JSON list of objects; fetch it again"), ("version https:", "not JSON")):
        file.write_text(text)
        with pytest.raises(UsageError, match=rf"summary\.json: cannot be read: {why}"):
            MVBENCH.load(tmp_path)


def test_a_clip_has_seconds_as_bounds_of_which_either_may_lack(tmp_path):
    assert [make_clip_id("v", *bounds) for bounds in ((None, 9.0), (2.0, None), (None, None))] == [
        "v#t=,9",
        "v#t=2",
        "v",
    ]
    write_main(tmp_path)
    file = tmp_path / "json" / "action_antonym.json"
    (row,) = json.loads(file.read_text())
    file.write_text(json.dumps([row | {"start": start} for start in ("1.5", -1, True, float("nan"))]))
    faults = [fault for fault in MVBENCH.load(tmp_path).faults if "action_antonym" in (fault.question_id or "")]
    assert [fault.kind for fault in faults] == ["bad-row"] * 4
    assert all("start must be seconds, 0 or more" in fault.message for fault in faults)
