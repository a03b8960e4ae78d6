"""Questions about a video, each with four choices.

| type | question | choices | what it asks of the tokens that are kept |
|---|---|---|---|
| color | What color is the star? | colours of the named things | one token of the thing |
| shape | What shape is colored red? | their shapes | one token of the thing |
| corner | Which corner has the star? | corners | one token of the thing, and its place |
| scene | Which scene has the star? | four, with those of the video | one token of the thing, and the ground |
| quarter | Which quarter introduces the star? | quarters | a token of the frame in which it is first seen |
| order | Which of these appears first? | the shapes of the named things | such a token of each |
| onset | (the same, where all four stay to the end) | | likewise: one of the many later ones will not do |
| count | How many corners have the ring? | one to four | a token of each copy |
| change | What color is the earlier (later) moon? | colours that no named thing has | a token of that side |
| sign | Which word is on the sign? | four words | tokens of small letters |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from pipeline.evaluate.shapes.making import one_of
from pipeline.evaluate.shapes.world import CORNERS, NUMBERS, QUARTERS, Thing, ThingKind, Video

QuestionType = Literal["color", "shape", "corner", "scene", "quarter", "order", "onset", "count", "change", "sign"]
_QUESTIONS = 4  # the number of this generator among those of a seed


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with four choices, one of them right.

    Attributes:
        type: of TYPES.
        prompt: the question.
        choices: four different ones, in random order.
        answer: index of the right one.
        kind: of the thing that is asked about; "several" where it is all named ones.
        subject: the word of the prompt that says which thing; "" where none does.
    """

    type: QuestionType
    prompt: str
    choices: tuple[str, ...]
    answer: int
    kind: ThingKind | Literal["several"]
    subject: str

    @property
    def right(self) -> str:
        """The right choice."""
        return self.choices[self.answer]


def ask(video: Video) -> list[Question]:
    """Ask a question of each type that the video allows, in the order of TYPES; a video's questions never change."""
    rng = np.random.default_rng([video.seed, _QUESTIONS, video.n_frames, 0])
    # The order is drawn for every type, so that a question does not depend on which others the video allows.
    questions = [(make(video, rng), rng.permutation(4).tolist()) for make in _MAKERS]
    return [
        replace(question, choices=tuple(question.choices[i] for i in order), answer=order.index(question.answer))
        for question, order in questions
        if question is not None
    ]


def _about(name: QuestionType, thing: Thing, prompt: str, right: str, choices: Sequence[str]) -> Question:
    """Build a question of type ``name`` about one thing, whose name replaces ``{}`` in the prompt.

    ``right`` is the text of the right choice.
    """
    return Question(
        type=name,
        prompt=prompt.format(thing.name),
        choices=tuple(choices),
        answer=choices.index(right),
        kind=thing.kind,
        subject=thing.name,
    )


def _color(video: Video, rng: np.random.Generator) -> Question:
    """Ask for the colour of a named thing."""
    thing = one_of(rng, video.named)
    return _about("color", thing, "What color is the {}?", thing.color, [second.color for second in video.named])


def _shape(video: Video, rng: np.random.Generator) -> Question:
    """Ask for the shape of a named thing, given its colour."""
    thing = one_of(rng, video.named)
    names = [second.name for second in video.named]
    question = _about("shape", thing, f"What shape is colored {thing.color}?", thing.name, names)
    return replace(question, subject=thing.color)


def _corner(video: Video, rng: np.random.Generator) -> Question:
    """Ask for the corner of a named thing that stands still."""
    thing = one_of(rng, [thing for thing in video.named if thing.kind != "moving"])
    return _about("corner", thing, "Which corner has the {}?", CORNERS[thing.shots[0].corner], CORNERS)


def _scene(video: Video, rng: np.random.Generator) -> Question | None:
    """Ask for the scene that shows a named thing; None where things span scenes."""
    if not video.cuts or video.standing:  # things that stay are in several scenes
        return None
    thing = one_of(rng, video.named)
    scene = video.scenes[video.scene_of[thing.first]]
    return _about("scene", thing, "Which scene has the {}?", scene, video.scene_choices)


def _quarter(video: Video, rng: np.random.Generator) -> Question:
    """Ask for the quarter of the video in which a named thing first appears."""
    thing = one_of(rng, video.named)
    right = QUARTERS[4 * thing.first // video.n_frames]
    return _about("quarter", thing, "Which quarter introduces the {}?", right, QUARTERS)


def _first(video: Video, *, standing: bool) -> Question | None:
    """Ask which named thing appears first; None if ``video.standing`` is another value than ``standing``."""
    if video.standing != standing:
        return None
    first = min(video.named, key=lambda thing: thing.first)
    return Question(
        type="onset" if standing else "order",
        prompt="Which of these appears first?",
        choices=tuple(thing.name for thing in video.named),
        answer=video.named.index(first),
        kind="static" if standing else "several",
        subject="",
    )


def _count(video: Video, rng: np.random.Generator) -> Question | None:
    """Ask how many corners hold copies of one thing; None in a video without copies."""
    thing = video.extra("copies")
    if thing is None:
        return None
    n_corners = len({shot.corner for shot in thing.shots})
    return _about("count", thing, "How many corners have the {}?", NUMBERS[n_corners - 1], NUMBERS)


def _change(video: Video, rng: np.random.Generator) -> Question | None:
    """Ask for the colour before or after a change; None in a video without a thing that changes."""
    thing, side = video.extra("changing"), int(rng.integers(2))
    if thing is None:
        return None
    color = (thing.shots[0].color, thing.shots[-1].color)[side]
    prompt = f"What color is the {('earlier', 'later')[side]} {{}}?"
    return _about("change", thing, prompt, color, video.spare_colors)


def _sign(video: Video, rng: np.random.Generator) -> Question | None:
    """Ask for the word on the sign; None in a video without one."""
    thing = video.extra("sign")
    if thing is None:
        return None
    return replace(_about("sign", thing, "Which word is on the sign?", thing.name, video.sign_choices), subject="sign")


#: The types of questions, in the order in which they are asked.
TYPES: tuple[QuestionType, ...] = get_args(QuestionType)
_MAKERS: Sequence[Callable[[Video, np.random.Generator], Question | None]] = (
    *(_color, _shape, _corner, _scene, _quarter),
    lambda video, _: _first(video, standing=False),
    lambda video, _: _first(video, standing=True),
    *(_count, _change, _sign),
)
