"""Where a video shows what a question asks for, and whether kept tokens still show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluate.shapes.world import SIDE, Box, Shot, Thing

#: Which sights of a part count: any of them, or those in the first frame of it alone.
Needs = Literal["any", "first"]


@dataclass(frozen=True)
class Part:
    """A thing, or one copy of it, that must be seen.

    Attributes:
        name: its shape, or what a sign says.
        contrast: share of its colour that covers the ground.
        boxes: where it is, by frame; of a thing that changes, on the side of the cut that is asked about.
    """

    name: str
    contrast: float
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Evidence:
    """What of a video answers a question.

    Attributes:
        n_frames: of the video.
        needs: which boxes of a part count.
        parts: all of them must be seen.
    """

    n_frames: int
    needs: Needs
    parts: tuple[Part, ...]

    def decisive(self) -> list[tuple[Box, ...]]:
        """The boxes that count, a part each: a token of one of them is enough for the part."""
        if self.needs == "any":
            return [part.boxes for part in self.parts]
        return [tuple(box for box in part.boxes if box.frame == part.boxes[0].frame) for part in self.parts]

    def as_record(self) -> dict[str, Any]:
        """JSON-able; ``boxes`` are [frame, x0, y0, x1, y1], x1 and y1 not included."""
        parts = [{"name": p.name, "contrast": p.contrast, "boxes": [list(box) for box in p.boxes]} for p in self.parts]
        return {"n_frames": self.n_frames, "needs": self.needs, "parts": parts}


def part_of(thing: Thing, shots: Sequence[Shot] | None = None) -> Part:
    """The thing, in all its shots or in these."""
    boxes = tuple(thing.box(shot) for shot in (thing.shots if shots is None else shots))
    return Part(thing.name, thing.contrast, boxes)


def coverage(boxes: Iterable[Box], n_frames: int, grid: int) -> NDArray[np.float32]:
    """[n_frames,grid,grid] share of each cell's area that boxes, which do not overlap, cover; a token is a cell."""
    covered = np.zeros((n_frames, grid, grid), np.float32)
    edges = np.arange(grid + 1) * (SIDE / grid)
    for t, x0, y0, x1, y1 in boxes:
        wide, high = (
            np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None)
            for low, high in ((x0, x1), (y0, y1))
        )
        covered[t] += (high[:, None] * wide) / (SIDE / grid) ** 2
    return covered


def parts_kept(evidence: Evidence, kept: NDArray[np.bool_], least: float = 0.0) -> list[bool]:
    """Whether a kept token shows each part.

    Args:
        kept: [T,grid,grid] tokens; T divides the number of frames (a token may stand for several).
        least: share of its cell that a part must cover in a frame to count as shown, not included.
    """
    by_frame = np.repeat(kept, evidence.n_frames // len(kept), axis=0)
    shown = (coverage(boxes, evidence.n_frames, kept.shape[-1]) > least for boxes in evidence.decisive())
    return [bool((by_frame & cells).any()) for cells in shown]
