"""EgoSchema as published: a scored subset and a full set without answers, which are two benchmarks."""

import json

import pytest

from pipeline.errors import UsageError
from pipeline.evaluate.benchmarks import BENCHMARKS
from tests.pipeline.evaluate.egoschema import (
    ANSWERS,
    GONE,
    OPTIONS,
    UIDS,
    question_of,
    write_authors,
    write_ego4d,
    write_hub,
)
from tests.pipeline.evaluate.layouts import faults_of, faulty, printed, replied

FULL, SUBSET = BENCHMARKS["egoschema"], BENCHMARKS["egoschema-subset"]
LETTERED = tuple(f"{letter}. {text}" for letter, text in zip("ABCDE", OPTIONS, strict=True))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return write_hub(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def authors(tmp_path_factory):
    return write_authors(tmp_path_factory.mktemp("authors"))


@pytest.fixture(scope="module", params=["hub", "authors"])
def folder(request):
    return request.getfixturevalue(request.param)


def test_the_full_set_has_no_answers_and_that_is_no_fault(folder):
    loaded = FULL.load(folder)
    assert [item.question_id for item in loaded.items] == [uid for uid in UIDS if uid != GONE]
    assert {(item.answer, item.expected) for item in loaded.items} == {(None, None)}
    assert faults_of(loaded) == {("missing-video", True): 1, ("repeated-candidate", False): 1}
    assert faulty(loaded, "missing-video") == [GONE]


def test_the_subset_is_the_questions_with_a_published_answer(folder):
    loaded = SUBSET.load(folder)
    assert [item.question_id for item in loaded.items] == list(ANSWERS) and loaded.n_annotated == len(ANSWERS)
    assert faults_of(loaded) == {("repeated-candidate", False): 1, ("answer-no-candidate", False): 1}
    assert faulty(loaded, "answer-no-candidate") == [UIDS[3]]
    item = loaded.items[0]
    assert (item.question, item.options) == (question_of(UIDS[0]), LETTERED)
    assert (item.answer, item.expected) == (3, "3")
    assert item.video_id == f"videos/{UIDS[0]}.MP4" and item.splits == {}


def test_clips_of_one_video_of_ego4d_are_one_cluster_where_it_is_known(hub, authors, tmp_path):
    known = [item.cluster for item in FULL.load(authors).items]
    assert known == ["ego4d-0", "ego4d-1", "ego4d-2", "ego4d-2", "ego4d-2"]
    assert [item.cluster for item in FULL.load(hub).items] == list(UIDS[:-1])
    write_hub(tmp_path / "d")
    write_ego4d(tmp_path / "d")
    assert [item.cluster for item in FULL.load(tmp_path / "d").items] == known


def test_it_is_asked_in_the_words_of_lmms_eval(folder):
    item = FULL.load(folder).items[0]
    for protocol in (*FULL.protocols, *SUBSET.protocols):
        assert protocol.text(item, "llava_onevision") == (
            f"{question_of(UIDS[0])}\n"
            "A. C cooks.\nB. C cleans. It shines.\nC. C reads.\nD. C paints.\nE. C sleeps.\n"
            "Answer with the option's letter from the given choices directly."
        )
        assert (protocol.parser, protocol.metric) == ("egoschema", "questions")
    assert [protocol.decoding.max_new_tokens for protocol in SUBSET.protocols] == [16, 1024]


def test_the_subset_has_a_score_in_which_a_draw_is_its_expectation(hub):
    loaded = SUBSET.load(hub)
    done = replied(SUBSET, loaded, dict(zip(ANSWERS, ("(D) C paints.", "", "A"), strict=True)))
    assert done.scores["score"].to_pylist() == [1.0, 1 / 5, 0.0]  # no option is right of the third
    assert printed(SUBSET, done) == {"EgoSchema subset": "40.0"}


def test_without_the_published_answers_there_is_no_subset(authors, tmp_path):
    (tmp_path / "questions.json").write_text((authors / "questions.json").read_text())
    with pytest.raises(
        UsageError, match=r"there is no question in it; .*subset_answers\.json of github\.com/egoschema"
    ):
        SUBSET.load(tmp_path)
    with pytest.raises(UsageError, match=r"none of the 6 .*6 missing-video"):
        FULL.load(tmp_path)
    (tmp_path / "subset_answers.json").write_text(json.dumps([1]))
    with pytest.raises(UsageError, match=r"subset_answers\.json: cannot be read: it holds no JSON object"):
        SUBSET.load(tmp_path)
