"""Benchmarks as published, in each of their layouts: what is asked and in which words, the faults, and the score."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from pipeline.errors import QuestionsChanged, UsageError
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.benchmarks.annotations import AnnotationRow, strip_option_letter
from pipeline.evaluate.benchmarks.items import make_clip_id
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.evaluate import describe_data, evaluate
from pipeline.evaluate.request import prepare
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.clips import KeepSize, numbers
from tests.pipeline.evaluate import egoschema, longvideobench, mlvu, mvbench
from tests.pipeline.evaluate.layouts import QUIET, by_id, commit_replies, printed, replied


class Published(NamedTuple):
    """A benchmark in its layouts, of which the first is that of ``file``, and what they must become.

    Attributes:
        layouts: functions that write a folder.
        file: a file of annotations, in JSON.
        text: what a model is told of the first question that can be asked.
        rules: tokens, parser and metric of each protocol.
        faults: the questions with each kind of fault; kinds in LEFT_OUT leave a question out.
        replies: to the questions in their order.
        printed: the row of full retention.
        n_alone: number of faults of the first layout alone.
    """

    layouts: tuple[Callable[[Path], Path], ...]
    file: str
    text: str
    rules: list[str]
    faults: Mapping[str, list[str]] = MappingProxyType({})
    replies: Sequence[str] = ()
    printed: Mapping[str, str] = MappingProxyType({})
    n_alone: int = 0


LEFT_OUT = {"missing-video", "bad-row", "policy", "no-answer"}
GIVEN = "Answer with the option's letter from the given choices directly."
UIDS = egoschema.UIDS
EGOSCHEMA = Published(
    layouts=(egoschema.write_authors, partial(egoschema.write_hub, ego4d=True)),
    file="questions.json",
    text=f"{egoschema.question_of(UIDS[0])}\n"
    f"A. C cooks.\nB. C cleans. It shines.\nC. C reads.\nD. C paints.\nE. C sleeps.\n{GIVEN}",
    rules=["16 egoschema questions", "1024 egoschema questions"],
)
PUBLISHED = {
    "longvideobench": Published(
        layouts=(partial(longvideobench.write_longvideobench, json=True), longvideobench.write_longvideobench),
        file="lvb_val.json",
        faults={
            "repeated-candidate": ["@cook-712_1"],
            "answer-no-candidate": ["86CxyhFV9MI_0"],
            "repeated-question": ["86CxyhFV9MI_1"],
            "missing-video": ["gone_0"],
            "bad-row": ["86CxyhFV9MI_2", "86CxyhFV9MI_4"],
            "policy": ["86CxyhFV9MI_3"],
            "no-answer": ["86CxyhFV9MI_5"],
        },
        text=f"What is on the table in -Ab0xYz_9Qk_0?\nA. a cup\nB. a pan\nC. a knife\nD. a bowl\nE. a lid\n{GIVEN}\n",
        rules=["32 longvideobench questions"] * 2,
        replies=["C", "Answer: D", "", "B) a pan", "E", "(E)"],  # "Answer: D" is A; a draw is its expectation, 1/3
        printed={"8-15 s": "50.0", "15-60 s": "66.7", "3-10 min": "50.0", "Overall": "55.6"},
    ),
    "mlvu-dev": Published(
        layouts=(mlvu.write_mlvu_dev, mlvu.write_repacked_dev),
        file="json/1_plotQA.json",
        faults={
            "repeated-candidate": ["plotQA-2", "plotQA-3"],
            "blank-candidate": ["plotQA-3"],
            "repeated-question": ["ego-1"],
            "answer-no-candidate": ["needle-0"],
            "missing-video": ["anomaly_reco-1"],
            # Of a task that there is not, and of as many options as in the test set.
            "bad-row": ["unheard_of-1", "topic_reasoning-2"],
        },
        text="What colour?\n(A) Yellow\n(B) Red\n(C) Green\n(D) Blue\n\nOnly give the best option.\nBest option: (",
        rules=["16 extract-mcq-answer task_type", "16 mlvu-0.5 task_type"],
        replies=["(A) Yellow", "B", "D", "B. There is", "A", "C", "", "B)", "b", "A", "C"],
        printed={
            "TR": "100.0", "AR": "0.0", "NQA": "0.0", "ER": "50.0", "PQA": "75.0", "AO": "0.0", "AC": "100.0",
            "Overall": "46.4",  # (1 + 0 + 0 + 1/2 + 3/4 + 0 + 1) / 7; of the 11 questions 6 are right, 54.5
        },
    ),
    "mlvu-test": Published(
        layouts=(mlvu.write_mlvu_test, mlvu.write_repacked_test),
        file="test-ground-truth/test_mcq_gt.json",
        text="What colour?\n(A) Fighting\n(B) Shoplifting\n(C) Arrest\n(D) Normal\n(E) Shooting\n(F) Vandalism\n",
        rules=["16 extract-mcq-answer task_type", "16 mlvu-0.5 task_type"],
    ),
    "mvbench": Published(
        layouts=(mvbench.write_main, mvbench.write_revision_video),
        file="json/action_sequence.json",
        faults={
            "bad-row": ["action_sequence-2"],  # a clip that ends before it starts
            "missing-video": ["fine_grained_pose-0"],
            "policy": ["object_existence-2"],
            "repeated-candidate": ["action_prediction-1"],
            "answer-no-candidate": ["action_count-1"],
            "repeated-question": ["object_existence-1"],
        },
        text=(
            "Question:What happened?\nOption:\n(A) Not sure\n(B) Scattering\n(C) Piling up\n"
            "Only give the best option.\n"
        ),
        rules=["16 mvbench task"] * 2,
        replies=["", "A. 3", "A", "(A) Ate.", "A", "C", "c) Read.", *"aaaEEBB"],
        printed={
            "AS": "50.0", "AP": "100.0", "AA": "0.0", "OE": "50.0", "AC": "50.0", "ER": "50.0", "CI": "33.3",
            "Overall": "47.6",  # (1/2 + 1 + 0 + 1/2 + 1/2 + 1/2 + 1/3) / 7; of the 14 questions 7 are right, 50.0
        },
        n_alone=1,
    ),
    "egoschema": EGOSCHEMA._replace(faults={"missing-video": [egoschema.GONE], "repeated-candidate": [UIDS[2]]}),
    "egoschema-subset": EGOSCHEMA._replace(
        faults={"repeated-candidate": [UIDS[2]], "answer-no-candidate": [UIDS[3]]},
        replies=["(D) C paints.", "", "A"],  # a draw is 1/5; no option is right of the third
        printed={"EgoSchema subset": "40.0"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Write and load a benchmark once in each layout."""

    @cache
    def load(name, layout=0):
        folder = PUBLISHED[name].layouts[layout](tmp_path_factory.mktemp("data"))
        return folder, BENCHMARKS[name].load(folder)

    return load


