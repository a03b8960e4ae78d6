"""What happens in a video: which things come when and go when, in which scenes; not yet where.

What a question asks for is drawn so that nothing else that can be read tells it. The eight shapes and the eight colours
are halved: the four named things have one half, and which of these shapes has which of these colours is drawn apart
from all else, as are onsets (four different frames, any of them alike) and the order of scenes. Extras have the other
halves. So all questions about colours can offer the same four, and no question's words, choices or neighbours say
anything about the answer of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pipeline.evaluate.shapes.world import COLORS, SCENES, SHAPES, SIGNS, Hardness, Kind, ThingKind

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
