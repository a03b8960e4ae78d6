"""An encoder that sleeps instead of computing, as a GPU's work is to its host, and gives the tokens it made once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from gstep import PrunedTokens, VisualTokens, make_pruner
from jobs.benchmark.pipeline.work import HIDDEN, SIDE, TOKENS_PER_FRAME
from pipeline.cache.writer import PrunedVideo
from pipeline.prune.encode_stage import EncodeSetup, VideoEncoder, kept_tokens, pruned_columns
from pipeline.rows import VideoRecord


@dataclass(frozen=True)
class SleepingSetup(EncodeSetup):
    """What a sleeping encoder needs to know: the seconds that a video takes, too."""

    work_s: float = 0.0

    def encoder(self) -> VideoEncoder:
        """Return the encoder; nothing is loaded."""
        return SleepingEncoder(self)


class SleepingEncoder(VideoEncoder):
    """Sleeps for each video, and packs the same tokens for each as those of an encoder are packed."""

    def __init__(self, setup: SleepingSetup) -> None:
        self._work_s = setup.work_s
        self._method, self._ratio = setup.pruner, setup.retention_ratio

    def encode_one(self, record: VideoRecord, frames: NDArray[np.uint8]) -> PrunedVideo:
        """Sleep; return tokens that were made up, and their record."""
        assert frames.shape[1:] == (SIDE, SIDE, 3)
        visual, pruned = made_up(len(frames), self._method, self._ratio)
        started = time.perf_counter()
        time.sleep(self._work_s)
        done: VideoRecord = {
            **record,
            **pruned_columns(pruned, visual),
            "encode_s": time.perf_counter() - started,
            "prune_s": 0.0,
            "runtime": "{}",
            "model_extra": "{}",
        }
        return PrunedVideo(done, kept_tokens(pruned, visual))


@cache
def made_up(n_frames: int, method: str, ratio: float) -> tuple[VisualTokens, PrunedTokens]:
    """Return random tokens of so many frames, and what the method keeps of them."""
    numbers = torch.randn(n_frames, TOKENS_PER_FRAME, HIDDEN, generator=torch.Generator().manual_seed(0))
    visual = VisualTokens(numbers.to(torch.bfloat16))
    return visual, make_pruner(method).prune(visual, ratio)