every = pytest.mark.parametrize("name", PUBLISHED)


@every
def test_every_row_is_a_question_whose_video_is_there_or_a_fault_that_is_listed(load, name):
    folder, loaded = load(name)
    faults = [(kind, question_id) for kind, ids in PUBLISHED[name].faults.items() for question_id in ids]
    assert sorted((fault.kind, fault.question_id) for fault in loaded.faults) == sorted(faults)
    assert all(fault.left_out is (fault.kind in LEFT_OUT) for fault in loaded.faults)
    assert loaded.n_annotated == len(loaded.items) + sum(fault.left_out for fault in loaded.faults)
    assert len(by_id(loaded)) == len(loaded.items) and all((folder / item.path).exists() for item in loaded.items)


@every
def test_every_layout_asks_the_same(load, name):
    """Videos lie elsewhere, and rows may be numbered otherwise: nothing else differs."""

    def asked(layout):
        _, loaded = load(name, layout)
        items = [
            (i.question, i.options, i.answer, i.expected, *i.splits.items(), str(Path(i.cluster).with_suffix("")))
            for i in loaded.items
        ]
        return Counter(items), Counter((fault.kind, fault.left_out) for fault in loaded.faults)

    (first, faults), (second, other_faults) = asked(0), asked(1)
    n_alone = PUBLISHED[name].n_alone
    assert not first - second and (second - first).total() == n_alone
    assert not other_faults - faults and (faults - other_faults).total() == n_alone
    assert len(by_id(load(name, 1)[1])) == second.total()


