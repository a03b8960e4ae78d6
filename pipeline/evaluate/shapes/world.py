"""What is seen in a video, where and when; no pixels yet. Its words, its seeds, and how hard it is to look at.

Training, development and test never share a video. Methods and models are tuned on development videos. Those of the
test are looked at once a result that is published: they are made only where the name of their split is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from pipeline.errors import UsageError

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "moon")
COLORS = ("red", "green", "blue", "yellow", "purple", "cyan", "orange", "white")
SCENES = ("stripes", "checker", "dots", "bricks", "waves", "plain")
CORNERS = ("top-left", "top-right", "bottom-left", "bottom-right")
QUARTERS = ("first", "second", "third", "fourth")
NUMBERS = ("one", "two", "three", "four")
#: The words of signs, whose letters can be told apart in 3 x 5 pixels.
SIGNS = ("HI", "UP", "AT", "IF", "OX", "HE", "TO", "LO")


SplitName = Literal["train", "development", "test"]
TRAIN = range(1_000_000, 5_000_000)
DEVELOPMENT = range(7_000_000, 8_000_000)
TEST = range(9_000_000, 10_000_000)
SEEDS: Mapping[SplitName, range] = {"train": TRAIN, "development": DEVELOPMENT, "test": TEST}
SPLIT_NAMES: tuple[SplitName, ...] = get_args(SplitName)
#: Videos of one benchmark at most; benchmarks of other seeds have others.
BLOCK = 10_000


def check_seed(seed: int, split: SplitName) -> None:
    """Raise ValueError if a seed does not belong to the named split."""
    if seed not in SEEDS[split]:
        home = next((name for name, seeds in SEEDS.items() if seed in seeds), None)
        of = f"is of the {home} videos" if home else "is of no split"
        first, last = SEEDS[split][0], SEEDS[split][-1]
        raise ValueError(f"seed {seed} {of}; those of split={split!r} are {first} to {last}")


def benchmark_seeds(split: SplitName, seed: int, n_videos: int) -> range:
    """Return the seeds of a benchmark's videos; benchmarks of another ``seed`` or split share none.

    Raises UsageError if a number is out of range.
    """
    blocks = len(SEEDS[split]) // BLOCK
    if not 0 <= seed < blocks:
        raise UsageError(f"--seed must be 0 to {blocks - 1} on the split {split}, got {seed}")
    if not 1 <= n_videos <= BLOCK:
        raise UsageError(f"--videos must be 1 to {BLOCK}, got {n_videos}; take another --seed for more")
    first = SEEDS[split][seed * BLOCK]
    return range(first, first + n_videos)


#: How a thing that questions name is seen: for a moment, from its onset to the end of its scene, or on its way.
Kind = Literal["brief", "static", "moving"]
_LIMITS: Mapping[str, tuple[float, float]] = {
    "size": (6, 24),
    "contrast": (0.05, 1.0),
    "pan": (0, 8),
    "shake": (0, 6),
    "zoom": (0.5, 1.0),
    "brief": (1, 8),
    "scenes": (1, 8),
}


@dataclass(frozen=True, kw_only=True)
class Hardness:
    """The settings of one kind of hardness; a range (low, high) is drawn from uniformly, both ends included.

    Attributes:
        name: in tables and file rows.
        size: pixels of a thing's side, a thing each.
        contrast: share of a thing's colour that covers the ground, a thing each; 1 hides the ground.
        specks: spots of 4 x 4 pixels in the colours of things, in other places in every frame; a video each.
        pan: pixels that the whole picture moves from a frame to the next, to and fro; a video each.
        shake: pixels to each side that the whole picture is off, by chance in each frame; a video each.
        zoom: the smallest size of the picture as a share; it shrinks and grows again; a video each. Signs keep
            their size, or nobody could read them.
        noise: standard deviation of each frame's own noise, of 255; a video each.
        kinds: of the four things that questions name, in any order.
        brief: frames that a brief thing is there.
        standing: share of videos in which all four stay from their onset to the end of the video, so that only the
            frame of its onset says when a thing came.
        scenes: how many, as far as the video is long enough.
        back: whether they are two that are cut between, so that each cut but the first shows what was there before.
        fade: frames over which a scene comes out of black, and goes into it; a video each.
    """

    name: str
    size: tuple[int, int] = (14, 20)
    contrast: tuple[float, float] = (1.0, 1.0)
    specks: tuple[int, int] = (0, 0)
    pan: tuple[int, int] = (0, 0)
    shake: tuple[int, int] = (0, 0)
    zoom: tuple[float, float] = (1.0, 1.0)
    noise: tuple[float, float] = (0.0, 0.0)
    kinds: tuple[Kind, Kind, Kind, Kind] = ("brief", "brief", "static", "moving")
    brief: tuple[int, int] = (1, 2)
    standing: float = 0.25
    scenes: tuple[int, int] = (1, 4)
    back: bool = False
    fade: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        """Raise ValueError for a range outside its limits, two camera movements, or ``standing`` outside 0 to 1."""
        for name in (*_LIMITS, "specks", "noise", "fade"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise ValueError(f"hardness {self.name}: {name} must be a range from 0 upwards, got {(low, high)}")
        for name, (least, most) in _LIMITS.items():
            low, high = getattr(self, name)
            if low < least or high > most:
                raise ValueError(f"hardness {self.name}: {name} must lie in {(least, most)}, got {(low, high)}")
        if sum((self.pan[1] > 0, self.shake[1] > 0, self.zoom[0] < 1)) > 1:
            raise ValueError(f"hardness {self.name}: a camera can do one of pan, shake and zoom")
        if not 0.0 <= self.standing <= 1.0:
            raise ValueError(f"hardness {self.name}: standing must be a share in [0, 1], got {self.standing}")


PLAIN = Hardness(name="plain")
#: What the model ``shapes`` was trained on; it has seen nothing of the others.
_TRAINED_ON = (
    PLAIN,
    Hardness(name="dim", contrast=(0.25, 0.4)),
    Hardness(name="small", size=(9, 12)),
    Hardness(name="clutter", specks=(4, 8)),
    Hardness(name="pan", pan=(3, 5)),
    Hardness(name="noise", noise=(6.0, 12.0)),
    Hardness(name="standing", standing=1.0),
    Hardness(name="needle", kinds=("brief", "brief", "brief", "brief"), brief=(1, 1), standing=0.0, scenes=(1, 2)),
    Hardness(name="mixed", size=(10, 20), contrast=(0.3, 1.0), specks=(0, 6), pan=(0, 4), noise=(0.0, 8.0)),
)
_OTHER_HARDNESS = (
    Hardness(name="shake", shake=(2, 5)),
    Hardness(name="zoom", zoom=(0.7, 0.85)),
    Hardness(name="fade", fade=(1, 2)),
    Hardness(name="cuts", scenes=(4, 8), back=True),
)
#: Name -> setting. "plain" is the one that nothing disturbs; each of the others but "mixed" turns one knob.
HARDNESS: Mapping[str, Hardness] = {hardness.name: hardness for hardness in (*_TRAINED_ON, *_OTHER_HARDNESS)}


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
        """The named things, then the extras."""
        return (*self.named, *self.extras)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The frames that begin a scene, without the first."""
        return tuple(t for t in range(1, self.n_frames) if self.scene_of[t] != self.scene_of[t - 1])

    def extra(self, kind: ThingKind) -> Thing | None:
        """Return the extra thing of a kind, or None."""
        return next((thing for thing in self.extras if thing.kind == kind), None)
