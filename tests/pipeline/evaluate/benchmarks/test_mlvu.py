"""MLVU as published: dev and test in the authors' layout and lmms-eval's, faults, words, and the mean of tasks."""

import pytest

from pipeline.errors import UsageError
from pipeline.evaluate.benchmarks import BENCHMARKS
from tests.pipeline.evaluate.layouts import by_id, faults_of, faulty, printed, replied
from tests.pipeline.evaluate.mlvu import (
    DEV,
    FOUR,
    SIX,
    TEST,
    write_mlvu_dev,
    write_mlvu_test,
    write_repacked_dev,
    write_repacked_test,
)

MLVU_DEV, MLVU_TEST = BENCHMARKS["mlvu-dev"], BENCHMARKS["mlvu-test"]
SUFFIX = "\nOnly give the best option.\nBest option: ("


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return MLVU_DEV.load(write_mlvu_dev(tmp_path_factory.mktemp("mlvu")))


@pytest.fixture(scope="module")
def repacked(tmp_path_factory):
    return MLVU_DEV.load(write_repacked_dev(tmp_path_factory.mktemp("repacked")))


@pytest.fixture(scope="module")
def test_set(tmp_path_factory):
    return MLVU_TEST.load(write_mlvu_test(tmp_path_factory.mktemp("test")))


def test_a_question_has_its_options_in_its_text(loaded):
    item = by_id(loaded)["plotQA-0"]
    assert item.question == "What colour?\n(A) Yellow\n(B) Red\n(C) Green\n(D) Blue\n"
    assert (item.options, item.answer, item.expected) == (tuple(FOUR), 0, "A")
    assert item.video_id == "video/1_plotQA/movie101_66.mp4" and item.splits == {"task_type": "plotQA"}


def test_a_video_in_two_tasks_is_one_cluster(loaded):
    found = by_id(loaded)
    plot, topic = found["plotQA-0"], found["topic_reasoning-0"]
    assert plot.video_id != topic.video_id == "video/7_topic_reasoning/movie101_66.mp4"
    assert plot.cluster == topic.cluster == "movie101_66.mp4"


def test_every_fault_is_counted_and_what_can_be_asked_is(loaded):
    assert loaded.n_annotated == sum(map(len, DEV.values()))  # open questions are no part of it
    assert faults_of(loaded) == {
        ("repeated-candidate", False): 2,
        ("blank-candidate", False): 1,
        ("repeated-question", False): 1,
        ("answer-no-candidate", False): 1,
        ("missing-video", True): 1,
        ("bad-row", True): 2,  # of a task that there is not, and of as many options as in the test set
    }
    for kind, names in (
        ("repeated-candidate", ["plotQA-2", "plotQA-3"]), ("blank-candidate", ["plotQA-3"]),
        ("answer-no-candidate", ["needle-0"]), ("repeated-question", ["ego-1"]),
    ):  # fmt: skip
        assert faulty(loaded, kind) == names
    found = by_id(loaded)
    assert found["needle-0"].answer is None and found["needle-0"].expected == "Catching a drone"
    assert found["plotQA-2"].answer == 0  # the first of the two
    assert found["anomaly_reco-0"].answer == 3


def test_both_layouts_ask_the_same(loaded, repacked):
    """Rows are numbered in their files, and videos lie elsewhere: nothing else differs."""

    def asked(one):
        return [(i.question, i.options, i.answer, i.expected, i.splits, i.cluster) for i in one.items]

    assert asked(repacked) == asked(loaded) and faults_of(repacked) == faults_of(loaded)
    assert {item.video_id for item in repacked.items} >= {"movie101_66.mp4", "-xiaoliyu_6.mp4"}
    assert len({item.question_id for item in repacked.items}) == len(repacked.items)  # all rows have the id Q0


def test_dev_is_asked_in_the_words_of_lmms_eval(loaded, repacked):
    for one in (loaded, repacked):
        item = one.items[0]
        for protocol in MLVU_DEV.protocols:
            assert protocol.text(item, "qwen2_5_vl") == (
                "What colour?\n(A) Yellow\n(B) Red\n(C) Green\n(D) Blue\n" + SUFFIX
            )
            assert (protocol.decoding.max_new_tokens, protocol.metric) == (16, "task_type")
    assert [protocol.parser for protocol in MLVU_DEV.protocols] == ["extract-mcq-answer", "mlvu-0.5"]


def test_test_is_asked_without_any_words_but_the_question(test_set):
    item = by_id(test_set)["anomaly_reco-0"]
    lines = "".join(f"({letter}) {text}\n" for letter, text in zip("ABCDEF", SIX, strict=True))
    assert MLVU_TEST.protocol().text(item, "llava_onevision") == "What colour?\n" + lines
    assert [len(one.options) for one in test_set.items] == [6] * len(TEST)
    assert item.video_id == "MLVU_Test/video/test_surveil_27.mp4" and not test_set.faults


def test_the_score_is_the_mean_over_the_tasks_not_over_the_questions(loaded):
    replies = {
        **{"plotQA-0": "(A) Yellow", "plotQA-1": "B", "plotQA-2": "D", "plotQA-3": "B. There is"},  # 3 of 4
        **{"needle-0": "A", "ego-0": "C", "ego-1": ""},  # 0 of 1, 1 of 2
        **{"count-0": "B)", "order-0": "b", "anomaly_reco-0": "A", "topic_reasoning-0": "C"},  # 1, 0, 0, 1
    }
    done = replied(MLVU_DEV, loaded, replies)
    assert printed(MLVU_DEV, done) == {
        "TR": "100.0", "AR": "0.0", "NQA": "0.0", "ER": "50.0", "PQA": "75.0", "AO": "0.0", "AC": "100.0",
        "Overall": "46.4",  # (1 + 0 + 0 + 1/2 + 3/4 + 0 + 1) / 7; of the 11 questions 6 are right, 54.5
    }  # fmt: skip
    by_id_row = {row["question_id"]: row for row in done.scores.to_pylist()}
    assert (by_id_row["ego-1"]["parsed"], by_id_row["ego-1"]["right"]) == (None, False)  # an empty reply


@pytest.mark.parametrize(
    ("write", "other", "said"),
    [
        (write_mlvu_test, MLVU_DEV, r"no annotations of MLVU dev .*MLVU/MVLU"),
        (write_mlvu_dev, MLVU_TEST, r"no annotations of MLVU test .*MLVU/MLVU_Test"),
        (write_repacked_test, MLVU_DEV, r"none of the 3 .*3 bad-row.*6 options, and every question of MLVU dev has 4"),
    ],
)
def test_one_set_is_never_taken_for_the_other(tmp_path, write, other, said):
    with pytest.raises(UsageError, match=said):
        other.load(write(tmp_path))