@every
def test_it_is_asked_in_the_words_of_lmms_eval_and_read_by_its_rules(load, name):
    protocols, expected = BENCHMARKS[name].protocols, PUBLISHED[name]
    for protocol in protocols:
        for kind in ("llava_onevision", "qwen2_5_vl", "qwen3_vl"):
            assert protocol.text(load(name)[1].items[0], kind) == expected.text
    rules = [f"{one.decoding.max_new_tokens} {one.parser} {one.metric}" for one in protocols]
    assert rules == expected.rules


@pytest.mark.parametrize("name", [name for name, one in PUBLISHED.items() if one.printed])
def test_the_score_is_the_mean_over_questions_or_over_tasks(load, name):
    _, loaded = load(name)
    replies = zip(loaded.items, PUBLISHED[name].replies, strict=True)
    done = replied(BENCHMARKS[name], loaded, {item.question_id: reply for item, reply in replies})
    assert printed(BENCHMARKS[name], done) == PUBLISHED[name].printed


ODD = ["", "x\0", "\ud800", "../../x", "x" * 5000, None, [], {}, ["a"] * 30, [None], True, -1, 1e300]


@every
def test_an_odd_cell_costs_its_row_alone(tmp_path, name):
    path = PUBLISHED[name].layouts[0](tmp_path) / PUBLISHED[name].file
    rows = json.loads(path.read_text())
    before = BENCHMARKS[name].load(tmp_path)
    odd = [{**rows[0], column: value} for column in rows[0] for value in ODD]
    missing = [{other: cell for other, cell in rows[0].items() if other != column} for column in rows[0]]
    path.write_text(json.dumps([*rows, *odd, *missing]))
    after = BENCHMARKS[name].load(tmp_path)
    assert after.n_annotated == len(after.items) + sum(fault.left_out for fault in after.faults)
    kept = by_id(after)
    assert all(kept[item.question_id] == item for item in before.items)
    assert all(fault.message.isprintable() and len(fault.message.encode()) <= 1024 for fault in after.faults)


def test_only_a_letter_in_front_of_an_option_is_no_part_of_its_text():
    options = ["A. red", "B) red", "(C) red", "D: red", "vitamin A. red", "vitamin B. red"]
    assert [strip_option_letter(option) for option in options] == [*["red"] * 4, *options[4:]]


def test_a_row_of_longvideobench_says_its_video_by_its_path_and_has_the_options_that_are_there(load):
    benchmark, items = BENCHMARKS["longvideobench"], by_id(load("longvideobench")[1])
    item = items["-Ab0xYz_9Qk_0"]
    assert item.video_ids == ("videos/-Ab0xYz_9Qk.mp4",) and item.cluster == "-Ab0xYz_9Qk.mp4"
    assert (item.options, item.answer, item.expected) == (longvideobench.FIVE, 2, "2")
    assert (item.start_s, item.end_s) == (None, None)  # the timestamp is of the subtitles
    categories = {"question_category": "S2O", "topic_category": "LC-Lifestyle-Cooking-Recipes"}
    assert item.splits == {"duration_group": "15", **categories}
    assert items["@cook-712_0"].video_id == "videos/712.mp4"
    assert [len(item.options) for item in items.values()] == [5, 4, 3, 4, 5, 5]
    between = {f"option{i}": text for i, text in enumerate(["a", "N/A", "c", "N/A", "N/A"])}
    candidates = benchmark.adapt(between, AnnotationRow("", "", 0, {}))["candidates"]
    assert candidates == ["a", "N/A", "c"]  # else the answer would be another one


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda index: "ABCDE"[index % 5], "answers of 7 of 7 questions are none of their options"),
        (lambda index: -1, r"none of the 11 questions can be asked .*no-answer"),  # as in the file of the test set
    ],
)
def test_a_file_whose_answers_have_another_form_is_refused(tmp_path, answer, why):
    file = longvideobench.write_longvideobench(tmp_path, json=True) / "lvb_val.json"
    rows = [one | {"correct_choice": answer(one["correct_choice"])} for one in json.loads(file.read_text())]
    file.write_text(json.dumps(rows))
    with pytest.raises(UsageError, match=why):
        BENCHMARKS["longvideobench"].load(tmp_path)


