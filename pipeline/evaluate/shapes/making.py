"""A video from its seed: what happens in it, then a place for each thing, so that none touches another.

What a question asks for is drawn so that nothing else that can be read tells it. The eight shapes and the eight colours
are halved: the four named things have one half, and which of these shapes has which of these colours is drawn apart
from all else, as are onsets (four different frames, any of them alike) and the order of scenes. Extras have the other
halves. So all questions about colours can offer the same four, and no question's words, choices or neighbours say
anything about the answer of another.
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
    """Return the items in a random order."""
    return [items[i] for i in rng.permutation(len(items)).tolist()]


def one_of(rng: np.random.Generator, items: Sequence[T]) -> T:
    """Draw one item."""
    return items[int(rng.integers(len(items)))]


def whole(rng: np.random.Generator, limits: tuple[int, int]) -> int:
    """Draw a whole number from a range, both ends included."""
    return int(rng.integers(limits[0], limits[1] + 1))


def real(rng: np.random.Generator, limits: tuple[float, float]) -> float:
    """Draw a number from a range, uniformly."""
    return float(rng.uniform(*limits))


_EXTRAS = {8: 2, 16: 2, 32: 3}
_MAX_SCENES = {8: 3, 16: 4, 32: 4}


@dataclass(frozen=True)
class Sight:
    """A thing's appearance during successive frames.

    Attributes:
        frames: when.
        colors: one a frame.
        corner: index into CORNERS where it must be; None: anywhere.
        walk: frames that its way across the video would take were there no cut; None: it stands.
    """

    frames: range
    colors: tuple[str, ...]
    corner: int | None = None
    walk: int | None = None


@dataclass(frozen=True)
class Role:
    """A thing of the story and its sights."""

    name: str
    kind: ThingKind
    sights: tuple[Sight, ...]


@dataclass(frozen=True, kw_only=True)
class Story:
    """The story of a video: its things, its scenes, and the words that questions offer as choices."""

    starts: tuple[int, ...]
    scenes: tuple[str, ...]
    named: tuple[Role, ...]
    extras: tuple[Role, ...]
    standing: bool
    spare_colors: tuple[str, ...]
    scene_choices: tuple[str, ...]
    sign_choices: tuple[str, ...]


def draw_story(rng: np.random.Generator, n_frames: int, hardness: Hardness) -> Story:
    """Draw the story of a video of ``n_frames`` frames."""
    scenes, shapes, colors, signs = (shuffle(rng, names) for names in (SCENES, SHAPES, COLORS, SIGNS))
    standing = bool(rng.random() < hardness.standing)
    plot = _Plot(rng, hardness, n_frames, _starts(rng, n_frames, hardness))
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


def _starts(rng: np.random.Generator, n_frames: int, hardness: Hardness) -> tuple[int, ...]:
    """Draw the first frames of scenes that last at least an eighth of the video and two frames; the first is 0."""
    low, high = hardness.scenes
    least = max(2, n_frames // 8)
    most = n_frames // least if hardness.back else _MAX_SCENES[n_frames]
    count = whole(rng, (low, max(low, min(high, most))))
    spare = n_frames - count * least
    bars = np.sort(rng.choice(spare + count - 1, count - 1, replace=False))
    starts = bars - np.arange(count - 1) + least * np.arange(1, count)
    return (0, *starts.tolist())


@dataclass(frozen=True)
class _Plot:
    """The generator of a story's things, given the frames and scenes."""

    rng: np.random.Generator
    hardness: Hardness
    n_frames: int
    starts: tuple[int, ...]

    def named(self, shapes: Sequence[str], colors: Sequence[str], standing: bool) -> list[Role]:
        """Draw the roles of the four named things: when they appear, and how long they stay."""
        onsets = self.rng.permutation(self.n_frames)[:4].tolist()
        kinds: Sequence[Kind] = ("static",) * 4 if standing else self.hardness.kinds
        roles = []
        for shape, color, onset, kind in zip(shapes, colors, onsets, kinds, strict=True):
            end = self.n_frames if standing else self._scene_end(onset)
            walk = whole(self.rng, (3, 4)) if kind == "moving" else None
            moment = whole(self.rng, self.hardness.brief) if kind == "brief" else self.n_frames
            frames = range(onset, min(end, onset + (walk or moment)))
            roles.append(Role(shape, kind, (Sight(frames, (color,) * len(frames), walk=walk),)))
        return roles

    def extras(self, shapes: Sequence[str], colors: Sequence[str], sign: str) -> list[Role]:
        """Draw up to ``_EXTRAS`` of: a thing that changes at a cut, copies of one thing in several corners, a sign."""
        kinds = ["copies", "sign", *(["changing"] if len(self.starts) > 1 else [])]
        kinds_chosen = shuffle(self.rng, kinds)[: _EXTRAS[self.n_frames]]
        roles = []
        if "changing" in kinds_chosen:
            roles.append(self._changing(shapes[0], colors[0], colors[1]))
        if "copies" in kinds_chosen:
            roles.append(self._copies(shapes[1], colors[2]))
        if "sign" in kinds_chosen:
            roles.append(Role(sign, "sign", (self._moment("white"),)))
        return roles

    def _changing(self, shape: str, before: str, after: str) -> Role:
        """Draw a thing on both sides of a cut, up to four frames each, in another colour after it."""
        scene = int(self.rng.integers(1, len(self.starts)))
        cut = self.starts[scene]
        first = max(self.starts[scene - 1], cut - whole(self.rng, (1, 4)))
        frames = range(first, min(self._scene_end(cut), cut + whole(self.rng, (1, 4))))
        colors = tuple(before if frame < cut else after for frame in frames)
        return Role(shape, "changing", (Sight(frames, colors),))

    def _copies(self, shape: str, color: str) -> Role:
        """Draw copies in one to four corners, each at a moment of its own."""
        corners = self.rng.permutation(4)[: whole(self.rng, (1, 4))].tolist()
        return Role(shape, "copies", tuple(self._moment(color, corner) for corner in corners))

    def _moment(self, color: str, corner: int | None = None) -> Sight:
        """Draw a sight within one scene that lasts as long as brief things do."""
        onset = int(self.rng.integers(self.n_frames))
        frames = range(onset, min(self._scene_end(onset), onset + whole(self.rng, self.hardness.brief)))
        return Sight(frames, (color,) * len(frames), corner)

    def _scene_end(self, frame: int) -> int:
        """Return the frame after the last one of the scene that ``frame`` is in."""
        return next((start for start in self.starts if start > frame), self.n_frames)


