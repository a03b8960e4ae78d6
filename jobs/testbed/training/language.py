"""The language half: answers from the tokens of a video, all of them or few.

First on ideal tokens, few at a time, so that looking up is learnt before searching; then on what the vision half says
of videos that went through H.264. Videos of all lengths; tokens are left out in two ways (any, or of each frame the
things first), and keep their position or close ranks, so that neither is strange to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from jobs.testbed.training.decoder import Decoder, States
from jobs.testbed.training.lessons import SILENT, Asked, Lesson, echo, lesson_of
from jobs.testbed.training.space import CELLS, GRID, ID, LETTERS, TIMES, Cells
from jobs.testbed.training.stage import Meter, Stage
from pipeline.evaluate.shapes.questions import ask
from pipeline.evaluate.shapes.words import CORNERS
from pipeline.evaluate.shapes.world import FRAMES, Video

_QUESTIONS = 7  # a video
_TOKENS = 2600  # of all videos of a step, about
_MOST_VIDEOS = 24
_FEW, _SOME = 312, 910  # the steps from which there are more tokens, and all
_ECHO = 0.15  # share of questions that name their answer
_LEAST = 0.03  # share of tokens
_UNEVEN = 1.0  # standard deviation of the logarithm of a frame's chances
_FULL = 0.4  # share of steps in which nothing is left out
#: What is asked more often than other types: at first what teaches when things came, then what is learnt last.
_WHEN = {"quarter": 3.0, "order": 3.0, "onset": 3.0, "count": 3.0, "change": 3.0}
_WORKED_OUT = {"quarter": 3.0, "order": 2.0, "onset": 2.0, "count": 5.0, "change": 5.0}
_LAST = {"quarter": 2.0, "order": 2.0, "onset": 2.0, "count": 6.0, "change": 5.0}
_CORNERS = [ID[corner] for corner in CORNERS]
_LOOKED_UP = 600  # the step from which it is asked what must be worked out
_DRAWS = 1_000  # times that a video can be asked


class Seen(NamedTuple):
    """A video with its tokens, [T,CELLS,WIDTH]."""

    video: Video
    cells: Cells
    tokens: Tensor


class Source(Protocol):
    """Where videos come from."""

    def __call__(self, rng: np.random.Generator, n_frames: int) -> Seen: ...


@dataclass(frozen=True)
class Portion:
    """How many tokens of videos of which length a step is about.

    Attributes:
        n_frames: of each video.
        n_kept: tokens of each.
        way: "things": as many of each frame, things before ground; "any"; "uneven": more of some frames than of others.
        close_up: the kept tokens take positions one after the other, instead of their own.
    """

    n_frames: int
    n_kept: int
    way: Literal["things", "any", "uneven"]
    close_up: bool = False


class _Class(NamedTuple):
    """What a step is about: the arguments of Decoder, and the questions."""

    visual: Tensor
    places: Tensor
    end: Tensor
    asked: Asked


def first_portion(step: int, rng: np.random.Generator) -> Portion:
    """Short videos and few tokens at first, then longer ones and more, all at their positions; then any."""
    if step < _FEW:
        return Portion(8, 16, "things")
    if step < _SOME:
        n_frames = int(rng.choice(FRAMES))
        return Portion(n_frames, n_frames * int(rng.integers(1, 5)), "things")
    return any_portion(step, rng)


def any_portion(step: int, rng: np.random.Generator) -> Portion:
    """All tokens, or a share of them as long as it is short."""
    n_frames = int(rng.choice(FRAMES))
    total = n_frames * CELLS
    if rng.random() < _FULL:
        return Portion(n_frames, total, "any")
    n_kept, close_up = max(8, round(total * _LEAST ** rng.random())), bool(rng.random() < 0.5)
    if rng.random() < 0.5:
        return Portion(n_frames, max(1, n_kept // n_frames) * n_frames, "things", close_up)
    # Uneven ones that close up would say nothing of when things came.
    return Portion(n_frames, n_kept, "any", close_up=True) if close_up else Portion(n_frames, n_kept, "uneven")


@dataclass(frozen=True)
class Course:
    """What is taught when.

    Attributes:
        portion: of a step's number.
        weights: by type of question, of a step's number; 1 for types that are not there.
    """

    portion: Callable[[int, np.random.Generator], Portion]
    weights: Callable[[int], Mapping[str, float]]


#: On ideal tokens.
READING = Course(first_portion, lambda step: _WHEN if step < _LOOKED_UP else _WORKED_OUT)
#: On what the vision half says.
SIGHT = Course(any_portion, lambda step: _LAST)


def train(
    stage: Stage,
    decoder: Decoder,
    source: Source,
    course: Course,
    *,
    noise: float,
    start: dict[str, Tensor] | None = None,
) -> None:
    """Train on videos of ``source``.

    Args:
        noise: standard deviation of what is added to tokens.
    """

    def step(number: int, rng: np.random.Generator, meter: Meter) -> Tensor:
        portion = course.portion(number, rng)
        lesson = _class_of(rng, source, portion, noise, course.weights(number))
        states = decoder(lesson.visual, lesson.places, lesson.end, lesson.asked.ids)
        return _loss(decoder, states, lesson, portion, meter)

    stage.run(decoder, step, start)


def _class_of(
    rng: np.random.Generator, source: Source, portion: Portion, noise: float, weights: Mapping[str, float]
) -> _Class:
    total = portion.n_frames * CELLS
    count = max(2, min(_MOST_VIDEOS, _TOKENS // portion.n_kept))
    visual, places, rows = [], [], []
    for _ in range(count):
        seen = source(rng, portion.n_frames)
        index = chosen(rng, seen.cells, portion)
        kept = np.zeros(total, bool)
        kept[index] = True
        rows.append(_lessons(rng, seen, kept, weights))
        visual.append(seen.tokens.flatten(0, 1)[torch.from_numpy(index)])
        places.append(torch.arange(len(index)) if portion.close_up else torch.from_numpy(index))
    end = torch.full((count,), portion.n_kept if portion.close_up else total)
    tokens = torch.stack(visual).float()
    tokens = tokens + noise * torch.randn_like(tokens)
    return _Class(tokens, torch.stack(places), end, Asked(rows))


def _lessons(
    rng: np.random.Generator, seen: Seen, kept: NDArray[np.bool_], weights: Mapping[str, float]
) -> list[Lesson]:
    shown = kept.reshape(-1, GRID, GRID) & seen.cells.shown
    asked = [question for draw in rng.integers(_DRAWS, size=2).tolist() for question in ask(seen.video, draw=draw)]
    lessons = [one for one in (lesson_of(question, shown) for question in asked) if one is not None]
    if lessons:
        chances = np.array([weights.get(one.type, 1.0) for one in lessons])
        few = min(len(lessons), _QUESTIONS)
        lessons = [lessons[i] for i in rng.choice(len(lessons), few, replace=False, p=chances / chances.sum())]
    lessons = [echo(rng) if rng.random() < _ECHO else one for one in lessons]
    return lessons + [echo(rng) for _ in range(_QUESTIONS - len(lessons))]


def chosen(rng: np.random.Generator, cells: Cells, portion: Portion) -> NDArray[np.int64]:
    """Indices of the tokens that are kept, ascending."""
    total = portion.n_frames * CELLS
    if portion.n_kept >= total:
        return np.arange(total)
    if portion.way != "things":
        spread = _UNEVEN if portion.way == "uneven" else 0.0
        favour = spread * rng.normal(size=(portion.n_frames, 1)) + rng.gumbel(size=(portion.n_frames, CELLS))
        return np.sort(np.argsort(-favour, axis=None)[: portion.n_kept])
    # One cell a thing before a second one, new things before old ones, ground last; then by chance.
    rank = rng.random((portion.n_frames, CELLS))
    for t in range(portion.n_frames):
        order = rng.permutation(CELLS)
        _, first = np.unique(cells.thing[t][order], return_index=True)
        rank[t][order[first]] -= 1.0
    rank -= cells.thing >= 0
    rank -= cells.since == 0
    few = np.sort(np.argsort(rank, axis=1)[:, : portion.n_kept // portion.n_frames], axis=1)
    return (few + CELLS * np.arange(portion.n_frames)[:, None]).ravel()


def _loss(decoder: Decoder, states: States, lesson: _Class, portion: Portion, meter: Meter) -> Tensor:
    """The sum of the cross-entropies of the letter, the end behind it, the plain answer, the hints, and of what can be
    known earlier: at the subject, where order is asked when each choice came, and the frame of each visual token.

    At the subject it is asked, too, in which corners the thing is: of all four, not only of one that is right, or
    nothing is ever counted.
    """
    say, asked = decoder.lm_head, lesson.asked
    letter = say(_at(states.last, asked.last))
    plain = say(_at(states.last, asked.subject))
    stop = say(_at(states.last, asked.last + 1))
    hints = say(_each_at(states.late, asked.options))
    early = say(_each_at(states.early, torch.cat([asked.subject[..., None], asked.options], -1)))
    # Tokens that closed up do not tell which frame they are of.
    heard = torch.where(asked.ordered[..., None], SILENT, asked.hints) if portion.close_up else asked.hints
    when = torch.where(asked.ordered[..., None], heard, SILENT)
    soon = torch.where(asked.timed, SILENT, asked.early) if portion.close_up else asked.early
    frames = torch.full_like(lesson.places, SILENT) if portion.close_up else ID[TIMES[0]] + lesson.places // CELLS
    ends = torch.full_like(asked.letter, ID["<|im_end|>"])
    parts = {
        "letter": _entropy(letter, asked.letter),
        "plain": _entropy(plain, asked.plain),
        "hints": _entropy(hints, heard),
        "early": _entropy(early, torch.cat([soon[..., None], when], -1)),
        "stop": _entropy(stop, ends),
        "frame": _entropy(say(states.visual), frames),
        "middle": _entropy(say(_at(states.middle, asked.subject)), asked.plain),
        "where": _presence(say(_at(states.first, asked.subject)), asked.where, asked.placed),
        "counted": _presence(say(_at(states.early, asked.subject)), asked.where, asked.counted),
    }
    for name, part in parts.items():
        meter.add(f"loss {name}", part.item())
    _count(asked, letter, plain, hints, meter, whole=portion.n_kept == portion.n_frames * CELLS)
    return torch.stack(list(parts.values())).sum()


def _count(asked: Asked, letter: Tensor, plain: Tensor, hints: Tensor, meter: Meter, *, whole: bool) -> None:
    right = letters_said(letter) == asked.letter - ID[LETTERS[0]]
    spoken = plain.argmax(-1) == asked.plain
    told = (hints.argmax(-1) == asked.hints).float().mean(-1)
    for b, row in enumerate(asked.lessons):
        for k, lesson in enumerate(row):
            meter.add(f"{lesson.type}{'' if whole else ' pruned'}", float(right[b, k]))
            if whole:
                meter.add(f"{lesson.type} hints", float(told[b, k]))
            if whole and lesson.plain != SILENT:
                meter.add(f"{lesson.type} plain", float(spoken[b, k]))


def letters_said(logits: Tensor) -> Tensor:
    """[...] index of the likeliest letter."""
    return logits[..., [ID[letter] for letter in LETTERS]].argmax(-1)


def _at(states: Tensor, index: Tensor) -> Tensor:
    """[B,K,WIDTH] at one token of each question."""
    return _each_at(states, index[..., None])[:, :, 0]


def _each_at(states: Tensor, index: Tensor) -> Tensor:
    """[B,K,n,WIDTH]."""
    return states.gather(2, index[..., None].expand(-1, -1, -1, states.shape[-1]))


def _entropy(logits: Tensor, target: Tensor) -> Tensor:
    """0 where nothing is asked; the mean would have no value."""
    total = functional.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=SILENT, reduction="sum")
    return total / max(1, int((target != SILENT).sum()))


def _presence(logits: Tensor, where: Tensor, asked: Tensor) -> Tensor:
    """Cross-entropy of a yes or no for each corner's word, where it is asked."""
    each = functional.binary_cross_entropy_with_logits(logits[..., _CORNERS], where, reduction="none").mean(-1)
    return (each * asked).sum() / max(1, int(asked.sum()))


def questions_right(decoder: Decoder, seen: Sequence[Seen]) -> list[tuple[str, int, bool]]:
    """(type, frames, right) of all questions about videos of which nothing is left out."""
    answers = []
    with torch.no_grad():
        for one in seen:
            lessons = [lesson for lesson in map(lesson_of, ask(one.video)) if lesson is not None]
            asked, total = Asked([lessons]), one.video.n_frames * CELLS
            places, end = torch.arange(total)[None], torch.tensor([total])
            states = decoder(one.tokens.flatten(0, 1)[None].float(), places, end, asked.ids)
            said = letters_said(decoder.lm_head(_at(states.last, asked.last)))[0].tolist()
            answers += [
                (lesson.type, one.video.n_frames, letter == lesson.answer)
                for lesson, letter in zip(lessons, said, strict=True)
            ]
    return answers
