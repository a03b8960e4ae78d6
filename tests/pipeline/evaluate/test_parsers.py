"""What a model is told and shown, character by character as published, and what each rule makes of messy replies."""

import json

import numpy as np
import pytest

from gstep.families import FAMILIES
from pipeline.errors import UsageError
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.parsers import RULES, ParsedReply, parse_choice
from pipeline.evaluate.protocols import LETTER, FrameRule, PromptTemplate
from pipeline.evaluate.request import get_frame_rule_name
from pipeline.video.sampling import Sampling, choose_frames

LETTERED = ["A. a cat", "B. a dog", "C. a bird", "D. a fish", "E. a horse"]
BARE = ["a cat", "a dog", "a bird", "a fish", "a horse"]
MESSY_RULES = ("extract-mcq-answer", "videomme-0.5", "mlvu-0.5", "longvideobench", "mvbench", "egoschema")

# A column a rule, in the order above. "-": names no option (wrong); "?": drawn at random; "~": inside a word.
MESSY_REPLIES = {
    "(B)": "B B B B B B",
    "b": "- - - ? B ?",
    "B.": "B B - B B B",
    "B. a dog": "B B - B B B",
    "B) a dog": "B B B B B ?",
    "**B**": "B B - B B ?",
    "Answer: B": "B A~ - A~ B B",
    "The correct answer is B because A shows a cat": "A B - B B B",
    "Based on the video, the answer is C.": "C B~ - B~ C C",
    "A dog runs": "A A - A A A",
    "a dog runs": "- - - ? A ?",
    "Because of the dog": "B~ B~ - B~ - ?",
    "I don't know": "- - - ? - ?",
    "": "- - - ? - ?",
    "E": "- - E E E E",
}


def expected(cell):
    in_word, letter = cell.endswith("~"), cell.removesuffix("~")
    return ParsedReply(None, drawn=cell == "?") if cell in "-?" else ParsedReply("ABCDE".index(letter), in_word=in_word)


@pytest.mark.parametrize("reply", MESSY_REPLIES)
def test_a_messy_reply_means_what_the_published_code_says(reply):
    for rule, cell in zip(MESSY_RULES, MESSY_REPLIES[reply].split(), strict=True):
        assert parse_choice(rule, reply, LETTERED) == parse_choice(rule, reply, BARE) == expected(cell), rule


@pytest.mark.parametrize(
    ("rule", "reply", "cell"),
    [
        # Its ranking: begins, ends, introduced, (X), X., X:, X), X and a space, anywhere; of a kind the last.
        ("extract-mcq-answer", "A. no, B. yes", "A"),
        ("extract-mcq-answer", "the answer is D, not B", "B"),
        ("extract-mcq-answer", "the answer is C or D, I believe", "D"),
        ("extract-mcq-answer", "first (C) then D. last", "C"),
        ("extract-mcq-answer", "first C: then D) last", "C"),
        ("extract-mcq-answer", "first C) then D last", "C"),
        ("extract-mcq-answer", "first D (A) then (C) last", "C"),
        ("extract-mcq-answer", "now AND then", "D~"),
        ("extract-mcq-answer", "选B项", "B"),  # no word: Chinese has no spaces
        ("extract-mcq-answer", "C²", "C"),
        ("extract-mcq-answer", "(A) 정답은 C 입니다", "C"),
        ("videomme-0.5", "The answer is D", "D"),
        ("videomme-0.5", "Best answer: C", "B~"),  # the phrase is glued to its neighbour and never removed
        ("videomme-0.5", "Best answer:Best option: C", "C"),
        ("mlvu-0.5", "The answer is B)", "B"),
        ("mlvu-0.5", "NASA) B", "A~"),
        ("mlvu-0.5", "B )", "-"),
        ("mlvu-official", "B", "B"),
        ("mlvu-official", "(B) a dog", "-"),  # the prompt opened the bracket already
        ("mlvu-official", "B.", "-"),
        ("longvideobench", "Best answer: C", "C"),
        ("longvideobench", "there is nothing in this video that would answer the question", "?"),
        ("mvbench", "b. a dog", "B"),
        ("mvbench", "B.dog\nand more", "-"),  # two lines are no "B. a dog", and the stop goes without a space
        ("mvbench", "x/b", "B"),
        ("mvbench", "x/b / c", "C"),  # a mark beside a space is removed everywhere
        ("mvbench", "x/b of 1,000", "-"),  # and so are all beside a number with a comma
        ("mvbench", "It is a dog, so B", "A"),
        ("mvbench", "." * 32 + "x.B", "B"),
        ("mvbench", "." * 31 + "x.B", "-"),
        ("egoschema", "It's D, A and B shown", "A"),  # "D," is none of its forms
        ("egoschema", "A is B or A here", "B"),  # the last A comes after the last B
        ("egoschema", "(B)ut", "B"),
        ("egoschema", "it is b. a dog", "?"),  # five words
        ("egoschema", "here it is b. a dog", "B"),
        ("egoschema", "here it is just a dog", "?"),  # the option's text counts with its letter alone
        ("egoschema", "here i see d. a fish and then b. a dog", "D"),
        ("letter", "the answer is b", "B"),
        ("letter", "A dog runs", "-"),
        ("letter", "B or C", "-"),
    ],
)
def test_a_corner_of_a_rule(rule, reply, cell):
    assert parse_choice(rule, reply, LETTERED) == parse_choice(rule, reply, BARE) == expected(cell)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_white_space_around_a_reply_is_nothing_and_a_letter_beyond_the_options_no_choice(rule):
    """Which egoschema alone draws for."""
    assert parse_choice(rule, " \nB\n\n", BARE) == ParsedReply(1)
    beyond = [("F", BARE)] if rule == "egoschema" else [("E", BARE[:4]), ("C", BARE[:2])]
    for reply, options in beyond:
        assert parse_choice(rule, reply, options) == ParsedReply(None, drawn=rule == "egoschema")


def test_e_and_f_of_six_options_are_never_named_by_the_newer_rule_of_mlvu():
    six, replies = [*BARE, "a cow"], ("E", "F) a cow", "D")
    for rule, choices in (("extract-mcq-answer", [None, None, 3]), ("mlvu-0.5", [4, 5, 3])):
        assert [parse_choice(rule, reply, six).choice for reply in replies] == choices


def test_an_option_that_begins_like_a_lettered_one_keeps_its_text():
    options = ["A. Lincoln", "G. Washington"]
    assert parse_choice("letter", "A. Lincoln", options) == ParsedReply(0)
    assert parse_choice("letter", "G. Washington", options) == ParsedReply(1)
    assert parse_choice("egoschema", "it is just b. g. washington", options) == ParsedReply(1)


def test_only_the_right_option_scores_one_and_a_drawn_one_its_expectation():
    assert [ParsedReply(1).score(answer, 4) for answer in (0, 1, 2, None)] == [0.0, 1.0, 0.0, 0.0]
    assert [ParsedReply(None).score(answer, 4) for answer in (0, None)] == [0.0, 0.0]
    for n_options in (1, 3, 4):
        drawn = parse_choice("longvideobench", "", BARE[:n_options])
        assert (drawn.score(0, n_options), drawn.score(None, n_options)) == (1 / n_options, 0.0)


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown rule 'mlvu'.*extract-mcq-answer.*mlvu-0\.5.*videomme-0\.5"):
        parse_choice("mlvu", "B", BARE)


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
