"""Frames for the vision half: more things in each than any video has, easy ones first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jobs.testbed.training.network import PATCH
from jobs.testbed.training.space import Cells, cells_of
from pipeline.evaluate.shapes.draws import one_of
from pipeline.evaluate.shapes.files import through_h264
from pipeline.evaluate.shapes.hardness import PLAIN
from pipeline.evaluate.shapes.making import SIGN_SIZE
from pipeline.evaluate.shapes.render import render
from pipeline.evaluate.shapes.words import COLORS, SCENES, SHAPES, SIGNS
from pipeline.evaluate.shapes.world import SIDE, Shot, Thing, Video

_APART = 2  # pixels between two things
_TRIES = 18  # things that are tried to be placed, at most
_CLIP = 8  # frames that go through the encoder together


@dataclass(frozen=True)
class Difficulty:
    """How far the vision half has come.

    Attributes:
        free: share of frames whose things are anywhere and of any size; in others they fill 2 x 2 patches exactly.
        hard: share of frames with small or dim things, specks or noise.
    """

    free: float
    hard: float


def busy_frames(rng: np.random.Generator, count: int, difficulty: Difficulty) -> tuple[NDArray[np.uint8], Cells]:
    """[count,SIDE,SIDE,3] RGB after H.264, and what their cells show."""
    clips, cells = [], []
    for _ in range(count // _CLIP):
        videos = [_crowd(rng, difficulty) for _ in range(_CLIP)]
        frames = np.concatenate([render(video) for video in videos])
        clips.append(through_h264(frames) if rng.random() < 0.8 else frames)
        cells += [cells_of(video) for video in videos]
    return np.concatenate(clips), Cells(*(np.concatenate(parts) for parts in zip(*cells, strict=True)))


def _crowd(rng: np.random.Generator, difficulty: Difficulty) -> Video:
    """A "video" of one frame with as many things as find room, of any shape and colour."""
    free, hard = rng.random() < difficulty.free, rng.random() < difficulty.hard
    low = int(rng.integers(9, 15)) if hard else 14
    faint = hard and rng.random() < 0.5
    things: list[Thing] = []
    taken: list[tuple[int, int, int]] = []
    for _ in range(int(rng.integers(1, _TRIES))):
        sign = rng.random() < 0.2
        size = SIGN_SIZE if sign else int(rng.integers(low, 21))
        x, y = (int(v) for v in rng.integers(0, SIDE - size + 1, 2))
        if not free and not sign:
            size = 2 * PATCH
            x, y = (min(SIDE - size, (v + PATCH // 2) // PATCH * PATCH) for v in (x, y))
        if any(
            x < right + _APART + side
            and right < x + size + _APART
            and y < down + _APART + side
            and down < y + size + _APART
            for right, down, side in taken
        ):
            continue
        taken.append((x, y, size))
        name, color = (one_of(rng, SIGNS), "white") if sign else (one_of(rng, SHAPES), one_of(rng, COLORS))
        contrast = float(rng.uniform(0.25, 1.0)) if faint else 1.0
        things.append(
            Thing(
                name=name,
                kind="sign" if sign else "brief",
                size=size,
                contrast=contrast,
                shots=(Shot(0, x, y, color, size),),
            )
        )
    return Video(
        seed=int(rng.integers(2**62)),
        hardness=PLAIN,
        n_frames=1,
        scenes=(one_of(rng, SCENES),),
        scene_of=(0,),
        named=(),  # type: ignore[arg-type]  # nobody asks questions about it
        extras=tuple(things),
        standing=False,
        spare_colors=(),
        scene_choices=(),
        sign_choices=(),
        camera=((0, 0),),
        zoom=(1.0,),
        light=(1.0,),
        specks=int(rng.integers(0, 9)) if hard and rng.random() < 0.5 else 0,
        noise=float(rng.uniform(0, 12)) if hard and rng.random() < 0.5 else 0.0,
    )
