"""What is in a video, its golden digest and its frames after H.264; questions that nothing but the video answers."""

import hashlib
import json
import os
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from pipeline.evaluate.shapes import world
from pipeline.evaluate.shapes.making import make_video
from pipeline.evaluate.shapes.questions import ask
from pipeline.evaluate.shapes.render import RGB, render, render_mask
from pipeline.evaluate.shapes.world import (
    BLOCK,
    COLORS,
    CORNERS,
    FRAMES,
    HARDNESS,
    NUMBERS,
    PLAIN,
    QUARTERS,
    SEEDS,
    SIDE,
    TEST,
    TRAIN,
)
from tests.interpreter import run_python
from tests.paths import ROOT
from tests.pipeline.evaluate.shapes.shape_videos import through_h264, videos

#: Of the videos and questions of a few seeds: what a seed gives may change with WORLD_VERSION alone.
DIGEST = "103a16629dfb421d791c5e12b3879c060b257c169d39e7e622b28bdcca37b6c7"


@pytest.mark.parametrize("hardness", HARDNESS)
def test_names_and_colors_tell_things_apart_which_are_whole_and_beside_each_other(hardness):
    for video in videos(20, hardness):
        names = [thing.name for thing in video.things]
        assert len(set(names)) == len(names) and set(names) <= {*world.SHAPES, *world.SIGNS}
        colors = {thing.color for thing in video.named}
        assert len(colors) == 4 == len(video.spare_colors) and colors | set(video.spare_colors) == set(world.COLORS)
        spare = {shot.color for thing in video.extras if thing.kind != "sign" for shot in thing.shots}
        assert spare <= set(video.spare_colors)
        assert all(len({shot.color for shot in thing.shots}) == 1 for thing in video.named)
        shots = [shot for thing in video.things for shot in thing.shots]
        assert all(s.size > 0 and min(s.x, s.y) >= 0 and max(s.x, s.y) + s.size <= SIDE for s in shots)
        assert {shot.frame for shot in shots} <= set(range(video.n_frames))
        for a, b in combinations(shots, 2):
            beside = a.x >= b.x + b.size or b.x >= a.x + a.size or a.y >= b.y + b.size or b.y >= a.y + a.size
            assert a.frame != b.frame or beside
        for thing in video.named:
            if thing.kind != "moving":  # wholly in its corner
                assert len({shot.corner for shot in thing.shots}) == 1
                sides = [(at, at + shot.size) for shot in thing.shots for at in (shot.x, shot.y)]
                assert not any(low < SIDE // 2 < high for low, high in sides)


def test_kinds_are_what_they_say():
    seen = set()
    for video in videos(120):
        assert len({thing.first for thing in video.named}) == 4
        for thing in video.named:
            frames = [shot.frame for shot in thing.shots]
            assert frames == list(range(frames[0], frames[-1] + 1))
            end = next((cut for cut in video.cuts if cut > frames[0]), video.n_frames)
            seen.add((thing.kind, video.standing))
            if thing.kind == "static":
                assert frames[-1] + 1 == (video.n_frames if video.standing else end)
            else:
                assert frames[-1] < end and len(frames) <= {"brief": 2, "moving": 4}[thing.kind]
            places = {(shot.x, shot.y) for shot in thing.shots}
            assert len(places) == (len(frames) if thing.kind == "moving" else 1)
    assert seen == {("brief", False), ("static", False), ("moving", False), ("static", True)}


def test_what_a_seed_gives_is_what_it_gave_when_results_were_recorded():
    worlds = repr([(video, ask(video)) for name in HARDNESS for video in videos(3, name)])
    assert hashlib.sha256(worlds.encode()).hexdigest() == DIGEST


def test_crowded_videos_find_room():
    crowded = replace(PLAIN, name="crowded", size=(14, 24), pan=(5, 5), standing=1.0, scenes=(2, 4), brief=(4, 8))
    for i, seed in enumerate(TRAIN[:12]):
        assert make_video(seed, split="train", n_frames=FRAMES[i % 3], hardness=crowded).standing


@pytest.mark.parametrize(
    ("knob", "said"),
    [
        ({"size": (5, 9)}, r"hardness plain: size must lie in \(6, 24\), got \(5, 9\)"),
        ({"size": (20, 14)}, "size must be a range from 0 upwards"),
        ({"pan": (0, 2), "zoom": (0.8, 1.0)}, "a camera can do one of pan, shake and zoom"),
        ({"standing": 1.5}, "standing must be a share"),
    ],
)
def test_knobs_that_make_no_video_are_refused(knob, said):
    with pytest.raises(ValueError, match=said):
        replace(PLAIN, **knob)


def test_a_video_is_made_for_whoever_names_its_split_and_a_length_that_there_is():
    in_order = sorted(SEEDS.values(), key=lambda seeds: seeds.start)
    assert all(one.stop <= other.start for one, other in pairwise(in_order))
    assert make_video(TEST[0], split="test").seed == TEST[0]
    for seed, n_frames, why in (
        (TEST[0], 8, f"seed {TEST[0]} belongs to the test split; the seeds of split='train' are"),
        (0, 8, "seed 0 belongs to no split"),
        (TEST.stop, 8, f"seed {TEST.stop} belongs to no split"),
        (TRAIN[0], 12, "videos have 8, 16, 32 frames, got 12"),
    ):
        with pytest.raises(ValueError, match=why):
            make_video(seed, split="train", n_frames=n_frames)


def test_benchmarks_of_two_seeds_share_no_video():
    for split, seeds in SEEDS.items():
        first, second = (world.compute_benchmark_seeds(split, number, BLOCK) for number in (0, 1))
        assert not set(first) & set(second) and second[-1] in seeds
    last = len(TEST) // BLOCK - 1
    assert world.compute_benchmark_seeds("test", last, BLOCK)[-1] == TEST[-1]


PALETTE = np.array([RGB[color] for color in COLORS], float)


def without(video):
    """The same video with nothing in it."""
    gone = [replace(thing, contrast=0.0) for thing in video.things]
    return replace(video, named=tuple(gone[:4]), extras=tuple(gone[4:]))


def window(frames, shot):
    return frames[shot.frame, shot.y : shot.y + shot.size, shot.x : shot.x + shot.size].astype(float)


def test_another_process_renders_the_same_bits():
    code = (
        "import hashlib\n"
        "from pipeline.evaluate.shapes.render import render\n"
        "from tests.pipeline.evaluate.shapes.shape_videos import videos\n"
        "frames = b''.join(render(video).tobytes() for video in videos(3, 'mixed'))\n"
        "print(hashlib.sha256(frames).hexdigest())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = run_python("-c", code, check=True, env=environment)
    here = hashlib.sha256(b"".join(render(video).tobytes() for video in videos(3, "mixed"))).hexdigest()
    assert done.stdout.strip() == here


@pytest.mark.parametrize(("hardness", "share"), [("small", 0.97), ("pan", 0.99)])
def test_the_color_of_a_thing_can_be_read_from_its_pixels_after_h264(hardness, share):
    right = []
    for video in videos(4, hardness):
        frames = through_h264(render(video))
        for thing in video.things:
            if thing.kind != "sign":
                inside = render_mask(thing.name, thing.size) > 0.9
                for shot in thing.shots:
                    mean = np.median(window(frames, shot)[inside], axis=0)
                    right.append(COLORS[np.linalg.norm(PALETTE - mean, axis=1).argmin()] == shot.color)
    assert np.mean(right) >= share


@pytest.mark.parametrize("hardness", ["pan", "shake"])
def test_the_camera_moves_ground_and_things_together(hardness):
    for video in videos(2, hardness):
        frames, bare = render(video), render(without(video))
        for t in range(1, video.n_frames):
            (x0, y0), (x1, y1) = video.camera[t - 1 : t + 1]
            right, down = x1 - x0, y1 - y0
            if video.scene_of[t] == video.scene_of[t - 1]:
                still = [{(s.x, s.y) for s in g.shots if s.frame == t - 1} for g in video.named if g.kind == "static"]
                moved = [{(s.x, s.y) for s in g.shots if s.frame == t} for g in video.named if g.kind == "static"]
                for before, after in zip(still, moved, strict=True):
                    assert not before or after == {(x + right, y + down) for x, y in before}
                empty = bare[t - 1 : t + 1]
                inner = empty[0, 20:-20, 20:-20]
                shifted = empty[1, 20 + down : SIDE - 20 + down, 20 + right : SIDE - 20 + right]
                assert (inner == shifted).all()
        assert (frames[0] != frames[1]).mean() > 0.3


def test_specks_flicker_and_spare_things():
    for clutter, plain in zip(videos(3, "clutter"), videos(3), strict=True):
        seen, quiet = render(clutter), render(plain)
        specks = (seen != quiet).any(-1)
        assert (specks.sum((1, 2)) > 0).mean() > 0.9
        assert not (specks[:-1] & specks[1:]).sum() > 0.2 * specks.sum()
        for thing in clutter.things:
            for shot in thing.shots:
                assert not window(specks[..., None], shot).any()


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
