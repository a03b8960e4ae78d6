"""Where the things of a story are, so that none touches another, and the way of the camera."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from pipeline.evaluate.shapes.story import Role, Sight
from pipeline.evaluate.shapes.world import SIDE

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
        self._taken: dict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def place(self, role: Role, size: int) -> list[list[Place]]:
        """Return the top left corners of a thing of ``size`` pixels, per sight and frame. Raise NoRoom."""
        return [self._place(sight, size) for sight in role.sights]

    def _place(self, sight: Sight, size: int) -> list[Place]:
        """Draw a free place in every frame of one sight. Raise NoRoom."""
        for _ in range(_TRIES):
            if sight.walk is None:
                places = self._stand(size, sight.corner) * len(sight.frames)
            else:
                places = self._walk(size, sight.walk)[: len(sight.frames)]
            if self._free(sight.frames, places, size):
                for frame, (x, y) in zip(sight.frames, places, strict=True):
                    self._taken[frame].append((x, y, size))
                return places
        raise NoRoom

    def _stand(self, size: int, corner: int | None) -> list[Place]:
        """Draw one place that lies wholly in a corner."""
        at = int(self._rng.integers(4)) if corner is None else corner
        x, y = self._rng.integers(self._margin, _HALF - size - self._margin + 1, 2).tolist()
        return [(x + _HALF * (at % 2), y + _HALF * (at // 2))]

    def _walk(self, size: int, n_frames: int) -> list[Place]:
        """Draw a place per frame on a straight line."""
        while True:
            start, end = self._rng.integers(self._margin, SIDE - size - self._margin + 1, (2, 2))
            if np.abs(end - start).max() >= _FAR:
                break
        way = np.rint(start + (end - start) * np.linspace(0, 1, n_frames)[:, None]).astype(int)
        return [(x, y) for x, y in way.tolist()]

    def _free(self, frames: Sequence[int], places: Sequence[Place], size: int) -> bool:
        """Return whether a thing at these places keeps its distance to all others in these frames."""
        return all(
            x >= other_x + other + _APART
            or other_x >= x + size + _APART
            or y >= other_y + other + _APART
            or other_y >= y + size + _APART
            for frame, (x, y) in zip(frames, places, strict=True)
            for other_x, other_y, other in self._taken[frame]
        )


def camera_way(rng: np.random.Generator, pan: int, n_frames: int) -> tuple[Place, ...]:
    """Return the camera's (right, down) per frame: to and fro by ``pan`` pixels, vertically at half the speed."""
    start, turn = rng.integers(4 * REACH, size=2), rng.choice((-1, 1), size=2)
    if pan == 0:
        return ((0, 0),) * n_frames
    times = np.arange(n_frames)
    gone = start[:, None] + np.stack([pan * times, pan * times // 2])
    swing = REACH - np.abs((gone + REACH) % (4 * REACH) - 2 * REACH)
    return tuple((x, y) for x, y in (turn[:, None] * swing).T.tolist())


def shaken(rng: np.random.Generator, shake: int, n_frames: int) -> tuple[Place, ...]:
    """Draw (right, down) per frame, up to ``shake`` pixels to each side."""
    return tuple((x, y) for x, y in rng.integers(-shake, shake + 1, (n_frames, 2)).tolist())


def zoom_way(rng: np.random.Generator, smallest: float, n_frames: int) -> tuple[float, ...]:
    """Return the picture's size per frame as a share, to and fro between ``smallest`` and 1."""
    turns = np.arange(n_frames) / _BREATH + rng.random()
    return tuple((smallest + (1 - smallest) * (0.5 + 0.5 * np.cos(2 * np.pi * turns))).tolist())


def zoomed(place: Place, size: int, share: float) -> tuple[int, int, int]:
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