def test_a_question_of_mlvu_has_its_options_in_its_text_and_a_video_in_two_tasks_is_one_cluster(load):
    found = by_id(load("mlvu-dev")[1])
    plot, topic, needle = (found[name] for name in ("plotQA-0", "topic_reasoning-0", "needle-0"))
    assert plot.question == "What colour?\n(A) Yellow\n(B) Red\n(C) Green\n(D) Blue\n"
    assert (plot.options, plot.answer, plot.expected) == (tuple(mlvu.FOUR), 0, "A")
    assert plot.video_id == "video/1_plotQA/movie101_66.mp4" and plot.splits == {"task_type": "plotQA"}
    assert topic.video_id == "video/7_topic_reasoning/movie101_66.mp4"
    assert plot.cluster == topic.cluster == "movie101_66.mp4"
    assert (needle.answer, needle.expected) == (None, "Catching a drone")
    assert (found["plotQA-2"].answer, found["anomaly_reco-0"].answer) == (0, 3)  # of two alike the first
    assert load("mlvu-test")[1].items[0].video_id == "MLVU_Test/video/test_surveil_27.mp4"


@pytest.mark.parametrize(
    ("write", "other", "said"),
    [
        (mlvu.write_mlvu_test, "mlvu-dev", r"no annotations of MLVU dev .*MLVU/MVLU"),
        (mlvu.write_mlvu_dev, "mlvu-test", r"no annotations of MLVU test .*MLVU/MLVU_Test"),
        (mlvu.write_repacked_test, "mlvu-dev", r"none of the 3 .*3 bad-row.*6 options, and every question of MLVU dev"),
    ],
)
def test_one_set_of_mlvu_is_never_taken_for_the_other(tmp_path, write, other, said):
    with pytest.raises(UsageError, match=said):
        BENCHMARKS[other].load(write(tmp_path))


def test_the_full_egoschema_has_no_answers_and_the_subset_is_the_questions_with_a_published_one(load, tmp_path):
    full, subset = load("egoschema")[1].items, load("egoschema-subset")[1].items
    assert [item.question_id for item in full] == list(UIDS[:-1])
    assert {(item.answer, item.expected) for item in full} == {(None, None)}
    assert [item.cluster for item in full] == ["ego4d-0", "ego4d-1", *["ego4d-2"] * 3]  # the video of the clip
    assert [item.question_id for item in subset] == list(egoschema.ANSWERS)
    lettered = tuple(f"{letter}. {text}" for letter, text in zip("ABCDE", egoschema.OPTIONS, strict=True))
    item = subset[0]
    assert (item.question, item.options) == (egoschema.question_of(UIDS[0]), lettered)
    assert (item.answer, item.expected, item.splits) == (3, "3", {})
    assert item.video_id == f"videos/{UIDS[0]}.MP4"
    unknown = BENCHMARKS["egoschema"].load(egoschema.write_hub(tmp_path)).items
    assert [item.cluster for item in unknown] == list(UIDS[:-1])


def test_without_the_published_answers_there_is_no_subset_of_egoschema(load, tmp_path):
    (tmp_path / "questions.json").write_text((load("egoschema")[0] / "questions.json").read_text())
    answers = tmp_path / "subset_answers.json"
    for name, why in (
        ("egoschema-subset", r"there is no question in it; .*subset_answers\.json of github\.com/egoschema"),
        ("egoschema", r"none of the 6 .*6 missing-video"),
        ("egoschema-subset", r"subset_answers\.json: cannot be read: it holds no JSON object"),
    ):
        with pytest.raises(UsageError, match=why):
            BENCHMARKS[name].load(tmp_path)
        answers.write_text("[1]") if name == "egoschema" else None


