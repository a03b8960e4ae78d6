"""Every word that a question or its choices can hold."""

from __future__ import annotations

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "moon")
COLORS = ("red", "green", "blue", "yellow", "purple", "cyan", "orange", "white")
SCENES = ("stripes", "checker", "dots", "bricks", "waves", "plain")
CORNERS = ("top-left", "top-right", "bottom-left", "bottom-right")
QUARTERS = ("first", "second", "third", "fourth")
NUMBERS = ("one", "two", "three", "four")
#: The words of signs, whose letters can be told apart in 3 x 5 pixels.
SIGNS = ("HI", "UP", "AT", "IF", "OX", "HE", "TO", "LO")
_ASKING = (
    *("?", "What", "Which", "How", "many", "color", "shape", "corner", "corners", "scene", "quarter", "sign", "word"),
    *("is", "has", "have", "introduces", "appears", "colored", "on", "of", "the", "these", "earlier", "later"),
)
#: For a tokenizer that has a token a word: all words of questions (a question mark is one) and of choices, no letters
#: of choices and nothing of a chat template. In a fixed order; new words are added at its end.
VOCABULARY = (*_ASKING, *SHAPES, *COLORS, *SCENES, *CORNERS, *QUARTERS, *NUMBERS, *SIGNS)


def words_of(text: str) -> list[str]:
    """Split a question or choice into its words, which are all in VOCABULARY."""
    return text.replace("?", " ?").split()
