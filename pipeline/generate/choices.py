"""Questions with choices: how they are put to the model, and which choice an answer means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

MAX_LETTERS = len(ascii_uppercase)
# The words that lmms-eval's multiple-choice tasks (MMMU, VideoMME, MLVU) end their prompts with.
INSTRUCTION = "Answer with the option's letter from the given choices directly."
# A small letter counts where nothing follows: "the answer is a cat" names no letter.
_SENTENCE = re.compile(r"\b(?i:answer|option|choice)\b(?:\s+(?i:is))?\s*:?\s*\(?\*{0,2}([A-Z]\b|[a-z](?=[)*.]*\s*$))")
_ENGLISH = frozenset("AI")  # letters that are words too


def lettered_prompt(prompt: str, choices: Sequence[str]) -> str:
    """Return the prompt with its choices as "A. ..." lines and the instruction to answer with a letter."""
    options = "".join(f"{letter}. {text}\n" for letter, text in zip(ascii_uppercase, choices, strict=False))
    return f"{prompt}\n{options}{INSTRUCTION}"


def letters(count: int) -> list[str]:
    """Return the first ``count`` capital letters, which name choices."""
    return list(ascii_uppercase[:count])


def parse_letter(answer: str, choices: Sequence[str]) -> int | None:
    """Return the index of the choice that a generated answer names; None where it names none, or several.

    In this order: a letter that the answer begins with ("B", "(B)", "B. a dog"), one that it calls the answer ("the
    answer is B"), the text of a choice, a letter that stands alone anywhere ("A" and "I" are words too and do not
    count there).
    """
    text = answer.strip().strip("*").strip()
    known = letters(len(choices))
    begins = re.match(r"\(?([A-Z])(?:\)|[.:,]|\*|\s*$|\n)", text)
    if begins and begins[1] in known:
        return known.index(begins[1])
    named = {found.upper() for found in _SENTENCE.findall(text)} & set(known)
    if len(named) == 1:
        return known.index(named.pop())
    same = [i for i, choice in enumerate(choices) if _bare(choice) == _bare(text)]
    if len(same) == 1:
        return same[0]
    alone = (set(re.findall(r"\b([A-Z])\b", text)) - _ENGLISH) & set(known)
    return known.index(alone.pop()) if len(alone) == 1 else None


def _bare(text: str) -> str:
    """Return a text without surrounding space and final dots, in lower case."""
    return text.strip().rstrip(".").casefold()
