"""What each rule makes of messy replies; what is expected of published rules comes from running their code."""

import pytest

from pipeline.evaluate.parsers import RULES, ParsedReply, parse_choice

LETTERED = ["A. a cat", "B. a dog", "C. a bird", "D. a fish", "E. a horse"]
BARE = ["a cat", "a dog", "a bird", "a fish", "a horse"]
MESSY_RULES = ("extract-mcq-answer", "videomme-0.5", "mlvu-0.5", "longvideobench", "mvbench", "egoschema")

# A column a rule, in the order above. "-": names no option (wrong); "?": drawn at random; "~": inside a word.
MESSY_REPLIES = {
    "B": "B B B B B B",
    "(B)": "B B B B B B",
    "(B) a dog": "B B B B B B",
    "b": "- - - ? B ?",
    "B.": "B B - B B B",
    "B. a dog": "B B - B B B",
    "B)": "B B B B B ?",
    "B) a dog": "B B B B B ?",
    "B: a dog": "B B - B B ?",
    "**B**": "B B - B B ?",
    "Answer: B": "B A~ - A~ B B",
    "The correct answer is B because A shows a cat": "A B - B B B",
    "Based on the video, the answer is C.": "C B~ - B~ C C",
    "A dog runs": "A A - A A A",
    "a dog runs": "- - - ? A ?",
    "Because of the dog": "B~ B~ - B~ - ?",
    "Both": "B~ B~ - B~ - ?",
    "I don't know": "- - - ? - ?",
    "": "- - - ? - ?",
    "E": "- - E E E E",
}


def expected(cell):
    in_word, letter = cell.endswith("~"), cell.removesuffix("~")
    return ParsedReply(None, drawn=cell == "?") if cell in "-?" else ParsedReply("ABCDE".index(letter), in_word=in_word)


@pytest.mark.parametrize("options", [LETTERED, BARE], ids=["lettered", "bare"])
@pytest.mark.parametrize(
    ("reply", "rule", "cell"),
    [
        (reply, rule, cell)
        for reply, row in MESSY_REPLIES.items()
        for rule, cell in zip(MESSY_RULES, row.split(), strict=True)
    ],
)
def test_a_messy_reply_means_what_the_published_code_says(rule, reply, cell, options):
    assert parse_choice(rule, reply, options) == expected(cell)


@pytest.mark.parametrize(
    ("rule", "reply", "cell"),
    [
        # Its ranking: begins, ends, introduced, (X), X., X:, X), X and a space, anywhere; of a kind the last.
        ("extract-mcq-answer", "A. no, B. yes", "A"),
        ("extract-mcq-answer", "the answer is D, not B", "B"),
        ("extract-mcq-answer", "the answer is C or D, I believe", "D"),
        ("extract-mcq-answer", "first (C) then D. last", "C"),
        ("extract-mcq-answer", "first C. then D: last", "C"),
        ("extract-mcq-answer", "first C: then D) last", "C"),
        ("extract-mcq-answer", "first C) then D last", "C"),
        ("extract-mcq-answer", "first D (A) then (C) last", "C"),
        ("extract-mcq-answer", "now AND then", "D~"),
        ("extract-mcq-answer", "My answer is Carrots", "C~"),
        ("extract-mcq-answer", "a film in 3D", "D~"),
        ("extract-mcq-answer", "Seen in the USA.", "A~"),
        ("extract-mcq-answer", "选B项", "B"),  # no word: Chinese has no spaces
        ("extract-mcq-answer", "'B.'", "B"),
        ("extract-mcq-answer", "C²", "C"),
        ("extract-mcq-answer", "(A) 정답은 C 입니다", "C"),
        ("extract-mcq-answer", "...", "-"),
        ("videomme-0.5", "The answer is D", "D"),
        ("videomme-0.5", "Best answer: C", "B~"),  # the phrase is glued to its neighbour and never removed
        ("videomme-0.5", "Best answer:Best option: C", "C"),
        ("mlvu-0.5", "The answer is B)", "B"),
        ("mlvu-0.5", "(A) or (B)", "A"),
        ("mlvu-0.5", "NASA) B", "A~"),
        ("mlvu-0.5", "B )", "-"),
        ("mlvu-0.5", ") B", "-"),
        ("mlvu-official", "B", "B"),
        ("mlvu-official", "B) a dog", "B"),
        ("mlvu-official", "(B) a dog", "-"),  # the prompt opened the bracket already
        ("mlvu-official", "B.", "-"),
        ("mlvu-official", "", "-"),
        ("longvideobench", "Best answer: C", "C"),
        ("longvideobench", "Best option: (D)", "D"),
        ("longvideobench", "D. A book", "D"),
        ("longvideobench", "there is nothing in this video that would answer the question", "?"),
        ("mvbench", "b. a dog", "B"),
        ("mvbench", "B.dog", "B"),
        ("mvbench", "B.dog\nand more", "-"),  # two lines are no "B. a dog", and the stop goes without a space
        ("mvbench", "B.\na dog", "B"),
        ("mvbench", "x/b", "B"),
        ("mvbench", "x/b / c", "C"),  # a mark beside a space is removed everywhere
        ("mvbench", "x/b of 1,000", "-"),  # and so are all beside a number with a comma
        ("mvbench", "It is a dog, so B", "A"),
        ("mvbench", "." * 32 + "x.B", "B"),
        ("mvbench", "." * 31 + "x.B", "-"),
        ("egoschema", "It's D, A and B shown", "A"),  # "D," is none of its forms
        ("egoschema", "B is seen, then A, then B again", "B"),
        ("egoschema", "A is B or A here", "B"),  # the last A comes after the last B
        ("egoschema", "now AND then", "D~"),
        ("egoschema", "(B)ut", "B"),
        ("egoschema", "it is b. a dog", "?"),  # five words
        ("egoschema", "here it is b. a dog", "B"),
        ("egoschema", "here it is just a dog", "?"),  # the option's text counts with its letter alone
        ("egoschema", "here i see d. a fish and then b. a dog", "D"),
        ("letter", "the answer is b", "B"),
        ("letter", "A dog runs", "-"),
        ("letter", "a dog", "B"),
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