MVBENCH = BENCHMARKS["mvbench"]
STAR, TVQA = "video/star/Charades_v1_480/-B1CD.mp4", f"video/tvqa/frames_fps3_hq/{mvbench.FRAMES}"


def test_an_id_carries_the_folder_and_a_clips_bounds_and_clips_of_one_file_are_one_cluster(load):
    items = by_id(load("mvbench")[1])
    assert {name: item.video_id for name, item in items.items()} == {
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

    clusters = Counter(item.cluster for item in items.values())
    assert clusters["star/Charades_v1_480/-B1CD"] == 4 and clusters[f"tvqa/frames_fps3_hq/{mvbench.FRAMES}"] == 2
    assert clusters["clevrer/video_validation/video_1"] == 3 and clusters["perception/videos/video_1"] == 2
    assert items["action_prediction-1"].answer == 0  # of two options that are alike the first


def test_a_clip_has_the_published_frames_of_its_file_or_of_its_folder(load):
    """Of a folder from round(3 start), at least 1, to round(3 end), as jobs.prune is told to take them."""
    data, loaded = load("mvbench")
    items = by_id(loaded)
    for name, frames in (
        ("action_sequence-0", range(6, 36)),  # four a second
        ("action_sequence-1", range(8, 36)),
        ("episodic_reasoning-0", range(1, 13)),
        ("episodic_reasoning-1", range(12, 31)),
    ):
        (told,) = items[name].make_manifest_rows(data)
        clip = {bound: told.get(bound) for bound in ("start_s", "end_s")}
        decoded = decode_video(DecodeRequest(told["uri"], Sampling(len(frames)), KeepSize(), **clip))
        assert numbers(decoded.frames) == list(frames)
    assert items["action_sequence-0"].make_manifest_rows(Path("/d")) == [
        {"video_id": f"{STAR}#t=1.5,9", "uri": f"/d/{STAR}", "start_s": 1.5, "end_s": 9.0}
    ]


def test_results_of_both_layouts_never_share_a_place(load, tmp_path):
    """The questions have the same ids, and are about other videos."""
    given = {"benchmark": "mvbench", "out": str(tmp_path / "r"), "method": ["none"], "draws": 100}
    main, revision = (EvaluateConfig(data=str(load("mvbench", layout)[0]), **given) for layout in (0, 1))
    commit_replies(prepare(main, QUIET))
    with pytest.raises(QuestionsChanged, match="have changed"):
        evaluate(revision, QUIET)
    assert evaluate(main, QUIET).table.original.tally.n_failed == 0


def test_tasks_without_a_question_are_said(load):
    loaded = load("mvbench")[1]
    lines = list(describe_data(loaded, MVBENCH))
    assert lines[0] == "MVBench: 14 questions to ask; 17 annotated of 4,000 in the whole benchmark"
    assert lines[1].startswith("note: no question of fine_grained_action, unexpected_action, ")
    assert lines[1].endswith("the score is the mean over 7 of the 20, and not the published one")
    whole = replace(loaded, items=[replace(loaded.items[0], splits={"task": t}) for t in MVBENCH.splits[0].parts])
    assert "no question of" not in "".join(describe_data(whole, MVBENCH))


def faults_about(data, task):
    return [fault for fault in MVBENCH.load(data).faults if task in (fault.question_id or "")]


def test_a_folder_of_frames_without_frames_is_missing(tmp_path):
    mvbench.write_main(tmp_path)
    for path in (tmp_path / TVQA).iterdir():
        path.unlink()
    faults = faults_about(tmp_path, "episodic_reasoning")
    assert [fault.kind for fault in faults] == ["missing-video"] * 2
    assert f"the folder {TVQA!r} holds no frames (00001.jpg and so on)" in faults[0].message


def test_annotations_of_another_task_or_form_are_no_questions_and_bounds_are_seconds(tmp_path):
    file = mvbench.write_main(tmp_path) / "json" / "action_antonym.json"
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
