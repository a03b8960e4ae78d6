"""The model's vocabulary, a fixed vector for each token, and what the visual token of a cell should be: their sum.

The vectors are orthogonal and never trained, so that both halves of the model can be trained apart, at one time.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.evaluate.shapes.evidence import coverage
from pipeline.evaluate.shapes.words import COLORS, CORNERS, SCENES, SHAPES, SIGNS, VOCABULARY
from pipeline.evaluate.shapes.world import FRAMES, SIDE, Video
from pipeline.generate.choices import INSTRUCTION

WIDTH = 128  # of a visual token, and of the language model
GRID = 6  # cells of a frame's side, a token each
CELLS = GRID * GRID
NORM = 2.0  # of a word's vector
NAMES = (*SHAPES, *SIGNS)  # of things
LETTERS = ("A", "B", "C", "D")
#: Heard in training alone: a choice that is wrong, and which frame something is in.
NO = "no"
TIMES = tuple(f"<frame {i}>" for i in range(max(FRAMES)))
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|assistant|>", "<image>", "<video>")
UNKNOWN = "<unk>"
#: For other special tokens one day: the places, and with them the vectors, of all words stay.
SPARE = tuple(f"<spare {i}>" for i in range(3))
TOKENS = (*SPECIAL, UNKNOWN, INSTRUCTION, *LETTERS, *SPARE, *VOCABULARY, NO, *TIMES)
ID = {token: i for i, token in enumerate(TOKENS)}
#: How loud a cell says its scene, its corner, the name and the colour of the thing that it shows.
_SCENE, _CORNER, _NAME, _COLOR = 0.5, 0.5, 1.0, 1.0
_SEED = 7
#: A cell shows a thing that has this share of its area there: less than a quarter, for a thing where four cells meet.
_SHARE = 0.22


class Cells(NamedTuple):
    """What each cell of each frame shows, [T,CELLS] each.

    Attributes:
        scene: index into SCENES.
        corner: index into CORNERS.
        name: 1 + index into NAMES; 0: no thing.
        color: 1 + index into COLORS; 0: no thing, or a sign.
        thing: index into the video's things; -1: none.
        since: how many frames before the thing came, 0 in the first; -1: no thing.
    """

    scene: NDArray[np.int64]
    corner: NDArray[np.int64]
    name: NDArray[np.int64]
    color: NDArray[np.int64]
    thing: NDArray[np.int64]
    since: NDArray[np.int64]

    @property
    def shown(self) -> NDArray[np.bool_]:
        """[T,GRID,GRID] whether there is a thing."""
        return (self.name > 0).reshape(-1, GRID, GRID)


@cache
def word_vectors() -> Tensor:
    """[len(TOKENS),WIDTH] orthogonal rows of length NORM."""
    generator = torch.Generator().manual_seed(_SEED)
    q, r = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
    vectors: Tensor = (q * r.diagonal().sign())[: len(TOKENS)] * NORM
    return vectors.float()


def cells_of(video: Video) -> Cells:
    """What a perfect eye would see."""
    shape = (video.n_frames, GRID, GRID)
    scenes = [SCENES.index(video.scene_at(t)) for t in range(video.n_frames)]
    half = np.arange(GRID) >= GRID // 2
    corner = np.broadcast_to(2 * half[:, None] + half[None, :], shape)
    name, color = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    number, since, most = np.full(shape, -1), np.full(shape, -1), np.full(shape, _SHARE)
    cell = (SIDE / GRID) ** 2
    for index, thing in enumerate(video.things):
        named, sign = 1 + NAMES.index(thing.name), thing.kind == "sign"
        for shot in thing.shots:
            box = thing.box(shot)._replace(frame=0)
            share = coverage([box], 1, GRID)[0] * np.float32(cell / thing.size**2)
            best = most[shot.frame]  # a view
            there = share >= best
            best[there] = share[there]
            name[shot.frame][there] = named
            color[shot.frame][there] = 0 if sign else 1 + COLORS.index(shot.color)
            number[shot.frame][there] = index
            since[shot.frame][there] = shot.frame - thing.first
    flat = (video.n_frames, CELLS)
    scene = np.broadcast_to(np.array(scenes)[:, None], flat)
    return Cells(scene, *(one.reshape(flat) for one in (corner, name, color, number, since)))


def ideal_tokens(cells: Cells) -> Tensor:
    """[T,CELLS,WIDTH] of what cells show."""
    parts = zip((cells.scene, cells.corner, cells.name, cells.color), _tables(), strict=True)
    return torch.stack([table[torch.from_numpy(np.ascontiguousarray(index))] for index, table in parts]).sum(0)


@cache
def _tables() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Vectors by index, of scenes, corners, names and colours."""
    words, none = word_vectors(), torch.zeros(1, WIDTH)
    scene, corner, name, color = (words[[ID[w] for w in group]] for group in (SCENES, CORNERS, NAMES, COLORS))
    return scene * _SCENE, corner * _CORNER, torch.cat([none, name * _NAME]), torch.cat([none, color * _COLOR])


@cache
def readers() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each group of words a matrix whose product with an ideal token is 1 for what it says and 0 for all others."""
    words = word_vectors() / NORM**2
    scene, corner, name, color = (words[[ID[w] for w in group]] for group in (SCENES, CORNERS, NAMES, COLORS))
    return scene / _SCENE, corner / _CORNER, name / _NAME, color / _COLOR
