"""Protocols: what a model is told and shown is what the published code tells and shows, character by character."""

import json

import numpy as np
import pytest

from gstep.families import FAMILIES
from pipeline.errors import UsageError
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.parsers import RULES
from pipeline.evaluate.protocols import LETTER, LMMS_EVAL_0_5, LMMS_EVAL_0_7, FrameRule, PromptTemplate
from pipeline.evaluate.request import get_frame_rule_name
from pipeline.video.sampling import Sampling, choose_frames

VIDEOMME = BENCHMARKS["videomme"]
ITEM = Item(
    question_id="007-2",
    video_ids=("data/-Ab3.mp4",),
    question="Which year is on the {map}?",
    options=("A. 1900.", "B. 1950 {0}.", "C. 1980.", "D. 2001."),
    answer=1,
    expected="B",
    cluster="-Ab3",
)
OPTIONS = "A. 1900.\nB. 1950 {0}.\nC. 1980.\nD. 2001.\n"
SELECT = "Select the best answer to the following multiple-choice question based on the video"
RESPOND = "Respond with only the letter (A, B, C, or D) of the correct option.\nWhich year is on the {map}?\n" + OPTIONS
DIRECTLY = "\nAnswer with the option's letter from the given choices directly."
DEFAULT = f"{SELECT} and the subtitles. {RESPOND}{DIRECTLY}"
QWEN3 = f"Question: Which year is on the {{map}}?\nOptions:\n{OPTIONS}Answer with the option letter only."
OFFICIAL = f"{SELECT}. {RESPOND}The best answer is:"


def test_videomme_is_asked_in_the_words_of_lmms_eval_and_of_its_authors():
    newer, older, official = map(VIDEOMME.protocol, ("lmms-eval-0.7.3", "lmms-eval-0.5", "official"))
    for kind in ("llava_onevision", "qwen2_5_vl", "another"):
        assert newer.text(ITEM, kind) == older.text(ITEM, kind) == DEFAULT
    assert (newer.text(ITEM, "qwen3_vl"), older.text(ITEM, "qwen3_vl")) == (QWEN3, DEFAULT)
    assert {official.text(ITEM, kind) for kind in FAMILIES} == {OFFICIAL}
    helpful = "You are a helpful assistant."
    systems = [newer.get_rules(kind).system for kind in ("llava_onevision", "qwen2_5_vl", "qwen3_vl")]
    assert systems == [helpful, None, helpful] and older.get_rules("qwen3_vl").system is None
    with pytest.raises(UsageError, match="--protocol paper: Shapes has letter"):
        BENCHMARKS["shapes"].protocol("paper")


@pytest.mark.parametrize(("n_frames", "taken"), [(1000, 32), (33, 32), (32, 32), (31, 30), (3, 2), (2, 2), (1, 2)])
def test_a_short_video_gives_an_even_number_of_frames_where_the_rule_says_so(n_frames, taken):
    rules = (FrameRule(32, "round", even=True), FrameRule(32))
    samplings = (Sampling(num_frames=rule.num_frames, rule=get_frame_rule_name(rule)) for rule in rules)
    assert [len(choose_frames(np.arange(n_frames, dtype=float), one)) for one in samplings] == [taken, 32]


@pytest.mark.parametrize(
    ("kind", "preprocessor", "patch", "size"),
    [
        ("qwen2_5_vl", "PerFramePreprocessor", 14, (560, 1008)),
        ("qwen3_vl", "PerVideoPreprocessor", 16, (640, 1152)),
    ],
)
def test_a_720p_video_has_as_many_tokens_as_in_lmms_eval(kind, preprocessor, patch, size):
    qwen = pytest.importorskip("gstep.backbones.preprocess")
    pixels = VIDEOMME.protocol().get_rules(kind).pixels
    settings = {
        **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": patch, "temporal_patch_size": 2},
        **{"merge_size": 2, "size": {"shortest_edge": pixels.min_pixels, "longest_edge": pixels.max_pixels}},
    }
    sizes = getattr(qwen, preprocessor).from_settings(settings)
    assert sizes.target_size(32, 720, 1280) == size
    assert 16 * (size[0] // sizes.factor) * (size[1] // sizes.factor) == 11_520


def test_every_protocol_names_a_rule_for_replies_that_there_is():
    protocols = [protocol for benchmark in BENCHMARKS.values() for protocol in benchmark.protocols]
    assert {protocol.parser for protocol in [*protocols, LETTER]} <= set(RULES)
    assert [one.parser for one in VIDEOMME.protocols] == ["extract-mcq-answer", "videomme-0.5", "videomme-0.5"]


@pytest.mark.parametrize(
    ("name", "n_questions", "metric"),
    [
        ("videomme", 2700, "questions"),
        ("longvideobench", 1337, "questions"),
        ("mlvu-dev", 2175, "task_type"),
        ("mlvu-test", 502, "task_type"),
        ("mvbench", 4000, "task"),
        ("egoschema-subset", 500, "questions"),
        ("egoschema", 5031, "questions"),
    ],
)
def test_every_published_benchmark_has_the_papers_questions_and_both_versions_of_lmms_eval(name, n_questions, metric):
    """Scores are means over questions or over tasks."""
    benchmark = BENCHMARKS[name]
    newer, older = (benchmark.protocol(version) for version in ("lmms-eval-0.7.3", "lmms-eval-0.5"))
    assert (newer.models, older.models) == (LMMS_EVAL_0_7, LMMS_EVAL_0_5) and benchmark.protocol() is newer
    assert {(one.decoding.temperature, one.choices) for one in (newer, older)} == {(0.0, "generate")}
    assert benchmark.n_questions == n_questions and {one.metric for one in benchmark.protocols} == {metric}
    assert [other for other, one in BENCHMARKS.items() if one.title == benchmark.title] == [name]


def test_a_protocol_describes_itself_for_the_identity_of_results():
    described = VIDEOMME.protocol().describe("qwen3_vl")
    assert json.loads(json.dumps(described)) == {
        "protocol": "lmms-eval-0.7.3",
        "prompt": {
            "template": "Question: {question}\nOptions:\n{options}\nAnswer with the option letter only.",
            "option": "{text}",
            "free": "{question}",
        },
        "system": "You are a helpful assistant.",
        "frames": {"num_frames": 32, "rounding": "round", "even": True},
        "pixels": {"min_pixels": 6_422_528, "max_pixels": 25_165_824},
        "frame_times": "stock",
        "max_new_tokens": 16,
        "temperature": 0.0,
        "parser": "extract-mcq-answer",
        "choices": "generate",
        "metric": "questions",
    }


def test_options_that_carry_their_letters_get_no_second_ones():
    template = PromptTemplate("{question}\n{options}", "({letter}) {text}")
    assert template.text("Which?", ["A. square", "B. star"]) == "Which?\n(A) square\n(B) star"
    assert template.text("Who?", ["A. Lincoln", "G. Bush"]) == "Who?\n(A) A. Lincoln\n(B) G. Bush"
    plain = PromptTemplate("{question}\n{options}")
    assert plain.text("Which?", ["A. square", "B. star"]) == "Which?\nA. square\nB. star"
