"""Frames show what the video says, to an eye and after H.264."""

import hashlib
import os
from dataclasses import replace

import numpy as np
import pytest

from pipeline.evaluate.shapes.render import RGB, render, render_mask
from pipeline.evaluate.shapes.world import COLORS, SIDE
from tests.interpreter import run_python
from tests.pipeline.evaluate.shapes.shape_videos import through_h264, videos

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
