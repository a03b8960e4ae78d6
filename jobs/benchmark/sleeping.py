"""A model family that sleeps instead of computing, for ``jobs.prune --family`` by its import path."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from gstep import VisualTokens
from gstep.backbones.base import Backbone, ModelExtra, SampledVideo
from gstep.backbones.llava_onevision import LlavaOnevision
from gstep.backbones.runtime import Runtime
from gstep.checkpoints import tiny

FAMILY = "jobs.benchmark.sleeping:Sleeping"


def write_model(folder: Path, seconds: float) -> str:
    """Write a checkpoint whose encoder sleeps ``seconds`` per video to a new ``folder``, and return its path."""
    folder.mkdir()
    tiny.write_tiny_model("tiny", folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "sleep_s": seconds}), encoding="utf-8")
    return str(folder)


class Sleeping(LlavaOnevision):
    """A LLaVA-OneVision family whose vision tower is not loaded."""

    def load(self, runtime: Runtime, *, frame_batch: int = 32) -> SleepingBackbone:  # type: ignore[override]
        return SleepingBackbone(self, None, self.preprocessor(), runtime, frame_batch)


class SleepingBackbone(Backbone):
    """A backbone that sleeps once per video, and returns the same random tokens each time."""

    @cached_property
    def hidden_size(self) -> int:
        return self.family.static().hidden_size

    def chunk_length(self, height: int, width: int, frame_batch: int) -> int:
        return 2**20  # a video is a single chunk

    def encode_chunk(self, frames: Tensor, evidence: Mapping[str, str]) -> VisualTokens:
        n_frames, height, width, _ = frames.shape
        tokens_TND = make_tokens(*self.family.token_counts(n_frames, height, width), self.hidden_size)
        time.sleep(self.family.source.config["sleep_s"])
        return VisualTokens(tokens_TND)

    def model_extra(self, video: SampledVideo) -> ModelExtra:
        return {}  # nobody asks questions about these tokens


@cache
def make_tokens(n_frames: int, per_frame: int, hidden: int) -> Tensor:
    """Return random bfloat16 tokens [T,N,D]; the same tensor object for the same shape."""
    numbers = torch.randn(n_frames, per_frame, hidden, generator=torch.Generator().manual_seed(0))
    return numbers.to(torch.bfloat16)