#: Pixels that the camera goes to each side, and that things then keep from the border of their corner, so that no way
#: of it carries one out of its corner.
REACH = 6
_BREATH = 8  # frames in which a zoom goes out and back
_HALF = SIDE // 2
_APART = 2  # pixels between two things
_FAR = 30  # pixels that a moving thing goes, at least
_TRIES = 200
Place = tuple[int, int]


class NoRoom(Exception):  # noqa: N818
    """An error: a thing finds no free place among those placed before."""


class Floor:
    """The places that things occupy in each frame, before the camera moves.

    Args:
        margin: pixels that things keep from the border of their corner.
    """

    def __init__(self, rng: np.random.Generator, margin: int) -> None:
        self._rng, self._margin = rng, margin
        self._occupied: dict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def place(self, role: Role, size: int) -> list[list[Place]]:
        """Draw the top left corners of a thing of ``size`` pixels, per sight and frame, and mark them as occupied.

        Raises NoRoom; the places of earlier sights stay occupied then.
        """
        return [self._place(sight, size) for sight in role.sights]

    def _place(self, sight: Sight, size: int) -> list[Place]:
        """Draw a free place in every frame of one sight, and mark it as occupied. Raise NoRoom after ``_TRIES``."""
        for _ in range(_TRIES):
            if sight.walk is None:
                places = self._stand(size, sight.corner) * len(sight.frames)
            else:
                places = self._walk(size, sight.walk)[: len(sight.frames)]
            if self._free(sight.frames, places, size):
                for frame, (x, y) in zip(sight.frames, places, strict=True):
                    self._occupied[frame].append((x, y, size))
                return places
        raise NoRoom

    def _stand(self, size: int, corner: int | None) -> list[Place]:
        """Draw a place that lies wholly in a corner, as a list of one; a ``corner`` of None is drawn too."""
        at = int(self._rng.integers(4)) if corner is None else corner
        x, y = self._rng.integers(self._margin, _HALF - size - self._margin + 1, 2).tolist()
        return [(x + _HALF * (at % 2), y + _HALF * (at // 2))]

    def _walk(self, size: int, n_frames: int) -> list[Place]:
        """Draw a place per frame on a straight line, at least ``_FAR`` pixels long in one direction."""
        while True:
            start, end = self._rng.integers(self._margin, SIDE - size - self._margin + 1, (2, 2))
            if np.abs(end - start).max() >= _FAR:
                break
        way = np.rint(start + (end - start) * np.linspace(0, 1, n_frames)[:, None]).astype(int)
        return [(x, y) for x, y in way.tolist()]

    def _free(self, frames: Sequence[int], places: Sequence[Place], size: int) -> bool:
        """Return True if a thing at these places keeps its distance to all others in these frames."""
        return all(
            x >= other_x + other_size + _APART
            or other_x >= x + size + _APART
            or y >= other_y + other_size + _APART
            or other_y >= y + size + _APART
            for frame, (x, y) in zip(frames, places, strict=True)
            for other_x, other_y, other_size in self._occupied[frame]
        )


def camera_way(rng: np.random.Generator, pan: int, n_frames: int) -> tuple[Place, ...]:
    """Return the camera's (right, down) per frame: to and fro by ``pan`` pixels, vertically at half the speed.

    A ``pan`` of 0 takes as many numbers from ``rng``.
    """
    start, turn = rng.integers(4 * REACH, size=2), rng.choice((-1, 1), size=2)
    if pan == 0:
        return ((0, 0),) * n_frames
    times = np.arange(n_frames)
    distance = start[:, None] + np.stack([pan * times, pan * times // 2])
    swing = REACH - np.abs((distance + REACH) % (4 * REACH) - 2 * REACH)
    return tuple((x, y) for x, y in (turn[:, None] * swing).T.tolist())


def shake_way(rng: np.random.Generator, shake: int, n_frames: int) -> tuple[Place, ...]:
    """Draw (right, down) per frame, up to ``shake`` pixels to each side."""
    return tuple((x, y) for x, y in rng.integers(-shake, shake + 1, (n_frames, 2)).tolist())


def zoom_way(rng: np.random.Generator, smallest: float, n_frames: int) -> tuple[float, ...]:
    """Return the picture's size per frame as a share, to and fro between ``smallest`` and 1."""
    turns = np.arange(n_frames) / _BREATH + rng.random()
    return tuple((smallest + (1 - smallest) * (0.5 + 0.5 * np.cos(2 * np.pi * turns))).tolist())


def zoom_in(place: Place, size: int, share: float) -> tuple[int, int, int]:
    """Scale a thing's (x, y, size) around the picture's middle; things that did not touch still do not."""
    x, y = (round(SIDE / 2 + (at + size / 2 - SIDE / 2) * share - int(size * share) / 2) for at in place)
    return x, y, int(size * share)


def light_of(starts: Sequence[int], fade: int, n_frames: int) -> tuple[float, ...]:
    """Return each frame's brightness as a share: scenes fade in and out over ``fade`` frames each."""
    ends = (*starts[1:], n_frames)
    steps = [
        min(t - start, end - 1 - t, fade) for start, end in zip(starts, ends, strict=True) for t in range(start, end)
    ]
    return tuple((step + 1) / (fade + 1) for step in steps)


#: Pixels of a sign: two to each of its dots, whatever the hardness, or nobody could read it.
SIGN_SIZE = 18
_STORY, _PLACES, _FILMING = 1, 5, 6  # the numbers of these generators among those of a seed
_ATTEMPTS = 100


def make_video(seed: int, *, split: SplitName, n_frames: int = 8, hardness: Hardness = PLAIN) -> Video:
    """Make the video of a seed; kinds of hardness share its story as far as they leave it unchanged.

    Args:
        seed: of ``split``; a test video is made only where its split is named.
        n_frames: one of FRAMES.

    Raises ValueError for a seed of another split, or another length; RuntimeError if the things do not fit.
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
            # Only the places are drawn again: another story would make crowded stories rare, and answers uneven.
            continue
    raise RuntimeError(f"seed {seed}, {hardness.name}: not all things fit in {_ATTEMPTS} attempts")


def _stage_story(
    rng: np.random.Generator, story: Story, seed: int, n_frames: int, hardness: Hardness, attempt: int
) -> Video:
    """Place a story's things and camera in the frames; each further attempt makes the things smaller, within limits.

    Raises NoRoom.
    """
    low, high = hardness.size
    sizes = (low, max(low, high - attempt))
    pan = whole(rng, hardness.pan)
    camera = camera_way(rng, pan, n_frames)
    filming = np.random.default_rng([seed, _FILMING, n_frames])
    if shake := whole(filming, hardness.shake):
        camera = shake_way(filming, shake, n_frames)
    zoom = zoom_way(filming, real(filming, hardness.zoom), n_frames)
    floor = Floor(rng, REACH if pan or shake else 0)

    def thing(role: Role) -> Thing:
        size, contrast = whole(rng, sizes), real(rng, hardness.contrast)
        size = SIGN_SIZE if role.kind == "sign" else size
        scales = (1.0,) * n_frames if role.kind == "sign" else zoom
        shots = _shots(role, size, floor.place(role, size), camera, scales)
        return Thing(name=role.name, kind=role.kind, size=size, contrast=contrast, shots=shots)

    extras = tuple(map(thing, story.extras))  # copies come first, because they cannot choose their corners
    first, second, third, fourth = map(thing, story.named)
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
            x, y, visible_size = zoom_in(place, size, zoom[t])
            shots.append(Shot(t, x + camera[t][0], y + camera[t][1], color, visible_size))
    return tuple(sorted(shots))
