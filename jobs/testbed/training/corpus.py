"""What the vision half says of training videos that went through H.264, worked out once and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jobs.testbed.training.language import Seen
from jobs.testbed.training.network import Eyes
from jobs.testbed.training.space import cells_of, ideal_tokens
from pipeline.evaluate.shapes.files import through_h264
from pipeline.evaluate.shapes.hardness import HARDNESS, TRAINED_ON, Hardness
from pipeline.evaluate.shapes.making import make_video
from pipeline.evaluate.shapes.render import render
from pipeline.evaluate.shapes.seeds import TRAIN, SplitName
from pipeline.evaluate.shapes.world import FRAMES, Video

#: Ideal tokens are made for seeds before this one, real ones for those from it on.
_REAL = TRAIN.start + 3_000_000
#: Share of training videos that nothing disturbs; the others have the other settings in turn.
_PLAIN = 0.4
_CHUNK = 100  # videos of a file


def ideal_source(rng: np.random.Generator, n_frames: int) -> Seen:
    """Videos that nobody had to see."""
    video = make_video(int(rng.integers(TRAIN.start, _REAL)), split="train", n_frames=n_frames)
    cells = cells_of(video)
    return Seen(video, cells, ideal_tokens(cells))


def seen_through(eyes: Eyes, video: Video) -> Tensor:
    """[T,CELLS,WIDTH] bfloat16, as a cache keeps them."""
    with torch.no_grad():
        tokens: Tensor = eyes(through_h264(render(video)))
    return tokens.bfloat16()


def hardness_of(seed: int) -> Hardness:
    """Of a training video."""
    rng = np.random.default_rng([seed, 6])
    if rng.random() < _PLAIN:
        return HARDNESS["plain"]
    return HARDNESS[TRAINED_ON[1 + int(rng.integers(len(TRAINED_ON) - 1))]]


class Corpus:
    """Videos of each length with their tokens; a ``Source``.

    Args:
        folder: keeps the tokens, a file a hundred videos; those that are there are read.
        eyes: the vision half, when it has been trained.
        per_length: videos of each length.
        say: told of each file.
    """

    def __init__(self, folder: Path, eyes: Eyes, per_length: int, say: Callable[[str], None]) -> None:
        folder.mkdir(exist_ok=True)
        self._seen: dict[int, list[Seen]] = {}
        for place, n_frames in enumerate(FRAMES):
            first = _REAL + place * per_length
            videos = [_video(seed, n_frames) for seed in range(first, first + per_length)]
            tokens: list[Tensor] = []
            for start in range(0, per_length, _CHUNK):
                path = folder / f"{n_frames}-{start:05}.safetensors"
                if not path.is_file():
                    made = torch.stack([seen_through(eyes, video) for video in videos[start : start + _CHUNK]])
                    scratch = path.with_suffix(".part")
                    save_file({"tokens": made}, scratch)
                    scratch.replace(path)
                    say(f"tokens {n_frames} frames, {start + len(made)} of {per_length} videos")
                tokens += load_file(path)["tokens"].unbind()
            self._seen[n_frames] = [Seen(v, cells_of(v), one) for v, one in zip(videos, tokens, strict=True)]

    def __call__(self, rng: np.random.Generator, n_frames: int) -> Seen:
        videos = self._seen[n_frames]
        return videos[int(rng.integers(len(videos)))]


def held_out(eyes: Eyes, split: SplitName, first: int, per_length: int, hardness: Hardness) -> list[Seen]:
    """Videos of another split, with their tokens."""
    made = []
    for n_frames in FRAMES:
        for seed in range(first, first + per_length):
            video = make_video(seed, split=split, n_frames=n_frames, hardness=hardness)
            made.append(Seen(video, cells_of(video), seen_through(eyes, video)))
    return made


def _video(seed: int, n_frames: int) -> Video:
    return make_video(seed, split="train", n_frames=n_frames, hardness=hardness_of(seed))
