"""Questions about a synthetic video, each with four choices.

| type | question | kept tokens that it needs |
|---|---|---|
| color | What color is the star? | one token of the thing |
| shape | What shape is colored red? | one token of the thing |
| corner | Which corner has the star? | one token of the thing, with its position |
| scene | Which scene has the star? | one token of the thing, and the ground |
| quarter | Which quarter introduces the star? | a token of the frame in which it is first seen |
| order | Which of these appears first? | such a token of each |
| onset | (the same, where all four stay to the end) | the same; one of the many later tokens is not enough |
| count | How many corners have the ring? | a token of each copy |
| change | What color is the earlier (later) moon? | a token before (after) the cut |
| sign | Which word is on the sign? | tokens of small letters |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from pipeline.evaluate.shapes.making import draw_item
from pipeline.evaluate.shapes.world import CORNERS, NUMBERS, QUARTERS, Thing, ThingKind, Video

QuestionType = Literal["color", "shape", "corner", "scene", "quarter", "order", "onset", "count", "change", "sign"]
_QUESTIONS = 4  # distinguishes this random generator from the others of a seed


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with four choices, one of which is right.

    Attributes:
        choices: four distinct texts; in random order from ``ask``.
        answer: index of the right choice.
        kind: kind of the thing that the question is about; "static" for onset and "several" for order.
        subject: the word in the prompt that identifies the thing; "" if the prompt names none.
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
    """Return a question of each type that the video allows, in the order of TYPES, with shuffled choices.

    The same video always gives the same questions.
    """
    rng = np.random.default_rng([video.seed, _QUESTIONS, video.n_frames, 0])
    # Both are drawn for every type, so that a question does not depend on which other types the video allows.
    questions = [(make(video, rng), rng.permutation(4).tolist()) for make in _MAKERS]
    return [
        replace(question, choices=tuple(question.choices[i] for i in order), answer=order.index(question.answer))
        for question, order in questions
        if question is not None
    ]


def _make_thing_question(name: QuestionType, thing: Thing, prompt: str, right: str, choices: Sequence[str]) -> Question:
    """Make a question about a thing, with its choices in the given order.

    Args:
        name: the type of the question.
        prompt: the text; ``{}`` stands for the thing's name.
        right: the text of the right choice.
    """
    return Question(
        type=name,
        prompt=prompt.format(thing.name),
        choices=tuple(choices),
        answer=choices.index(right),
        kind=thing.kind,
        subject=thing.name,
    )


def _ask_color(video: Video, rng: np.random.Generator) -> Question:
    """Ask for the color of a random named thing."""
    thing = draw_item(rng, video.named)
    return _make_thing_question(
        "color", thing, "What color is the {}?", thing.color, [second.color for second in video.named]
    )


def _ask_shape(video: Video, rng: np.random.Generator) -> Question:
    """Ask for the shape of a random named thing, given its color, which is the question's subject."""
    thing = draw_item(rng, video.named)
    names = [second.name for second in video.named]
    question = _make_thing_question("shape", thing, f"What shape is colored {thing.color}?", thing.name, names)
    return replace(question, subject=thing.color)


def _ask_corner(video: Video, rng: np.random.Generator) -> Question:
    """Ask for the corner of a random named thing that is not moving."""
    thing = draw_item(rng, [thing for thing in video.named if thing.kind != "moving"])
    return _make_thing_question("corner", thing, "Which corner has the {}?", CORNERS[thing.shots[0].corner], CORNERS)


def _ask_scene(video: Video, rng: np.random.Generator) -> Question | None:
    """Ask for the scene of a random named thing; None if there is only one scene, or named things stay to the end."""
    if not video.cuts or video.standing:  # standing things are in several scenes
        return None
    thing = draw_item(rng, video.named)
    scene = video.scenes[video.scene_of[thing.first]]
    return _make_thing_question("scene", thing, "Which scene has the {}?", scene, video.scene_choices)


def _ask_quarter(video: Video, rng: np.random.Generator) -> Question:
    """Ask for the quarter of the video in which a random named thing first appears."""
    thing = draw_item(rng, video.named)
    right = QUARTERS[4 * thing.first // video.n_frames]
    return _make_thing_question("quarter", thing, "Which quarter introduces the {}?", right, QUARTERS)


def _ask_first(video: Video, *, standing: bool) -> Question | None:
    """Ask which named thing appears first: type "onset" if ``standing``, otherwise "order".

    Returns None if ``video.standing`` differs from ``standing``.
    """
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


def _ask_count(video: Video, rng: np.random.Generator) -> Question | None:
    """Ask how many corners show copies of a thing; None if the video has no copies."""
    thing = video.extra("copies")
    if thing is None:
        return None
    n_corners = len({shot.corner for shot in thing.shots})
    return _make_thing_question("count", thing, "How many corners have the {}?", NUMBERS[n_corners - 1], NUMBERS)


def _ask_change(video: Video, rng: np.random.Generator) -> Question | None:
    """Ask for the color of a thing before or after its change, at random; None if no thing changes its color."""
    thing = video.extra("changing")
    side = int(rng.integers(2))
    if thing is None:
        return None
    color = (thing.shots[0].color, thing.shots[-1].color)[side]
    prompt = f"What color is the {('earlier', 'later')[side]} {{}}?"
    return _make_thing_question("change", thing, prompt, color, video.spare_colors)


def _ask_sign(video: Video, rng: np.random.Generator) -> Question | None:
    """Ask for the word on the sign; None if the video has no sign."""
    thing = video.extra("sign")
    if thing is None:
        return None
    return replace(
        _make_thing_question("sign", thing, "Which word is on the sign?", thing.name, video.sign_choices),
        subject="sign",
    )


#: The types of questions, in the order in which ``ask`` returns them.
TYPES: tuple[QuestionType, ...] = get_args(QuestionType)
_MAKERS: Sequence[Callable[[Video, np.random.Generator], Question | None]] = (
    *(_ask_color, _ask_shape, _ask_corner, _ask_scene, _ask_quarter),
    lambda video, _: _ask_first(video, standing=False),
    lambda video, _: _ask_first(video, standing=True),
    *(_ask_count, _ask_change, _ask_sign),
)
