"""What is in a video: every rule that questions rely on, on videos of all lengths and settings."""

import hashlib
from dataclasses import replace
from itertools import pairwise

import pytest

from pipeline.evaluate.shapes.making import light_of, make_video
from pipeline.evaluate.shapes.questions import ask
from pipeline.evaluate.shapes.world import COLORS, FRAMES, HARDNESS, PLAIN, SCENES, SHAPES, SIDE, SIGNS, TRAIN
from tests.pipeline.evaluate.shapes.shape_videos import videos

ALL = [pytest.param(name, id=name) for name in HARDNESS]
#: Of the videos and questions of a few seeds: what a seed gives may change with WORLD_VERSION alone.
DIGEST = "103a16629dfb421d791c5e12b3879c060b257c169d39e7e622b28bdcca37b6c7"


def frames_of(thing):
    return [shot.frame for shot in thing.shots]


@pytest.mark.parametrize("hardness", ALL)
def test_names_and_colors_tell_things_apart(hardness):
    for video in videos(60, hardness):
        names = [thing.name for thing in video.things]
        assert len(set(names)) == len(names) and set(names) <= {*SHAPES, *SIGNS}
        colors = {thing.color for thing in video.named}
        assert len(colors) == 4 and colors | set(video.spare_colors) == set(COLORS) and len(video.spare_colors) == 4
        spare = {shot.color for thing in video.extras if thing.kind != "sign" for shot in thing.shots}
        assert spare <= set(video.spare_colors)
        assert all(len({shot.color for shot in thing.shots}) == 1 for thing in video.named)


@pytest.mark.parametrize("hardness", ALL)
def test_things_are_whole_and_apart(hardness):
    for video in videos(60, hardness):
        shots = [shot for thing in video.things for shot in thing.shots]
        assert all(s.size > 0 and min(s.x, s.y) >= 0 and max(s.x, s.y) + s.size <= SIDE for s in shots)
        assert {shot.frame for shot in shots} <= set(range(video.n_frames))
        for i, a in enumerate(shots):
            for b in shots[:i]:
                beside = a.x >= b.x + b.size or b.x >= a.x + a.size or a.y >= b.y + b.size or b.y >= a.y + a.size
                assert a.frame != b.frame or beside


