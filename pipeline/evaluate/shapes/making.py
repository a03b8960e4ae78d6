"""Makes a video from its seed: first the story, then a free position for each thing in each frame.

Only what a question asks for tells its answer. Eight shapes and eight colors are split into halves: the four named
things take one half, the extras the other. Colors, onsets (in distinct frames) and the order of scenes are drawn
independently.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pipeline.evaluate.shapes.world import (
    COLORS,
    FRAMES,
    PLAIN,
    SCENES,
    SHAPES,
    SIDE,
    SIGNS,
    Hardness,
    Kind,
    Shot,
    SplitName,
    Thing,
    ThingKind,
    Video,
    check_seed,
)

T = TypeVar("T")


def shuffle(rng: np.random.Generator, items: Sequence[T]) -> list[T]:
    """Return the items in random order, as a new list."""
    return [items[i] for i in rng.permutation(len(items)).tolist()]


def draw_item(rng: np.random.Generator, items: Sequence[T]) -> T:
    """Draw one of the items."""
    return items[int(rng.integers(len(items)))]


def draw_integer(rng: np.random.Generator, limits: tuple[int, int]) -> int:
    """Draw an integer from a range, both ends included."""
    return int(rng.integers(limits[0], limits[1] + 1))


def draw_float(rng: np.random.Generator, limits: tuple[float, float]) -> float:
    """Draw a float uniformly from a range."""
    return float(rng.uniform(*limits))


_EXTRAS = {8: 2, 16: 2, 32: 3}
_MAX_SCENES = {8: 3, 16: 4, 32: 4}


@dataclass(frozen=True)
class Sight:
    """An appearance of a thing during consecutive frames.

    Attributes:
        colors: the color in each frame.
        corner: index into CORNERS of the quadrant it must lie in; None: any.
        walk: number of frames of its path if no cut ends it earlier; None: it stands still.
    """

    frames: range
    colors: tuple[str, ...]
    corner: int | None = None
    walk: int | None = None


@dataclass(frozen=True)
class Role:
    """A thing of a story without positions. ``sights`` has one entry, except for copies."""

    name: str
    kind: ThingKind
    sights: tuple[Sight, ...]


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happens in a video, before positions: things, scenes, and the choices of its questions.

    Attributes:
        starts: the first frame of each scene, ascending from 0.
        scenes: distinct scenes, which take turns if there are more ``starts``.
    """

    starts: tuple[int, ...]
    scenes: tuple[str, ...]
    named: tuple[Role, ...]
    extras: tuple[Role, ...]
    standing: bool
    spare_colors: tuple[str, ...]
    scene_choices: tuple[str, ...]
    sign_choices: tuple[str, ...]


def draw_story(rng: np.random.Generator, n_frames: int, hardness: Hardness) -> Story:
    """Draw the scenes, the things and the choices of a video with ``n_frames`` frames (8, 16 or 32).

    Two scenes take turns with ``hardness.back``; otherwise all differ.
    """
    scenes, shapes, colors, signs = (shuffle(rng, names) for names in (SCENES, SHAPES, COLORS, SIGNS))
    standing = bool(rng.random() < hardness.standing)
    plot = _Plot(rng, hardness, n_frames, _draw_scene_starts(rng, n_frames, hardness))
    return Story(
        starts=plot.starts,
        scenes=tuple(scenes[: 2 if hardness.back else len(plot.starts)]),
        named=tuple(plot.named(shapes[:4], colors[:4], standing)),
        extras=tuple(plot.extras(shapes[4:], colors[4:], signs[0])),
        standing=standing,
        spare_colors=tuple(colors[4:]),
        scene_choices=tuple(scenes[:4]),
        sign_choices=tuple(signs[:4]),
    )


