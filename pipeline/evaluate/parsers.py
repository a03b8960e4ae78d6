"""Rules that read from a model's reply which option it names, each with the results of the published code.

Each rule was tested against the code that it reproduces (github.com/EvolvingLMMs-Lab/lmms-eval, wheels 0.7.3 and 0.5.0,
``tasks/*/utils.py``):

| benchmark | lmms-eval-0.7.3 | lmms-eval-0.5 | official |
|---|---|---|---|
| VideoMME | extract-mcq-answer | videomme-0.5 | videomme-0.5 |
| MLVU | extract-mcq-answer | mlvu-0.5 | mlvu-official |
| LongVideoBench | longvideobench | longvideobench | - |
| MVBench | mvbench | mvbench | - |
| EgoSchema | egoschema | egoschema | - |

VideoMME's own script (BradyFU/Video-MME, ``evaluation/eval_your_results.py``) has the function of 0.5, but leaves
replies that name no letter out of its mean.

The options of a question either all carry their letters ("A. a dog") or none does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pipeline.generate.questions import list_letters, parse_letter


@dataclass(frozen=True)
class ParsedReply:
    """The option that a rule reads from a reply.

    Attributes:
        choice: the index of the named option; None if the reply names none of the question's options.
        drawn: True if the published code draws one of the question's options at random; ``choice`` is then None.
        in_word: True if a Latin letter or a digit stands next to the letter that was read: "Based on" is B.
    """

    choice: int | None
    drawn: bool = False
    in_word: bool = False

    def score(self, answer: int | None, n_options: int) -> float:
        """Return 1.0, 0.0, or 1/``n_options`` if the rule draws; 0.0 if ``answer`` is None (no option is right)."""
        if answer is None:
            return 0.0
        return 1 / n_options if self.drawn else float(self.choice == answer)


Rule = Callable[[str, Sequence[str]], ParsedReply]
_DRAWN = ParsedReply(None, drawn=True)


def parse_choice(rule: str, reply: str, options: Sequence[str]) -> ParsedReply:
    """Read which option ``reply`` names, by the rule with this name, a key of RULES.

    White space around the reply is removed first. A letter that the rule accepts but the question does not have ("E"
    for four options) gives no choice, and nothing is drawn.
    """
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r} for replies; the rules are {', '.join(sorted(RULES))}")
    return RULES[rule](reply.strip(), options)


# Words before the letter, in lower case, because the reply is searched in lower case.
_ANSWERS = ("answer", "correct answer", "best answer", "correct option", "best option", "choice", "correct choice")
_ENGLISH = [f"{article}{answer} is" for article, answer in product(("", "the "), _ANSWERS)]
_FIRST_PERSON = ["i choose", "i select", "i pick", "my answer is", "my choice is"]
_KOREAN = ["옵션", "정답은", "답은", "답:"]
_CHINESE = ["答案是", "答案为", "选"]
_JAPANESE = ["答えは"]
_INTRODUCTIONS = [*_ENGLISH, *_FIRST_PERSON, *_KOREAN, *_CHINESE, *_JAPANESE]


def _extract_mcq_answer(reply: str, options: Sequence[str]) -> ParsedReply:
    """Apply ``extract_mcq_answer`` of ``tasks/_task_utils/mcq_extract.py``, which VideoMME and MLVU call with A to D.

    The first of these steps that finds a capital A to D decides: a letter that begins the reply, with no letter after
    it; one that ends it, with no letter before it; one somewhere after words such as "the answer is"; "(B)"; "B.";
    "B:"; "B)"; "B "; any. Except in the first two steps, it may be part of a word. If a step finds several letters, the
    last one counts: "The answer is B because A shows a cat" is A; but after such words, each letter is found only where
    it first occurs. Punctuation at the ends is ignored.
    """
    letters = list_letters(4)
    text = _pad_marks(reply, ",.!?;:'\"")
    bare = text.strip()
    if bare[:1] in letters and not bare[1:2].isalpha():
        return _read_letter(bare, 0, options)
    if bare[-1:] in letters and not bare[-2:-1].isalpha():
        return _read_letter(bare, len(bare) - 1, options)
    lower_text = text.lower()
    behind = [lower_text.find(words) + len(words) for words in _INTRODUCTIONS if words in lower_text]
    positions = {text.find(letter, start) for letter in letters for start in behind} - {-1}
    if positions:
        return _read_letter(text, max(positions), options)
    for form in ("({})", "{}.", "{}:", "{})", "{} ", "{}"):
        last = max(text.rfind(form.format(letter)) for letter in letters)
        if last >= 0:
            return _read_letter(text, last + form.index("{"), options)
    return ParsedReply(None)


def _parse_videomme_05(reply: str, options: Sequence[str]) -> ParsedReply:
    """Take the first capital A to D, even inside a word: "Based on the video, C" is B, "Answer: B" is A.

    Because of a missing comma, the published code does not remove "Best answer:", so "Best answer: C" is B.
    """
    text = reply.replace("Best answer:Best option:", "")
    return _read_letter(text, _find_first(text, "ABCD"), options)


def _parse_mlvu_05(reply: str, options: Sequence[str]) -> ParsedReply:
    """Take the character before the first ")", or the whole reply without one: "B) a dog" is B, "B." is no option."""
    before, bracket, _ = reply.partition(")")
    return _read_letter(before, len(before) - 1, options) if bracket else _choose_option(reply, options)


def _parse_mlvu_official(reply: str, options: Sequence[str]) -> ParsedReply:
    """Take all text before the first ")", or the whole reply without one: "B) a dog" is B, "(B)" is no option.

    This is ``check_ans`` of JUNJIE99/MLVU, ``videochat2/choice_bench.py``.
    """
    return _choose_option(reply.partition(")")[0], options)


def _parse_longvideobench(reply: str, options: Sequence[str]) -> ParsedReply:
    """Take the first capital A to E, even inside a word; draw an option if there is no such letter.

    The phrases "Best answer:" and "Best option:" are removed first.
    """
    text = reply.replace("Best answer:", "").replace("Best option:", "")
    position = _find_first(text, "ABCDE")
    return _DRAWN if position < 0 else _read_letter(text, position, options)


_MARKS = ';/[]"{}()=+\\_-><@`,?!'


def _parse_mvbench(reply: str, options: Sequence[str]) -> ParsedReply:
    """Apply ``mcq_acc``: "B. a dog" in one line is B; otherwise the first separate a to e in any case, even "a"."""
    if match := re.fullmatch(r"([a-e])\.\s*.+", reply, re.IGNORECASE):
        return _choose_option(match[1].upper(), options)
    alone = re.search(r"\b[a-e]\b", _strip_punctuation(re.sub(r"[\n\t]", " ", reply)).lower())
    return _choose_option(alone[0].upper() if alone else "", options)


def _strip_punctuation(text: str) -> str:
    """Return the text without punctuation, by the steps of the published code.

    A mark of ``_MARKS`` is removed if any of its occurrences stands beside a space, or if the text has a comma between
    two digits; otherwise it becomes a space. Finally, the first 32 full stops that are not followed by a digit are
    removed.
    """
    thousands = re.search(r"\d,\d", text)
    result = text
    for mark in _MARKS:
        beside_space = f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if beside_space or thousands else " ")
    return re.sub(
        r"\.(?!\d)", "", result, count=32
    )  # the published code passes a flag, whose value is 32, as the count


def _parse_egoschema(reply: str, options: Sequence[str]) -> ParsedReply:
    """Apply MMMU's rule: "(B)", "B " or "B." anywhere in the reply, even at the end of "AND "; a reply "B" counts too.

    For each letter and each of the three forms, only the last occurrence counts; the earliest of these is read. Without
    any, a reply of more than five words is searched in the same way for the options' texts with their letters, in any
    case. If that fails too, as for "B) a dog", the result is ``_DRAWN``.
    """
    text = _pad_marks(reply, ",.!?;:'")
    names = [[f"({letter})", f"{letter} ", f"{letter}."] for letter in list_letters(len(options))]
    if positions := _find_last_positions(text, names):
        position, _ = min(positions)
        return _read_letter(text, position + (text[position] == "("), options)
    if len(text.split()) > 5:
        positions = _find_last_positions(text.lower(), [[option.lower()] for option in _add_option_letters(options)])
    return ParsedReply(min(positions)[1]) if positions else _DRAWN


def _find_last_positions(text: str, names: Iterable[Iterable[str]]) -> list[tuple[int, int]]:
    """Return (last position in the text, option index) for every name that occurs; ``names`` has several per option."""
    pairs = [(text.rfind(name), option) for option, its_names in enumerate(names) for name in its_names]
    return [(position, option) for position, option in pairs if position >= 0]


def _parse_unambiguous_letter(reply: str, options: Sequence[str]) -> ParsedReply:
    """Apply the rule of jobs.generate, which gives no choice rather than guess between several."""
    return ParsedReply(parse_letter(reply, options))


RULES: Mapping[str, Rule] = {
    "extract-mcq-answer": _extract_mcq_answer,
    "videomme-0.5": _parse_videomme_05,
    "mlvu-0.5": _parse_mlvu_05,
    "mlvu-official": _parse_mlvu_official,
    "longvideobench": _parse_longvideobench,
    "mvbench": _parse_mvbench,
    "egoschema": _parse_egoschema,
    "letter": _parse_unambiguous_letter,
}


def _choose_option(letter: str, options: Sequence[str]) -> ParsedReply:
    """Return the option with this letter; no choice for other text, "" and letters beyond the options."""
    letters = list_letters(len(options))
    return ParsedReply(letters.index(letter) if letter in letters else None)


# Letters of Latin scripts and digits. Chinese has no spaces: the letter of "选B" is not inside a word.
_WORD = re.compile(r"[0-9A-Za-z\u00c0-\u024f]")


def _read_letter(text: str, position: int, options: Sequence[str]) -> ParsedReply:
    """Return the option whose letter is at ``position``; -1 and a letter beyond the options give no choice."""
    parsed = _choose_option(text[position : position + 1], options)
    beside = text[max(position - 1, 0) : max(position, 0)] + text[position + 1 : position + 2]
    return replace(parsed, in_word=parsed.choice is not None and _WORD.search(beside) is not None)


def _find_first(text: str, letters: str) -> int:
    """Return the position of the first character of ``text`` that is in ``letters``, or -1."""
    return next((position for position, character in enumerate(text) if character in letters), -1)


def _pad_marks(text: str, marks: str) -> str:
    """Strip each of ``marks`` from both ends, one mark after another in their order, and add a space at both ends."""
    for mark in marks:
        text = text.strip(mark)
    return f" {text} "


def _add_option_letters(options: Sequence[str]) -> list[str]:
    """Return the stripped options with "A. ", "B. " and so on in front, unless all of them have their letters."""
    texts = [option.strip() for option in options]
    lettered = list(zip(list_letters(len(texts)), texts, strict=True))
    if all(text.startswith(f"{letter}.") for letter, text in lettered):
        return texts
    return [f"{letter}. {text}" for letter, text in lettered]
