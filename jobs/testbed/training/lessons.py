"""What the language half is taught: questions as token ids, and what it should say at which of them.

Only the letter at the end is ever asked of the finished model. The other answers tell each step of the way what it is
for: the plain answer at the word that names the thing, and at each choice its letter or "no" - or, where it is asked
what came first, the frame in which that thing came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jobs.testbed.training.space import GRID, ID, LETTERS, NO, TIMES
from pipeline.evaluate.shapes.evidence import Evidence, Part, parts_kept
from pipeline.evaluate.shapes.questions import Question
from pipeline.evaluate.shapes.words import CORNERS, NUMBERS, QUARTERS, words_of
from pipeline.evaluate.shapes.world import corner_of
from pipeline.generate.choices import INSTRUCTION

#: For a place where nothing is asked, as cross_entropy has it.
SILENT = -100
_FIRST = ("order", "onset")
_NOWHERE = (*_FIRST, "sign")  # about several things, or with a subject that the video does not show
#: Whose answers follow from the first frame of what is asked about.
TIMED = ("quarter", "change")
_ECHOES = (
    ("Which quarter introduces the {}?", QUARTERS),
    ("How many corners have the {}?", NUMBERS),
    ("Which corner has the {}?", CORNERS),
)
_END = (ID[INSTRUCTION], ID["<|im_end|>"], ID["<|assistant|>"])


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A question and what is to be said at its tokens.

    Attributes:
        type: of the question, or "echo".
        ids: from its first word to the right letter.
        answer: index of the right choice.
        subject: index of the token that names the thing; -1: none does.
        plain: id of the right answer's word, or SILENT.
        early: ids of what can be said at the subject half-way, four or SILENT: the answer where it can be looked up,
            else what it follows from - a frame, or the corners to be counted.
        where: the corners that the thing is seen in, a yes or no each, as far as the answer shows it; empty where it is
            not asked.
        options: indices of the choices' tokens.
        hints: an id a choice.
    """

    type: str
    ids: list[int]
    answer: int
    subject: int
    plain: int
    early: list[int]
    where: list[bool]
    options: list[int]
    hints: list[int]


def lesson_of(question: Question, kept: NDArray[np.bool_] | None = None) -> Lesson | None:
    """The lesson of a question; None where the kept tokens do not show the answer.

    Args:
        kept: [T,GRID,GRID] the tokens that are kept and show a thing; None: all are.
    """
    evidence = question.evidence
    if kept is None:
        kept = np.ones((evidence.n_frames, GRID, GRID), bool)
    if not all(parts_kept(evidence, kept)):
        return None
    words = words_of(question.prompt)
    subject = len(words) - 1 - words[::-1].index(question.subject) if question.subject else -1
    hints = _times(question, evidence) if question.type in _FIRST else _letters(question.answer)
    lesson = _lesson(question.type, words, question.choices, question.answer, subject, hints)
    if question.type in _NOWHERE:
        return lesson
    seen = {corner_of(box) for part in evidence.parts for box in part.boxes}
    lesson = replace(lesson, where=[corner in seen for corner in range(len(CORNERS))])
    grounds = _grounds(question, evidence)
    return replace(lesson, early=_padded(grounds)) if grounds else lesson


def echo(rng: np.random.Generator) -> Lesson:
    """A question that names its own answer, to learn the way from an answer to its letter.

    Answers that are no part of a visual token are learnt slowly without.
    """
    prompt, words = _ECHOES[int(rng.integers(len(_ECHOES)))]
    choices = [words[i] for i in rng.permutation(4)]
    answer = int(rng.integers(4))
    asked = words_of(prompt.format(choices[answer]))
    return _lesson("echo", asked, choices, answer, asked.index(choices[answer]), _letters(answer))


def _lesson(
    name: str, words: Sequence[str], choices: Sequence[str], answer: int, subject: int, hints: list[int]
) -> Lesson:
    ids = [ID[word] for word in words]
    options = []
    for letter, choice in zip(LETTERS, choices, strict=True):
        ids += [ID[letter], ID[choice]]
        options.append(len(ids) - 1)
    plain = SILENT if name in _FIRST else ID[choices[answer]]
    ids += [*_END, ID[LETTERS[answer]]]
    return Lesson(
        type=name,
        ids=ids,
        answer=answer,
        subject=subject,
        plain=plain,
        early=_padded([plain]),
        where=[],
        options=options,
        hints=hints,
    )


def _letters(answer: int) -> list[int]:
    return [ID[letter] if i == answer else ID[NO] for i, letter in enumerate(LETTERS)]


def _times(question: Question, evidence: Evidence) -> list[int]:
    onsets = {part.name: _first(part) for part in evidence.parts}
    return [ID[TIMES[onsets[choice]]] for choice in question.choices]


def _grounds(question: Question, evidence: Evidence) -> list[int]:
    """What an answer follows from that is not looked up itself."""
    if question.type in TIMED:
        return [ID[TIMES[_first(evidence.parts[0])]]]
    if question.type == "count":
        return [ID[CORNERS[corner_of(part.boxes[0])]] for part in evidence.parts]
    return []


def _padded(ids: list[int]) -> list[int]:
    return ids + [SILENT] * (4 - len(ids))


def _first(part: Part) -> int:
    return part.boxes[0].frame


class Asked:
    """The lessons of a step as tensors, [B,K,...]; shorter questions are padded behind, where nobody looks.

    Attributes:
        ids: [B,K,L].
        letter: [B,K] id of the right letter.
        plain: [B,K], SILENT where there is none.
        early: [B,K,4], likewise.
        where: [B,K,4] 0 or 1.
        placed: [B,K] whether ``where`` is asked.
        timed: [B,K] whether ``early`` is a frame.
        counted: [B,K] whether it is corners.
        subject: [B,K]; 0 where there is none.
        options, hints: [B,K,4].
        last: [B,K] index of the token at which the letter is said.
    """

    def __init__(self, lessons: Sequence[Sequence[Lesson]]) -> None:
        self.lessons = lessons
        length = max(len(one.ids) for row in lessons for one in row)
        pad = ID["<|endoftext|>"]
        self.ids = _tensor([[one.ids + [pad] * (length - len(one.ids)) for one in row] for row in lessons])
        self.letter = _tensor([[ID[LETTERS[one.answer]] for one in row] for row in lessons])
        self.plain = _tensor([[one.plain for one in row] for row in lessons])
        self.early = _tensor([[one.early for one in row] for row in lessons])
        self.where = torch.tensor([[one.where or [False] * 4 for one in row] for row in lessons]).float()
        self.placed = torch.tensor([[bool(one.where) for one in row] for row in lessons])
        self.counted = torch.tensor([[one.type == "count" for one in row] for row in lessons])
        self.timed = torch.tensor([[one.type in TIMED for one in row] for row in lessons])
        self.subject = _tensor([[max(0, one.subject) for one in row] for row in lessons])
        self.options = _tensor([[one.options for one in row] for row in lessons])
        self.hints = _tensor([[one.hints for one in row] for row in lessons])
        self.last = _tensor([[len(one.ids) - 2 for one in row] for row in lessons])

    @property
    def ordered(self) -> Tensor:
        """[B,K] whether it is asked what came first."""
        return torch.tensor([[one.type in _FIRST for one in row] for row in self.lessons])


def _tensor(rows: Sequence[Sequence[object]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.long)
