"""LongVideoBench as published: both files of its annotations, its faults, its words and its score."""

import json

import pytest

from pipeline.errors import UsageError
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.benchmarks.annotations import AnnotationRow
from tests.builders.manifests import read_manifest
from tests.pipeline.evaluate.layouts import by_id, faults_of, faulty, printed, replied
from tests.pipeline.evaluate.longvideobench import ASKED, FIVE, PATHS, ROWS, write_longvideobench

LVB = BENCHMARKS["longvideobench"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_longvideobench(tmp_path_factory.mktemp("lvb"))


@pytest.fixture(scope="module")
def loaded(data):
    return LVB.load(data)


def test_a_question_is_what_its_row_says(loaded):
    item = by_id(loaded)["-Ab0xYz_9Qk_0"]
    assert item.video_ids == ("videos/-Ab0xYz_9Qk.mp4",) and item.path == item.video_id
    assert (item.options, item.answer, item.expected) == (FIVE, 2, "2")
    assert (item.start_s, item.end_s) == (None, None)  # the timestamp is of the subtitles
    assert item.cluster == "-Ab0xYz_9Qk.mp4"
    assert item.splits == {
        "duration_group": "15", "question_category": "S2O", "topic_category": "LC-Lifestyle-Cooking-Recipes"
    }  # fmt: skip


def test_videos_are_found_by_their_path_not_by_their_id(loaded, data):
    assert by_id(loaded)["@cook-712_0"].video_id == "videos/712.mp4"
    assert sorted({item.video_id for item in loaded.items}) == sorted(read_manifest(str(data))["video_id"].to_pylist())
    assert {item.video_id for item in loaded.items} == {f"videos/{path}" for path in PATHS.values()}


def test_options_that_are_not_there_are_none(loaded):
    assert {name: len(item.options) for name, item in by_id(loaded).items()} == dict(
        zip(ASKED, (5, 4, 3, 4, 5, 5), strict=True)
    )
    between = LVB.adapt(
        {f"option{i}": text for i, text in enumerate(["a", "N/A", "c", "N/A", "N/A"])}, AnnotationRow("", "", 0, {})
    )
    assert between["candidates"] == ["a", "N/A", "c"]  # else the answer would be another one


def test_every_fault_is_counted_and_what_can_be_asked_is(loaded):
    assert [item.question_id for item in loaded.items] == ASKED and loaded.n_annotated == len(ROWS)
    assert faults_of(loaded) == {
        ("repeated-candidate", False): 1,
        ("answer-no-candidate", False): 1,
        ("repeated-question", False): 1,
        ("missing-video", True): 1,
        ("bad-row", True): 2,
        ("policy", True): 1,
        ("no-answer", True): 1,
    }
    assert faulty(loaded, "repeated-candidate") == ["@cook-712_1"] and faulty(loaded, "missing-video") == ["gone_0"]
    assert faulty(loaded, "bad-row") == ["86CxyhFV9MI_2", "86CxyhFV9MI_4"]
    assert by_id(loaded)["86CxyhFV9MI_0"].answer is None


def test_a_file_whose_answers_have_another_form_is_refused(tmp_path):
    """Letters where indices are asked, or the file of the test set, whose answers are not published."""
    folder = write_longvideobench(tmp_path / "letters", json=True)
    file = folder / "lvb_val.json"
    rows = json.loads(file.read_text())
    file.write_text(json.dumps([{**one, "correct_choice": "ABCDE"[one["correct_choice"] % 5]} for one in rows]))
    with pytest.raises(
        UsageError, match=r"the right answers of 7 of 7 questions are none of their options, e\.g\. 'C' of"
    ):
        LVB.load(folder)
    file.write_text(json.dumps([{**one, "correct_choice": -1} for one in rows]))
    with pytest.raises(UsageError, match=r"none of the 11 questions can be asked .*no-answer"):
        LVB.load(folder)


def test_both_files_hold_the_same_questions(loaded, tmp_path):
    other = LVB.load(write_longvideobench(tmp_path, json=True))
    assert other.items == loaded.items
    assert [(f.kind, f.question_id, f.left_out) for f in other.faults] == [
        (f.kind, f.question_id, f.left_out) for f in loaded.faults
    ]


def test_it_is_asked_in_the_words_of_lmms_eval(loaded):
    item = by_id(loaded)["@cook-712_0"]
    for protocol in LVB.protocols:
        assert protocol.text(item, "llava_onevision") == (
            "What is on the table in @cook-712_0?\nA. a cup\nB. a pan\nC. a knife\n"
            "Answer with the option's letter from the given choices directly.\n"
        )
        assert (protocol.decoding.max_new_tokens, protocol.parser, protocol.metric) == (
            32,
            "longvideobench",
            "questions",
        )


def test_the_score_is_over_questions_and_a_draw_scores_its_expectation(loaded):
    replies = dict(zip(ASKED, ["C", "Answer: D", "", "B) a pan", "E", "(E)"], strict=True))
    done = replied(LVB, loaded, replies)
    assert done.scores["score"].to_pylist() == [1.0, 0.0, 1 / 3, 1.0, 0.0, 1.0]  # "Answer: D" is A; 9 is never met
    assert done.scores["parsed"].to_pylist() == [2, 0, None, 1, 4, 4]
    assert printed(LVB, done) == {"8-15 s": "50.0", "15-60 s": "66.7", "3-10 min": "50.0", "Overall": "55.6"}
