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
from pipeline.evaluate.shapes.world import SIDE, Box, corner_of
from pipeline.generate.choices import INSTRUCTION

#: For a place where nothing is asked, as cross_entropy has it.
SILENT = -100
_FIRST = ("order", "onset")
_NOWHERE = (*_FIRST, "sign")  # about several things, or with a subject that the video does not show
#: Whose answers follow from the first frame of what is asked about, or from the last one of what came later.
TIMED = ("quarter", "change")
LATER = "later"  # the word of a prompt
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
        early: id of what can be said at the subject half-way: the answer where it can be looked up, or the frame that
            it follows from; SILENT: nothing yet.
        where: the corners that the kept tokens show the thing in, a yes or no each; empty where it is not asked.
        options: indices of the choices' tokens.
        hints: an id a choice.
    """

    type: str
    ids: list[int]
    answer: int
    subject: int
    plain: int
    early: int
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
    boxes = [box for part in evidence.parts for box in part.boxes if _shown(box, kept)]
    seen = {corner_of(box) for box in boxes}
    lesson = replace(lesson, where=[corner in seen for corner in range(len(CORNERS))])
    if question.type == "count":  # its corners are asked for one by one
        return replace(lesson, early=SILENT)
    if question.type in TIMED:  # a later colour is that of the last frame, which is easier to find than the cut
        frame = boxes[-1 if LATER in words else 0].frame
        return replace(lesson, early=ID[TIMES[frame]])
    return lesson


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
        early=plain,
        where=[],
        options=options,
        hints=hints,
    )


def _letters(answer: int) -> list[int]:
    return [ID[letter] if i == answer else ID[NO] for i, letter in enumerate(LETTERS)]


def _times(question: Question, evidence: Evidence) -> list[int]:
    onsets = {part.name: _first(part) for part in evidence.parts}
    return [ID[TIMES[onsets[choice]]] for choice in question.choices]


def _shown(box: Box, kept: NDArray[np.bool_]) -> bool:
    """Whether one of the box's tokens is kept."""
    cell = SIDE // GRID
    (x0, x1), (y0, y1) = ((max(0, low) // cell, -(-high // cell)) for low, high in ((box.x0, box.x1), (box.y0, box.y1)))
    return bool(kept[box.frame, y0:y1, x0:x1].any())


def _first(part: Part) -> int:
    return part.boxes[0].frame


class Asked:
    """The lessons of a step as tensors, [B,K,...]; shorter questions are padded behind, where nobody looks.

    Attributes:
        ids: [B,K,L].
        letter: [B,K] id of the right letter.
        plain: [B,K], SILENT where there is none.
        early: [B,K], likewise.
        where: [B,K,4] 0 or 1.
        placed: [B,K] whether ``where`` is asked.
        timed: [B,K] whether ``early`` is a frame.
        counted: [B,K] whether corners are to be counted.
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
