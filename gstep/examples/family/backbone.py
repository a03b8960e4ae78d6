"""Patches, the smallest model family: a token is a patch's pixels times a matrix (gstep/backbones/patches.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from gstep.backbones.base import Backbone, ModelExtra, ModelFamily, SampledVideo, StaticParts, TowerWork
from gstep.backbones.preprocess import FixedSizePreprocessor
from gstep.backbones.runtime import Runtime
from gstep.checkpoints.tensors import read_tensors
from gstep.types import VisualTokens


class Patches(ModelFamily):
    """A checkpoint of Patches; gstep/backbones/base.py describes what each method returns."""

    model_type = "patches"
    variant = "llava"  # the rules of pruning methods that have two sets

    def preprocessor(self) -> FixedSizePreprocessor:
        return FixedSizePreprocessor.from_settings(self.source.preprocessor)

    def static(self) -> StaticParts:
        return StaticParts(hidden_size=self.source.config["hidden_size"], newline=None)

    def token_counts(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        patch = self.source.config["patch_size"]
        return n_frames, (height // patch) * (width // patch)

    def tower_work(self, height: int, width: int) -> TowerWork:  # for forecasts
        _, N = self.token_counts(1, height, width)
        C, D = 3 * self.source.config["patch_size"] ** 2, self.source.config["hidden_size"]
        return TowerWork(patches=N, patch_weights=C * D, token_weights=0, attention=0)

    def token_bytes(self, n_frames: int, height: int, width: int, evidence: Sequence[str] = ()) -> int:
        return 2 * math.prod(self.token_counts(n_frames, height, width)) * int(self.source.config["hidden_size"])

    def load(self, runtime: Runtime, *, frame_batch: int = 32) -> PatchesBackbone:
        (matrix_DC,) = read_tensors(self.source, str, device=runtime.device, dtype=runtime.dtype).values()
        return PatchesBackbone(self, matrix_DC, self.preprocessor(), runtime, frame_batch)


class PatchesBackbone(Backbone):
    """The loaded checkpoint; ``self.model`` is the matrix that ``load`` read."""

    @property
    def hidden_size(self) -> int:
        return len(self.model)

    def encode_chunk(self, frames: Tensor, evidence: Mapping[str, str]) -> VisualTokens:
        side = math.isqrt(self.model.shape[1] // 3)
        pixels = self.preprocessor.normalise(frames, self.device, self.dtype)  # [t,3,h,w]
        patches = pixels.unfold(2, side, side).unfold(3, side, side)  # [t,3,rows,columns,side,side]
        return VisualTokens(patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2) @ self.model.T)

    def model_extra(self, video: SampledVideo) -> ModelExtra:
        side = math.isqrt(self.model.shape[1] // 3)
        return {"grid": [video.height // side, video.width // side]}