def _draw_scene_starts(rng: np.random.Generator, n_frames: int, hardness: Hardness) -> tuple[int, ...]:
    """Draw the first frame of each scene, ascending from 0.

    Each scene lasts at least two frames and an eighth of the video. Their number is drawn from ``hardness.scenes``,
    with the upper end lowered to what fits (with ``back``) or to ``_MAX_SCENES``, but not below the lower end.
    """
    low, high = hardness.scenes
    least = max(2, n_frames // 8)
    most = n_frames // least if hardness.back else _MAX_SCENES[n_frames]
    count = draw_integer(rng, (low, max(low, min(high, most))))
    spare = n_frames - count * least
    bars = np.sort(rng.choice(spare + count - 1, count - 1, replace=False))
    starts = bars - np.arange(count - 1) + least * np.arange(1, count)
    return (0, *starts.tolist())


@dataclass(frozen=True)
class _Plot:
    """Draws a story's things, given the first frames of the scenes."""

    rng: np.random.Generator
    hardness: Hardness
    n_frames: int
    starts: tuple[int, ...]

    def named(self, shapes: Sequence[str], colors: Sequence[str], standing: bool) -> list[Role]:
        """Draw the four named things, with distinct onset frames.

        If ``standing``, all are static and stay until the end of the video. Otherwise they have the kinds of
        ``hardness``: static ones stay until their scene ends, and moving ones (3 or 4 frames) and brief ones
        (``hardness.brief``) at most until then.
        """
        onsets = self.rng.permutation(self.n_frames)[:4].tolist()
        kinds: Sequence[Kind] = ("static",) * 4 if standing else self.hardness.kinds
        roles = []
        for shape, color, onset, kind in zip(shapes, colors, onsets, kinds, strict=True):
            end = self.n_frames if standing else self._find_scene_end(onset)
            walk = draw_integer(self.rng, (3, 4)) if kind == "moving" else None
            moment = draw_integer(self.rng, self.hardness.brief) if kind == "brief" else self.n_frames
            frames = range(onset, min(end, onset + (walk or moment)))
            roles.append(Role(shape, kind, (Sight(frames, (color,) * len(frames), walk=walk),)))
        return roles

    def extras(self, shapes: Sequence[str], colors: Sequence[str], sign: str) -> list[Role]:
        """Draw the extra things: ``_EXTRAS`` random kinds out of changing, copies and sign, returned in this order.

        A video with a single scene has no changing thing.
        """
        kinds = ["copies", "sign", *(["changing"] if len(self.starts) > 1 else [])]
        kinds_chosen = shuffle(self.rng, kinds)[: _EXTRAS[self.n_frames]]
        roles = []
        if "changing" in kinds_chosen:
            roles.append(self._draw_changing_role(shapes[0], colors[0], colors[1]))
        if "copies" in kinds_chosen:
            roles.append(self._copies(shapes[1], colors[2]))
        if "sign" in kinds_chosen:
            roles.append(Role(sign, "sign", (self._draw_brief_sight("white"),)))
        return roles

    def _draw_changing_role(self, shape: str, before: str, after: str) -> Role:
        """Draw a thing that appears one to four frames before a random cut and stays one to four frames after it.

        It has the color ``before`` up to the cut, then ``after``, and never leaves these two scenes.
        """
        scene = int(self.rng.integers(1, len(self.starts)))
        cut = self.starts[scene]
        first = max(self.starts[scene - 1], cut - draw_integer(self.rng, (1, 4)))
        frames = range(first, min(self._find_scene_end(cut), cut + draw_integer(self.rng, (1, 4))))
        colors = tuple(before if frame < cut else after for frame in frames)
        return Role(shape, "changing", (Sight(frames, colors),))

    def _copies(self, shape: str, color: str) -> Role:
        """Draw copies of a thing in one to four distinct corners, each at its own random time."""
        corners = self.rng.permutation(4)[: draw_integer(self.rng, (1, 4))].tolist()
        return Role(shape, "copies", tuple(self._draw_brief_sight(color, corner) for corner in corners))

    def _draw_brief_sight(self, color: str, corner: int | None = None) -> Sight:
        """Draw a sight that lasts as long as a brief thing, and ends with its scene at the latest."""
        onset = int(self.rng.integers(self.n_frames))
        frames = range(onset, min(self._find_scene_end(onset), onset + draw_integer(self.rng, self.hardness.brief)))
        return Sight(frames, (color,) * len(frames), corner)

    def _find_scene_end(self, frame: int) -> int:
        """Return the frame after the last frame of the scene that contains ``frame``."""
        return next((start for start in self.starts if start > frame), self.n_frames)


#: The largest camera offset in pixels. With a moving camera, things keep this distance from the border of their
#: quadrant, so that no movement carries them out of it.
REACH = 6
_BREATH = 8  # frames per cycle of a zoom, out and back
_HALF = SIDE // 2
_APART = 2  # minimum distance of two things in pixels
_FAR = 30  # minimum distance that a moving thing covers, in pixels
_TRIES = 200
Place = tuple[int, int]


class NoRoom(Exception):  # noqa: N818
    """A thing does not fit between the things that were placed before."""


class OccupiedSquares:
    """The occupied squares in each frame, in coordinates without camera movement.

    ``margin`` is the distance in pixels of a thing to the border of its quadrant, or of a moving thing to that of the
    frame.
    """

    def __init__(self, rng: np.random.Generator, margin: int) -> None:
        self._rng = rng
        self._margin = margin
        self._occupied: dict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def place(self, role: Role, size: int) -> list[list[Place]]:
        """Draw free positions for a thing of ``size`` pixels, (x, y) per sight and frame, and mark them as occupied.

        Raises:
            NoRoom: a sight does not fit. Earlier sights of the thing stay marked as occupied.
        """
        return [self._draw_sight_positions(sight, size) for sight in role.sights]

    def _draw_sight_positions(self, sight: Sight, size: int) -> list[Place]:
        """Draw a free position in every frame of a sight, and mark these as occupied.

        Raises:
            NoRoom: none of ``_TRIES`` random positions or paths was free.
        """
        for _ in range(_TRIES):
            if sight.walk is None:
                places = self._draw_standing_position(size, sight.corner) * len(sight.frames)
            else:
                places = self._draw_path(size, sight.walk)[: len(sight.frames)]
            if self._is_free(sight.frames, places, size):
                for frame, (x, y) in zip(sight.frames, places, strict=True):
                    self._occupied[frame].append((x, y, size))
                return places
        raise NoRoom

    def _draw_standing_position(self, size: int, corner: int | None) -> list[Place]:
        """Draw a position inside a quadrant of the frame, as a list of one; ``corner`` None draws the quadrant too."""
        at = int(self._rng.integers(4)) if corner is None else corner
        x, y = self._rng.integers(self._margin, _HALF - size - self._margin + 1, 2).tolist()
        return [(x + _HALF * (at % 2), y + _HALF * (at // 2))]

    def _draw_path(self, size: int, n_frames: int) -> list[Place]:
        """Draw a straight path, a position per frame, spanning at least ``_FAR`` pixels horizontally or vertically."""
        while True:
            start, end = self._rng.integers(self._margin, SIDE - size - self._margin + 1, (2, 2))
            if np.abs(end - start).max() >= _FAR:
                break
        way = np.rint(start + (end - start) * np.linspace(0, 1, n_frames)[:, None]).astype(int)
        return [(x, y) for x, y in way.tolist()]

    def _is_free(self, frames: Sequence[int], places: Sequence[Place], size: int) -> bool:
        """Return True if a thing at these ``places`` stays at least ``_APART`` pixels away from all others."""
        return all(
            x >= other_x + other_size + _APART
            or other_x >= x + size + _APART
            or y >= other_y + other_size + _APART
            or other_y >= y + size + _APART
            for frame, (x, y) in zip(frames, places, strict=True)
            for other_x, other_y, other_size in self._occupied[frame]
        )


def draw_pan_offsets(rng: np.random.Generator, pan: int, n_frames: int) -> tuple[Place, ...]:
    """Return the camera offset (right, down) per frame: back and forth within REACH pixels, from a random start.

    ``pan`` is the horizontal speed in pixels per frame; the vertical speed is half of it. With 0, all offsets are 0,
    but as many random numbers are drawn.
    """
    start = rng.integers(4 * REACH, size=2)
    turn = rng.choice((-1, 1), size=2)
    if pan == 0:
        return ((0, 0),) * n_frames
    times = np.arange(n_frames)
    distance = start[:, None] + np.stack([pan * times, pan * times // 2])
    swing = REACH - np.abs((distance + REACH) % (4 * REACH) - 2 * REACH)
    return tuple((x, y) for x, y in (turn[:, None] * swing).T.tolist())


def draw_shake_offsets(rng: np.random.Generator, shake: int, n_frames: int) -> tuple[Place, ...]:
    """Draw an independent camera offset (right, down) per frame, from -``shake`` to ``shake`` pixels each."""
    return tuple((x, y) for x, y in rng.integers(-shake, shake + 1, (n_frames, 2)).tolist())


def draw_zoom_scales(rng: np.random.Generator, smallest: float, n_frames: int) -> tuple[float, ...]:
    """Return the scale of the picture per frame: a cosine between ``smallest`` and 1 with a random phase."""
    turns = np.arange(n_frames) / _BREATH + rng.random()
    return tuple((smallest + (1 - smallest) * (0.5 + 0.5 * np.cos(2 * np.pi * turns))).tolist())


def zoom_in(place: Place, size: int, share: float) -> tuple[int, int, int]:
    """Scale a thing's square about the center of the frame, and return its new (x, y, size) in whole pixels."""
    x, y = (round(SIDE / 2 + (at + size / 2 - SIDE / 2) * share - int(size * share) / 2) for at in place)
    return x, y, int(size * share)


def compute_brightness(starts: Sequence[int], fade: int, n_frames: int) -> tuple[float, ...]:
    """Return the brightness of each frame, in (0, 1]: each scene fades in and out over ``fade`` frames."""
    ends = (*starts[1:], n_frames)
    steps = [
        min(t - start, end - 1 - t, fade) for start, end in zip(starts, ends, strict=True) for t in range(start, end)
    ]
    return tuple((step + 1) / (fade + 1) for step in steps)


#: Side of a sign in pixels: two per dot, independent of the hardness, because it would be unreadable otherwise.
SIGN_SIZE = 18
_STORY, _PLACES, _FILMING = 1, 5, 6  # distinguish these random generators from the others of a seed
_ATTEMPTS = 100


def make_video(seed: int, *, split: SplitName, n_frames: int = 8, hardness: Hardness = PLAIN) -> Video:
    """Make the description of the video of a seed, always the same.

    Args:
        seed: a seed of ``split``. Naming the split prevents making a test video by accident.
        n_frames: one of FRAMES.

    Raises:
        ValueError: the seed is not of the split, or ``n_frames`` is not one of FRAMES.
        RuntimeError: the things do not fit after ``_ATTEMPTS`` attempts.
    """
    check_seed(seed, split)
    if n_frames not in FRAMES:
        raise ValueError(f"videos have {', '.join(map(str, FRAMES))} frames, got {n_frames}")
    story = draw_story(np.random.default_rng([seed, _STORY, n_frames]), n_frames, hardness)
    for attempt in range(_ATTEMPTS):
        rng = np.random.default_rng([seed, _PLACES, n_frames, attempt])
        try:
            return _stage_story(rng, story, seed, n_frames, hardness, attempt)
        except NoRoom:
            # Only positions are drawn again: a new story would make crowded stories rare and bias the answers.
            continue
    raise RuntimeError(f"seed {seed}, {hardness.name}: not all things fit in {_ATTEMPTS} attempts")


def _stage_story(
    rng: np.random.Generator, story: Story, seed: int, n_frames: int, hardness: Hardness, attempt: int
) -> Video:
    """Draw the positions of a story's things, the camera and the looks, and return the video.

    Each failed ``attempt`` lowers the largest size by a pixel, down to the smallest size.

    Raises:
        NoRoom: a thing does not fit.
    """
    low, high = hardness.size
    sizes = (low, max(low, high - attempt))
    pan = draw_integer(rng, hardness.pan)
    camera = draw_pan_offsets(rng, pan, n_frames)
    filming = np.random.default_rng([seed, _FILMING, n_frames])
    if shake := draw_integer(filming, hardness.shake):
        camera = draw_shake_offsets(filming, shake, n_frames)
    zoom = draw_zoom_scales(filming, draw_float(filming, hardness.zoom), n_frames)
    floor = OccupiedSquares(rng, REACH if pan or shake else 0)

    def draw_thing(role: Role) -> Thing:
        """Draw the size, contrast and positions of a role, and occupy these in ``floor``; signs ignore the zoom."""
        size = draw_integer(rng, sizes)
        contrast = draw_float(rng, hardness.contrast)
        size = SIGN_SIZE if role.kind == "sign" else size
        scales = (1.0,) * n_frames if role.kind == "sign" else zoom
        shots = _make_shots(role, size, floor.place(role, size), camera, scales)
        return Thing(name=role.name, kind=role.kind, size=size, contrast=contrast, shots=shots)

    extras = tuple(map(draw_thing, story.extras))  # before named things, because copies cannot choose their corners
    first, second, third, fourth = map(draw_thing, story.named)
    return Video(
        seed=seed,
        hardness=hardness,
        n_frames=n_frames,
        scenes=story.scenes,
        scene_of=tuple((sum(start <= t for start in story.starts) - 1) % len(story.scenes) for t in range(n_frames)),
        named=(first, second, third, fourth),
        extras=extras,
        standing=story.standing,
        spare_colors=story.spare_colors,
        scene_choices=story.scene_choices,
        sign_choices=story.sign_choices,
        camera=camera,
        zoom=zoom,
        light=compute_brightness(story.starts, draw_integer(filming, hardness.fade), n_frames),
        specks=draw_integer(rng, hardness.specks),
        noise=draw_float(rng, hardness.noise),
    )


def _make_shots(
    role: Role, size: int, places: Sequence[Sequence[Place]], camera: Sequence[Place], zoom: Sequence[float]
) -> tuple[Shot, ...]:
    """Return a thing's shots sorted by frame, with camera and zoom applied to its top left corners ``places``."""
    shots = []
    for sight, at in zip(role.sights, places, strict=True):
        for t, place, color in zip(sight.frames, at, sight.colors, strict=True):
            x, y, visible_size = zoom_in(place, size, zoom[t])
            shots.append(Shot(t, x + camera[t][0], y + camera[t][1], color, visible_size))
    return tuple(sorted(shots))
