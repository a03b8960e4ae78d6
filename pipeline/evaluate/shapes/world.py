"""What is seen in a video, where and when; no pixels yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeline.evaluate.shapes.hardness import Hardness, Kind

#: Pixels of a frame's side.
SIDE = 96
#: Lengths of videos by VideoMME's names for them, in frames; a frame is a second.
DURATIONS: Mapping[str, int] = {"short": 8, "medium": 16, "long": 32}
FRAMES = tuple(DURATIONS.values())
#: Kinds of things beside those that questions name by shape and colour: one that is seen in several corners, one whose
#: colour changes at a cut, and one that says a word.
ThingKind = Kind | Literal["copies", "changing", "sign"]


class Shot(NamedTuple):
    """A thing in one frame: its top left corner and side in pixels there, and its colour."""

    frame: int
    x: int
    y: int
    color: str
    size: int

    @property
    def corner(self) -> int:
        """The index into CORNERS of the corner that holds the middle of the thing."""
        right, down = 2 * self.x + self.size >= SIDE, 2 * self.y + self.size >= SIDE
        return 2 * down + right


@dataclass(frozen=True, kw_only=True)
class Thing:
    """A shape that is seen once or in several frames.

    Attributes:
        name: its shape, or what a sign says; no other thing of the video has it.
        kind: how it is seen.
        size: pixels of its side before any zoom.
        contrast: share of its colour that covers the ground, in (0, 1].
        shots: by frame; two in the same frame only of ``copies``.
    """

    name: str
    kind: ThingKind
    size: int
    contrast: float
    shots: tuple[Shot, ...]

    @property
    def first(self) -> int:
        """The frame in which the thing first appears."""
        return self.shots[0].frame

    @property
    def color(self) -> str:
        """The thing's colour, the first one where it changes."""
        return self.shots[0].color


@dataclass(frozen=True, kw_only=True)
class Video:
    """A video before rendering, with the words that its questions choose from.

    Attributes:
        seed: all of it follows from this, ``n_frames`` and ``hardness``.
        scenes: their grounds, names of SCENES, each another one.
        scene_of: index into ``scenes``, a frame each.
        named: the four things that questions name; no other thing has one of their colours, and their onsets differ.
        extras: other things, one of a kind at most.
        standing: whether the four stay until the end of the video.
        spare_colors: the four colours that no named thing has.
        scene_choices: four scenes, those of the video among them.
        sign_choices: four words, the sign's among them.
        camera: (right, down) pixels by which each frame is moved; shots have it in them already.
        zoom: the size of each frame's picture as a share of its full one; shots have it in them already.
        light: how bright each frame is, as a share.
        specks: spots a frame.
        noise: standard deviation of each frame's own noise.
    """

    seed: int
    hardness: Hardness
    n_frames: int
    scenes: tuple[str, ...]
    scene_of: tuple[int, ...]
    named: tuple[Thing, Thing, Thing, Thing]
    extras: tuple[Thing, ...]
    standing: bool
    spare_colors: tuple[str, ...]
    scene_choices: tuple[str, ...]
    sign_choices: tuple[str, ...]
    camera: tuple[tuple[int, int], ...]
    zoom: tuple[float, ...]
    light: tuple[float, ...]
    specks: int
    noise: float

    @property
    def things(self) -> tuple[Thing, ...]:
        """The named things, then the extra ones."""
        return (*self.named, *self.extras)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The frames that begin a scene, without the first."""
        return tuple(t for t in range(1, self.n_frames) if self.scene_of[t] != self.scene_of[t - 1])

    def extra(self, kind: ThingKind) -> Thing | None:
        """Return the extra thing of a kind, or None."""
        return next((thing for thing in self.extras if thing.kind == kind), None)

    def scene_at(self, frame: int) -> str:
        """Return the name of the scene that a frame is in."""
        return self.scenes[self.scene_of[frame]]
