"""Questions with choices: how they are put, and which choice an answer means."""

import pytest

from pipeline.generate.choices import lettered_prompt, parse_letter


def test_letters_are_put_as_lmms_eval_puts_them():
    assert lettered_prompt("Which?", ["a dog", "a cat"]) == (
        "Which?\nA. a dog\nB. a cat\nAnswer with the option's letter from the given choices directly."
    )


@pytest.mark.parametrize(
    ("answer", "choice"),
    [
        ("B", 1),
        (" (B)", 1),
        ("B. a cat", 1),
        ("**B**", 1),
        ("B\nbecause", 1),
        ("The answer is C.", 2),
        ("the correct option is: (C)", 2),
        ("a cat", 1),
        ("A Cat.", 1),
        ("A cow.", 2),
        ("a cow", 2),
        ("I think B fits", 1),
        ("A man walks", None),  # an article
        ("I do not know", None),
        ("The answer is a car", None),
        ("the answer is b", 1),
        ("Answer: (c).", 2),
        ("E", None),  # no such choice
        ("B or C", None),
        ("", None),
    ],
)
def test_the_letter_of_a_generated_answer(answer, choice):
    assert parse_letter(answer, ["a dog", "a cat", "a cow."]) == choice


def test_the_word_i_is_no_letter_among_many_choices():
    assert parse_letter("Well, I do not know", [f"choice {i}" for i in range(9)]) is None