@pytest.mark.parametrize("hardness", ALL)
def test_a_thing_that_does_not_move_stays_wholly_in_its_corner(hardness):
    for video in videos(60, hardness):
        for thing in video.named:
            if thing.kind != "moving":
                assert len({shot.corner for shot in thing.shots}) == 1
                sides = [(at, at + shot.size) for shot in thing.shots for at in (shot.x, shot.y)]
                assert not any(low < SIDE // 2 < high for low, high in sides)


@pytest.mark.parametrize("hardness", ALL)
def test_scenes_are_different_and_long_enough(hardness):
    for video in videos(60, hardness):
        assert len(set(video.scenes)) == len(video.scenes) == len(set(video.scene_of))
        assert len(video.scenes) == (2 if hardness == "cuts" else len(video.cuts) + 1)
        assert set(video.scenes) <= set(video.scene_choices) <= set(SCENES) and len(set(video.scene_choices)) == 4
        edges = [0, *video.cuts, video.n_frames]
        lengths = [end - start for start, end in pairwise(edges)]
        assert min(lengths) >= max(2, video.n_frames // 8)


def test_kinds_are_what_they_say():
    seen = set()
    for video in videos(300):
        assert len({thing.first for thing in video.named}) == 4
        for thing in video.named:
            frames = frames_of(thing)
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


def test_a_needle_is_one_frame_in_long_stretches_of_nothing():
    for video in videos(60, "needle"):
        assert all(len(thing.shots) == 1 for thing in video.named)
        busy = {shot.frame for thing in video.things for shot in thing.shots}
        assert video.n_frames < 32 or len(busy) <= 20


def test_extras_are_what_questions_take_them_for():
    seen = {8: set(), 16: set(), 32: set()}
    for video in videos(300):
        for thing in video.extras:
            seen[video.n_frames].add(thing.kind)
        if copies := video.extra("copies"):
            corners = {shot.corner for shot in copies.shots}
            places = {(shot.x, shot.y) for shot in copies.shots}
            assert 1 <= len(corners) == len(places) <= 4
        if changing := video.extra("changing"):
            colors = {shot.frame: shot.color for shot in changing.shots}
            turns = [t for t in colors if t - 1 in colors and colors[t] != colors[t - 1]]
            assert len(turns) == 1 and turns[0] in video.cuts and len(set(colors.values())) == 2
        if sign := video.extra("sign"):
            assert sign.name in video.sign_choices and len(set(video.sign_choices)) == 4
    assert all(kinds == {"copies", "changing", "sign"} for kinds in seen.values())


def test_a_setting_changes_what_it_names_and_leaves_the_story():
    for plain, dim, pan, clutter in zip(
        *(videos(30, name) for name in ("plain", "dim", "pan", "clutter")), strict=True
    ):
        for other in (dim, pan, clutter):
            for one, same in zip(plain.things, other.things, strict=True):
                assert (one.name, one.kind, frames_of(one)) == (same.name, same.kind, frames_of(same))
            assert (plain.scenes, plain.scene_of) == (other.scenes, other.scene_of)
        assert all(thing.contrast == 1.0 for thing in plain.things)
        assert all(0.25 <= thing.contrast <= 0.4 for thing in dim.things)
        assert plain.specks == 0 and 4 <= clutter.specks <= 8
        assert set(plain.camera) == {(0, 0)} and len(set(pan.camera)) > 1


def test_the_camera_goes_to_and_fro_at_its_pace():
    for video in videos(30, "pan"):
        right = [x for x, _ in video.camera]
        steps = [abs(b - a) for a, b in pairwise(right)]
        assert max(map(abs, right)) <= 6 and 3 <= max(steps) <= 5


def test_a_shaking_camera_is_somewhere_else_in_each_frame():
    for video in videos(30, "shake"):
        assert 2 <= max(abs(at) for way in video.camera for at in way) <= 5
        assert len(set(video.camera)) > video.n_frames / 2


def test_a_zoom_shrinks_things_where_they_stand_and_leaves_signs():
    for plain, zoom in zip(videos(30), videos(30, "zoom"), strict=True):
        assert 0.7 <= min(zoom.zoom) < max(zoom.zoom) <= 1.0
        for whole, thing in zip(plain.things, zoom.things, strict=True):
            for shot, seen in zip(whole.shots, thing.shots, strict=True):
                share = 1.0 if thing.kind == "sign" else zoom.zoom[seen.frame]
                assert seen.size == int(share * shot.size)
                for at, to in ((shot.x, seen.x), (shot.y, seen.y)):  # of the middle of the thing, from the picture's
                    assert abs((to + seen.size / 2 - 48) - share * (at + shot.size / 2 - 48)) <= 1


def test_scenes_that_are_cut_between_come_back():
    lengths = {8: 4, 16: 8, 32: 8}
    for video in videos(60, "cuts"):
        assert 4 <= len(video.cuts) + 1 <= lengths[video.n_frames]
        assert all(video.scene_of[t] != video.scene_of[t - 1] for t in video.cuts)
        assert {video.scene_of[t] for t in video.cuts} == {0, 1}


def test_scenes_fade_in_and_out():
    assert light_of((0, 4, 10), 2, 12) == pytest.approx(
        [1 / 3, 2 / 3, 2 / 3, 1 / 3, *[1 / 3, 2 / 3, 1, 1, 2 / 3, 1 / 3], 1 / 3, 1 / 3]
    )
    for video in videos(30, "fade"):
        dark = [t for t in range(video.n_frames) if video.light[t] == min(video.light)]
        assert {0, video.n_frames - 1, *video.cuts, *(cut - 1 for cut in video.cuts)} == set(dark)


def test_a_video_follows_from_its_seed_length_and_setting():
    seed = TRAIN[5]
    one = make_video(seed, split="train", n_frames=16)
    assert one == make_video(seed, split="train", n_frames=16)
    others = [make_video(seed + 1, split="train", n_frames=16), make_video(seed, split="train", n_frames=32)]
    assert all(other.things != one.things for other in others)


def test_what_a_seed_gives_is_what_it_gave_when_results_were_recorded():
    worlds = repr([(video, ask(video)) for name in HARDNESS for video in videos(3, name)])
    assert hashlib.sha256(worlds.encode()).hexdigest() == DIGEST


def test_crowded_videos_find_room():
    crowded = replace(PLAIN, name="crowded", size=(14, 24), pan=(5, 5), standing=1.0, scenes=(2, 4), brief=(4, 8))
    for i, seed in enumerate(TRAIN[:40]):
        assert make_video(seed, split="train", n_frames=FRAMES[i % 3], hardness=crowded).standing


def test_other_lengths_are_refused():
    with pytest.raises(ValueError, match="videos have 8, 16, 32 frames, got 12"):
        make_video(TRAIN[0], split="train", n_frames=12)
