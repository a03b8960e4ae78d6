"""How hard videos are to answer questions about: a record of knobs, with names for settings of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
_OTHERS = (
    Hardness(name="shake", shake=(2, 5)),
    Hardness(name="zoom", zoom=(0.7, 0.85)),
    Hardness(name="fade", fade=(1, 2)),
    Hardness(name="cuts", scenes=(4, 8), back=True),
)
#: Name -> setting. "plain" is the one that nothing disturbs; each of the others but "mixed" turns one knob.
HARDNESS: Mapping[str, Hardness] = {one.name: one for one in (*_TRAINED_ON, *_OTHERS)}
