"""Questions are right, and nothing but the video answers them."""

import json
from collections import Counter

import pytest

from pipeline.evaluate.shapes.questions import ask
from pipeline.evaluate.shapes.world import CORNERS, HARDNESS, NUMBERS, QUARTERS
from tests.paths import ROOT
from tests.pipeline.evaluate.shapes.shape_videos import videos

#: How far from 25 % a guesser may be on 2,000 questions or more: three standard errors.
BOUND = 0.03
_TOKENS = list(json.loads((ROOT / "gstep/checkpoints/shipped/shapes/tokenizer.json").read_bytes())["model"]["vocab"])
#: The words that the shipped model was taught, a token each.
TAUGHT = _TOKENS[_TOKENS.index("?") : _TOKENS.index("no")]


def asked(count, hardness="plain", split="train"):
    return [ask(video) for video in videos(count, hardness, split)]


def words_of(text):
    return text.replace("?", " ?").split()


def flat(lists):
    return [question for questions in lists for question in questions]


def deviation(right, total):
    """Standard errors between a share and a quarter."""
    return (right / total - 0.25) / (0.25 * 0.75 / total) ** 0.5


class Guesser:
    """Answers by the words alone: the choice that was right most often, of its text under this question's, with its
    place."""

    def __init__(self, questions):
        self.right, self.seen = Counter(), Counter()
        for question in questions:
            for place, choice in enumerate(question.choices):
                for key in self.keys(question, place, choice):
                    self.seen[key] += 1
                    self.right[key] += place == question.answer

    @staticmethod
    def keys(question, place, choice):
        kind = question.type
        return [(question.prompt, choice), (kind, choice), (kind, place), (kind, place, choice)]

    def accuracy(self, questions):
        hits = 0
        for question in questions:
            votes = [
                sum((self.right[key] + 1) / (self.seen[key] + 4) for key in self.keys(question, place, choice))
                for place, choice in enumerate(question.choices)
            ]
            hits += votes.index(max(votes)) == question.answer
        return hits / len(questions)


def test_a_guesser_that_reads_but_does_not_look_stays_at_chance():
    learnt = flat(asked(300, "mixed"))
    unseen = flat(asked(300, "mixed", "development"))
    assert len(learnt) >= 2000 <= len(unseen)
    assert abs(Guesser(learnt).accuracy(unseen) - 0.25) <= BOUND


@pytest.mark.parametrize("hardness", ["plain", "mixed"])
def test_answers_are_balanced_over_values_types_and_kinds(hardness):
    right, offered = Counter(), Counter()
    for question in flat(asked(300, hardness)):
        for key in ((question.type,), (question.type, question.kind)):
            right[(*key, question.right)] += 1
            offered.update((*key, choice) for choice in question.choices)
    counted = {key: deviation(right[key], total) for key, total in offered.items() if total >= 45}
    assert len(counted) > 60
    assert max(map(abs, counted.values())) < 4.2, max(counted.items(), key=lambda item: abs(item[1]))


@pytest.mark.parametrize("hardness", ["plain", "mixed"])
def test_no_question_of_a_video_tells_the_answer_of_another(hardness):
    """Whether a choice that another question names, or that another offers, is right more or less often than a
    quarter of the time."""
    right, total = Counter(), Counter()
    for questions in asked(300, hardness):
        for question in questions:
            for other in questions:
                if other is not question:
                    for place, choice in enumerate(question.choices):
                        named = choice in words_of(other.prompt), choice in other.choices
                        total[question.type, other.type, named] += 1
                        right[question.type, other.type, named] += place == question.answer
    found = {key: deviation(right[key], count) for key, count in total.items() if any(key[2]) and count >= 45}
    assert len(found) >= 15
    assert max(map(abs, found.values())) < 4.2, max(found.items(), key=lambda item: abs(item[1]))


def shown(video, question):
    """The answer, worked out from what is in the video."""
    name = question.subject
    thing = next((thing for thing in video.things if thing.name == name), None)
    return {
        "color": lambda: thing.color,
        "shape": lambda: next(other.name for other in video.named if other.color == name),
        "corner": lambda: CORNERS[thing.shots[-1].corner],
        "scene": lambda: video.scenes[video.scene_of[thing.shots[-1].frame]],
        "quarter": lambda: QUARTERS[thing.shots[0].frame // (video.n_frames // 4)],
        "order": lambda: sorted(video.named, key=lambda other: other.shots[0].frame)[0].name,
        "onset": lambda: sorted(video.named, key=lambda other: other.shots[0].frame)[0].name,
        "count": lambda: NUMBERS[len({shot.corner for shot in thing.shots}) - 1],
        "change": lambda: thing.shots[-1 if "later" in question.prompt else 0].color,
        "sign": lambda: video.extra("sign").name,
    }[question.type]()


@pytest.mark.parametrize("hardness", HARDNESS)
def test_choices_are_four_in_words_that_were_taught_and_the_answer_is_what_the_video_shows(hardness):
    for video in videos(20, hardness):
        for question in ask(video):
            assert len(set(question.choices)) == 4 and question.choices[question.answer] == question.right
            assert question.right == shown(video, question)
            words = [*words_of(question.prompt), *question.choices]
            assert set(words) <= set(TAUGHT), words
            assert question.subject == "" or question.subject in words_of(question.prompt)
