"""Pruning methods that take their time, fail or kill the process they run in, by the number of a video's frames."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import torch

from gstep.pruners.base import Pruner, Selection
from gstep.pruners.fastv import FastV
from gstep.types import VisualTokens

KILLS, BREAKS_THE_GPU = 5, 6  # frames


@dataclass(frozen=True, kw_only=True)
class Poison(Pruner):
    """Keeps the first tokens of all other videos."""

    name: ClassVar[str] = "poison"
    nested: ClassVar[bool] = False

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        if len(visual.tokens) == KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(visual.tokens) == BREAKS_THE_GPU:
            if visual.tokens.is_cuda:
                with suppress(RuntimeError):  # the context is broken from here on
                    visual.tokens.flatten()[torch.full((4,), 2**40, device=visual.tokens.device)].sum().item()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return Selection(index=visual.tokens.flatten(0, 1).norm(dim=1).argsort()[:budget].sort().values)


@dataclass(frozen=True, kw_only=True)
class Slow(Pruner):
    """Takes a second, while decoded videos gather; keeps the first tokens."""

    name: ClassVar[str] = "slow"
    nested: ClassVar[bool] = False

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        time.sleep(1)
        return Selection(index=torch.arange(budget))


@dataclass(frozen=True, kw_only=True)
class Buggy(Pruner):
    """Has a bug that shows on five frames."""

    name: ClassVar[str] = "buggy"
    nested: ClassVar[bool] = True

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        if len(visual.tokens) == KILLS:
            raise RuntimeError("no idea what to do with five frames")
        return Selection(visual.tokens.flatten(0, 1).norm(dim=1).argsort(descending=True, stable=True)[:budget])


@dataclass(frozen=True, kw_only=True)
class PoisonInside(FastV):
    """Works inside the language model, whose batch it breaks."""

    name: ClassVar[str] = "poison_inside"

    per_frame: int = 0
    K: int = 1

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        if len(visual.evidence["llm_attention"]) == BREAKS_THE_GPU * self.per_frame:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().select(visual, budget, ratio, seed)
