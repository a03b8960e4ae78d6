"""The world of the synthetic videos: its words, seeds and hardness settings, and the description of a video.

The seeds of training, development and test videos do not overlap. Methods and models are tuned on development videos;
test videos serve only for published results.
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
#: The words on signs; their letters can be told apart in 3 x 5 dots.
SIGNS = ("HI", "UP", "AT", "IF", "OX", "HE", "TO", "LO")


SplitName = Literal["train", "development", "test"]
TRAIN = range(1_000_000, 5_000_000)
DEVELOPMENT = range(7_000_000, 8_000_000)
TEST = range(9_000_000, 10_000_000)
SEEDS: Mapping[SplitName, range] = {"train": TRAIN, "development": DEVELOPMENT, "test": TEST}
SPLIT_NAMES: tuple[SplitName, ...] = get_args(SplitName)
#: The maximum number of videos in a benchmark, and the number of seeds that each benchmark reserves.
BLOCK = 10_000


def check_seed(seed: int, split: SplitName) -> None:
    """Raise ValueError if a seed is not in the range of the named split."""
    if seed not in SEEDS[split]:
        home = next((name for name, seeds in SEEDS.items() if seed in seeds), None)
        of = f"belongs to the {home} split" if home else "belongs to no split"
        first, last = SEEDS[split][0], SEEDS[split][-1]
        raise ValueError(f"seed {seed} {of}; the seeds of split={split!r} are {first} to {last}")


def compute_benchmark_seeds(split: SplitName, seed: int, n_videos: int) -> range:
    """Return the consecutive seeds of a benchmark's videos, one per video.

    Each ``seed`` of a split selects its own block of 10,000 video seeds, so benchmarks of different seeds or splits
    share no video.

    Raises:
        UsageError: ``seed`` is not the number of a block, or ``n_videos`` is not 1 to 10,000.
    """
    blocks = len(SEEDS[split]) // BLOCK
    if not 0 <= seed < blocks:
        raise UsageError(f"--seed must be 0 to {blocks - 1} on the split {split}, got {seed}")
    if not 1 <= n_videos <= BLOCK:
        raise UsageError(f"--videos must be 1 to {BLOCK}, got {n_videos}; take another --seed for more")
    first = SEEDS[split][seed * BLOCK]
    return range(first, first + n_videos)


#: How a named thing appears: for a few frames, from its onset to the end of its scene, or moving across the frame.
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
    """The settings of one kind of hardness; a value is drawn uniformly from a range (low, high), both ends included.

    Attributes:
        size: side of a thing in pixels, per thing; not of signs.
        contrast: opacity of a thing's color over the ground, per thing; 1 hides the ground.
        specks: spots of 4 x 4 pixels in the colors of things, per video; every frame has them elsewhere.
        pan: pixels that the whole picture moves from frame to frame, back and forth, per video.
        shake: the largest random offset of the picture in each frame, in pixels, per video.
        zoom: the smallest scale of the picture, per video; it shrinks to this scale and grows again. Signs keep their
            size.
        noise: standard deviation of the noise in each frame, on a scale of 255, per video.
        kinds: the kinds of the four named things; their order has no effect.
        brief: number of frames that show a brief thing, per thing.
        standing: the share of videos in which all four named things stay from their onset to the end of the video.
        scenes: number of scenes, per video; a short video limits the upper end.
        back: True to alternate between two scenes, so that each cut but the first returns to an earlier scene.
        fade: number of frames over which each scene fades in and out, per video.
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
        """Raise ValueError if a range is negative, descending or outside its limits, or ``standing`` is not in [0, 1].

        Also if more than one of pan, shake and zoom moves the picture: pan or shake with an upper end above 0, or zoom
        with a lower end below 1.
        """
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
#: The hardness of the training videos of the model ``shapes``, which never saw the others.
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
#: Name -> settings. "plain" has no disturbance; each of the others changes one aspect, and "mixed" changes several.
HARDNESS: Mapping[str, Hardness] = {hardness.name: hardness for hardness in (*_TRAINED_ON, *_OTHER_HARDNESS)}


#: Height and width of a frame in pixels.
SIDE = 96
#: VideoMME's duration classes -> number of frames; a frame lasts a second.
DURATIONS: Mapping[str, int] = {"short": 8, "medium": 16, "long": 32}
FRAMES = tuple(DURATIONS.values())
#: The kinds of all things. Besides the named things: copies in several corners, a thing whose color changes at a cut,
#: and a sign with a word.
ThingKind = Kind | Literal["copies", "changing", "sign"]


class Shot(NamedTuple):
    """A thing in one frame, as the camera sees it: its top left corner and side in pixels, and its color."""

    frame: int
    x: int
    y: int
    color: str
    size: int

    @property
    def corner(self) -> int:
        """The index into CORNERS of the quadrant of the frame that contains the thing's center."""
        right = 2 * self.x + self.size >= SIDE
        down = 2 * self.y + self.size >= SIDE
        return 2 * down + right


@dataclass(frozen=True, kw_only=True)
class Thing:
    """A shape or a sign, with its position in every frame that shows it.

    Attributes:
        name: its shape, or the word on a sign; unique in the video.
        size: its side in pixels without zoom.
        contrast: opacity of its color over the ground, in (0, 1].
        shots: at least one, by ascending frame; only ``copies`` may have several in a frame.
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
        """The color of the thing in its first shot."""
        return self.shots[0].color


@dataclass(frozen=True, kw_only=True)
class Video:
    """The description of a video, complete for rendering it and asking about it. ``make_video`` creates it.

    Attributes:
        scenes: distinct names from SCENES.
        scene_of: the index into ``scenes``, per frame.
        named: the four things that questions name. Their colors are distinct and no other thing has them, and their
            first frames differ.
        extras: other things, at most one of each kind.
        standing: True if the named things stay until the end of the video.
        spare_colors: the four colors that no named thing has.
        scene_choices: four scenes, including those of the video.
        sign_choices: four words, including the sign's.
        camera: offset (right, down) in pixels, per frame; the positions of shots already include it.
        zoom: scale of the picture, per frame; the positions and sizes of shots already include it.
        light: brightness of each frame, in (0, 1].
        specks: number of spots per frame.
        noise: standard deviation of the noise, on a scale of 255.
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
        """The frames at which a new scene begins, without frame 0."""
        return tuple(t for t in range(1, self.n_frames) if self.scene_of[t] != self.scene_of[t - 1])

    def extra(self, kind: ThingKind) -> Thing | None:
        """Return the extra thing of a kind, or None."""
        return next((thing for thing in self.extras if thing.kind == kind), None)
