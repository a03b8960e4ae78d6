"""A video from its seed: a story, then a place for each thing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.evaluate.shapes.draws import real, whole
from pipeline.evaluate.shapes.hardness import PLAIN, Hardness
from pipeline.evaluate.shapes.placing import (
    REACH,
    Floor,
    NoRoom,
    Place,
    camera_way,
    light_of,
    shaken,
    zoom_way,
    zoomed,
)
from pipeline.evaluate.shapes.seeds import SplitName, check_seed
from pipeline.evaluate.shapes.story import Role, Story, draw_story
from pipeline.evaluate.shapes.world import FRAMES, Shot, Thing, Video

#: Pixels of a sign: two to each of its dots, whatever the hardness, or nobody could read it.
SIGN_SIZE = 18
_STORY, _PLACES, _FILMING = 1, 5, 6  # the numbers of these generators among those of a seed
_ATTEMPTS = 100


def make_video(seed: int, *, split: SplitName, n_frames: int = 8, hardness: Hardness = PLAIN) -> Video:
    """Make the video of a seed; kinds of hardness share its story as far as they leave it unchanged.

    Args:
        seed: of ``split``: whoever wants a test video says so.
        n_frames: one of FRAMES.

    Raises ValueError for a seed of another split, or another length.
    """
    check_seed(seed, split)
    if n_frames not in FRAMES:
        raise ValueError(f"videos have {', '.join(map(str, FRAMES))} frames, got {n_frames}")
    story = draw_story(np.random.default_rng([seed, _STORY, n_frames]), n_frames, hardness)
    for attempt in range(_ATTEMPTS):
        rng = np.random.default_rng([seed, _PLACES, n_frames, attempt])
        try:
            return _staged(rng, story, seed, n_frames, hardness, attempt)
        except NoRoom:
            # Other places for the same story: another story would make crowded ones rare, and answers uneven.
            continue
    raise RuntimeError(f"seed {seed}, {hardness.name}: no room for all things in {_ATTEMPTS} attempts")


def _staged(
    rng: np.random.Generator, story: Story, seed: int, n_frames: int, hardness: Hardness, attempt: int
) -> Video:
    """Place a story's things and camera in the frames; each further attempt makes the things smaller, within limits."""
    low, high = hardness.size
    sizes = (low, max(low, high - attempt))
    pan = whole(rng, hardness.pan)
    camera = camera_way(rng, pan, n_frames)
    filming = np.random.default_rng([seed, _FILMING, n_frames])
    if shake := whole(filming, hardness.shake):
        camera = shaken(filming, shake, n_frames)
    zoom = zoom_way(filming, real(filming, hardness.zoom), n_frames)
    floor = Floor(rng, REACH if pan or shake else 0)

    def thing(role: Role) -> Thing:
        size, contrast = whole(rng, sizes), real(rng, hardness.contrast)
        size = SIGN_SIZE if role.kind == "sign" else size
        seen = (1.0,) * n_frames if role.kind == "sign" else zoom
        shots = _shots(role, size, floor.place(role, size), camera, seen)
        return Thing(name=role.name, kind=role.kind, size=size, contrast=contrast, shots=shots)

    extras = tuple(map(thing, story.extras))  # copies come first, because they cannot choose their corners
    one, two, three, four = map(thing, story.named)
    return Video(
        seed=seed,
        hardness=hardness,
        n_frames=n_frames,
        scenes=story.scenes,
        scene_of=tuple((sum(start <= t for start in story.starts) - 1) % len(story.scenes) for t in range(n_frames)),
        named=(one, two, three, four),
        extras=extras,
        standing=story.standing,
        spare_colors=story.spare_colors,
        scene_choices=story.scene_choices,
        sign_choices=story.sign_choices,
        camera=camera,
        zoom=zoom,
        light=light_of(story.starts, whole(filming, hardness.fade), n_frames),
        specks=whole(rng, hardness.specks),
        noise=real(rng, hardness.noise),
    )


def _shots(
    role: Role, size: int, places: Sequence[Sequence[Place]], camera: Sequence[Place], zoom: Sequence[float]
) -> tuple[Shot, ...]:
    """Return a thing's shots by frame, as the camera sees them."""
    shots = []
    for sight, at in zip(role.sights, places, strict=True):
        for t, place, color in zip(sight.frames, at, sight.colors, strict=True):
            x, y, seen = zoomed(place, size, zoom[t])
            shots.append(Shot(t, x + camera[t][0], y + camera[t][1], color, seen))
    return tuple(sorted(shots))
