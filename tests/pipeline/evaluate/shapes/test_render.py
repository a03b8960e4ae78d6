"""Frames show what the video says, to an eye and after H.264."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from pipeline.evaluate.shapes.making import make_video
from pipeline.evaluate.shapes.render import RGB, mask_of, render
from pipeline.evaluate.shapes.world import COLORS, HARDNESS, SCENES, SHAPES, SIDE, TRAIN
from tests.pipeline.evaluate.shapes.shape_videos import through_h264, videos

PALETTE = np.array([RGB[color] for color in COLORS], float)


def without(video):
    """The same video with nothing in it."""
    gone = [replace(thing, contrast=0.0) for thing in video.things]
    return replace(video, named=tuple(gone[:4]), extras=tuple(gone[4:]))


def window(frames, shot):
    return frames[shot.frame, shot.y : shot.y + shot.size, shot.x : shot.x + shot.size].astype(float)


@pytest.mark.parametrize("hardness", [pytest.param(name, id=name) for name in HARDNESS])
def test_frames_are_of_the_videos_length_and_full_of_values(hardness):
    for video in videos(6, hardness):
        frames = render(video)
        assert frames.shape == (video.n_frames, SIDE, SIDE, 3) and frames.dtype == np.uint8
        assert (render(video) == frames).all()


def test_another_process_renders_the_same_bits():
    code = (
        "import hashlib\n"
        "from pipeline.evaluate.shapes.render import render\n"
        "from tests.pipeline.evaluate.shapes.shape_videos import videos\n"
        "frames = b''.join(render(video).tobytes() for video in videos(3, 'mixed'))\n"
        "print(hashlib.sha256(frames).hexdigest())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    here = hashlib.sha256(b"".join(render(video).tobytes() for video in videos(3, "mixed"))).hexdigest()
    assert done.stdout.strip() == here


def test_every_color_is_brighter_than_any_ground():
    brightest = max(render(without(video)).mean((1, 2)).max() for video in videos(60))
    assert PALETTE.max(1).min() > 2.5 * brightest


@pytest.mark.parametrize(("hardness", "share"), [("plain", 0.99), ("small", 0.97), ("pan", 0.99)])
def test_the_color_of_a_thing_can_be_read_from_its_pixels_after_h264(hardness, share):
    right = []
    for video in videos(9, hardness):
        frames = through_h264(render(video))
        for thing in video.things:
            if thing.kind != "sign":
                inside = mask_of(thing.name, thing.size) > 0.9
                for shot in thing.shots:
                    mean = np.median(window(frames, shot)[inside], axis=0)
                    right.append(COLORS[np.linalg.norm(PALETTE - mean, axis=1).argmin()] == shot.color)
    assert np.mean(right) >= share


@pytest.mark.parametrize(("hardness", "least", "most"), [("plain", 60, 200), ("dim", 15, 60), ("small", 40, 200)])
def test_things_stand_out_as_much_as_their_setting_says(hardness, least, most):
    contrasts = []
    for video in videos(9, hardness):
        seen, empty = through_h264(render(video)), through_h264(render(without(video)))
        for thing in video.named:
            inside = mask_of(thing.name, thing.size) > 0.9
            change = abs(window(seen, thing.shots[0]) - window(empty, thing.shots[0]))
            contrasts.append(change[inside].mean())
    assert least < np.median(contrasts) < most
    assert min(contrasts) > least / 3  # the least of them is still there to be seen


def test_nothing_else_changes_where_no_thing_is():
    for video in videos(6):
        outside = np.ones((video.n_frames, SIDE, SIDE), bool)
        for thing in video.things:
            for shot in thing.shots:
                outside[shot.frame, shot.y : shot.y + shot.size, shot.x : shot.x + shot.size] = False
        assert (render(video)[outside] == render(without(video))[outside]).all()


def test_cuts_are_hard_and_scenes_are_still():
    for video in videos(12):
        frames = through_h264(render(without(video))).astype(float)
        change = abs(np.diff(frames, axis=0)).mean((1, 2, 3))
        cuts = np.isin(np.arange(1, video.n_frames), video.cuts)
        assert (change[cuts] > 5).all() and (change[~cuts] < 2).all()


@pytest.mark.parametrize("hardness", ["pan", "shake"])
def test_the_camera_moves_ground_and_things_together(hardness):
    for video in videos(6, hardness):
        frames = render(video)
        for t in range(1, video.n_frames):
            (x0, y0), (x1, y1) = video.camera[t - 1 : t + 1]
            right, down = x1 - x0, y1 - y0
            if video.scene_of[t] == video.scene_of[t - 1]:
                still = [{(s.x, s.y) for s in g.shots if s.frame == t - 1} for g in video.named if g.kind == "static"]
                moved = [{(s.x, s.y) for s in g.shots if s.frame == t} for g in video.named if g.kind == "static"]
                for before, after in zip(still, moved, strict=True):
                    assert not before or after == {(x + right, y + down) for x, y in before}
                empty = render(without(video))[t - 1 : t + 1]
                inner = empty[0, 20:-20, 20:-20]
                shifted = empty[1, 20 + down : SIDE - 20 + down, 20 + right : SIDE - 20 + right]
                assert (inner == shifted).all()
        assert (frames[0] != frames[1]).mean() > 0.3


def test_a_zoom_shrinks_ground_and_things_together():
    for video in videos(6, "zoom"):
        shares = np.array(video.zoom)
        small, large = int(shares.argmin()), int(shares.argmax())
        if video.scene_of[small] != video.scene_of[large] or video.scene_at(small) == "plain":
            continue  # nothing to compare but grain
        empty = render(without(video)).astype(float).mean(-1)
        share = shares[small] / shares[large]
        at = SIDE / 2 + (np.arange(20, SIDE - 20) + 0.5 - SIDE / 2) * share - 0.5
        low, part = np.floor(at).astype(int), at % 1
        rows = (1 - part)[:, None] * empty[small][low] + part[:, None] * empty[small][low + 1]
        shrunk = (1 - part) * rows[:, low] + part * rows[:, low + 1]
        inner = empty[large, 20:-20, 20:-20]
        assert abs(shrunk - inner).mean() < 0.4 * abs(empty[small, 20:-20, 20:-20] - inner).mean()


def test_a_fade_dims_all_of_the_frame():
    for video, plain in zip(videos(6, "fade"), videos(6), strict=True):
        full = render(plain)
        expected = full * np.array(video.light)[:, None, None, None]
        assert abs(render(video) - expected)[full < 255].max() <= 1  # what is brighter was cut off
        assert min(video.light) <= 0.5


def test_specks_flicker_and_spare_things():
    for clutter, plain in zip(videos(6, "clutter"), videos(6), strict=True):
        seen, quiet = render(clutter), render(plain)
        specks = (seen != quiet).any(-1)
        assert (specks.sum((1, 2)) > 0).mean() > 0.9
        assert not (specks[:-1] & specks[1:]).sum() > 0.2 * specks.sum()
        for thing in clutter.things:
            for shot in thing.shots:
                assert not window(specks[..., None], shot).any()


def test_noise_is_new_in_every_frame():
    video = without(next(video for video in videos(12, "noise") if not video.cuts))
    change = np.diff(render(video).astype(float), axis=0)
    assert 6 < change.std() < 20


def test_shapes_scenes_and_signs_all_look_different():
    masks = [mask_of(shape, 16) for shape in SHAPES]
    assert min(abs(a - b).mean() for i, a in enumerate(masks) for b in masks[:i]) > 0.08
    assert all(0.2 < mask.mean() < 0.9 and mask.shape == (16, 16) for mask in masks)
    signs, scenes = {}, {}
    for video in videos(120):
        frames = render(video)
        if sign := video.extra("sign"):
            signs.setdefault(sign.name, window(frames, sign.shots[0]).mean(-1) > 128)
        for t in (0, *video.cuts):
            scenes.setdefault(video.scene_at(t), frames[t])
    assert len(signs) == 8 and set(scenes) == set(SCENES)
    pictures = list(signs.values())
    assert min((a != b).sum() for i, a in enumerate(pictures) for b in pictures[:i]) >= 16  # four dots of 2 x 2 pixels


def test_looks_differ_from_one_video_to_the_next():
    one, other = (make_video(seed, split="train", hardness=HARDNESS["needle"]) for seed in TRAIN[:2])
    assert (render(one) != render(other)).mean() > 0.5
