"""InternVL3 and 3.5 in the layout of transformers (model names ending in -HF); each frame is an image of 256 tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gstep.backbones.base import Backbone, ModelExtra, SampledVideo, StaticParts, TowerWork
from gstep.backbones.fixed_size import DEFAULTS, FixedSizeFamily
from gstep.backbones.gpu_forms import FusedSteps, optimize_internvl
from gstep.backbones.runtime import Runtime, check_loaded, load_weights
from gstep.errors import ModelError
from gstep.types import VisualTokens

# Defaults of InternVLVisionConfig.
_VISION: Mapping[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "intermediate_size": 4096,
    "image_size": 448,
    "patch_size": 14,
}


class InternVL(FixedSizeFamily):
    """The InternVL family: a frame of 448 x 448 pixels becomes 16 x 16 tokens, each of 2 x 2 patches."""

    model_type = "internvl"
    video_processor = "InternVLVideoProcessor"
    variant = "llava"

    def load(self, runtime: Runtime, *, frame_batch: int = 32) -> InternVLBackbone:
        """Load the vision part, ready to encode.

        Raises:
            ModelError: the preprocessor's settings are not supported, or weights are missing, quantized or do not fit
                config.json.
        """
        preprocessor = self.preprocessor()
        model, names = self.empty_tower(runtime)
        load_weights(model, self.source, names, device=runtime.device, dtype=runtime.dtype)
        check_loaded(model)
        model.eval().requires_grad_(False)
        return InternVLBackbone(self, model, preprocessor, runtime, frame_batch)

    def image_side(self) -> int:
        return self._get_side("image_size")

    def check_features(self) -> None:
        """Raise ModelError unless config.json takes visual tokens from the last layer, without its class token."""
        layer, strategy = (
            self.source.config.get(f"vision_feature_{name}", default)
            for name, default in (("layer", -1), ("select_strategy", "default"))
        )
        if (layer, strategy) != (-1, "default"):
            raise ModelError(
                f"{self.source.name!r}: vision_feature_layer={layer!r} with vision_feature_select_strategy="
                f"{strategy!r} in config.json is not implemented; the published models have -1 and 'default'"
            )

    def names_in_memory(self, key: str) -> list[str]:
        """Return, in a list, the name on disk without the prefix ``model.`` that some versions have."""
        return [key.removeprefix("model.")]

    def pixel_defaults(self) -> Mapping[str, Any]:
        if self.source.weight_files:
            return DEFAULTS
        side = self.image_side()  # random weights, perhaps without preprocessor files
        return {**DEFAULTS, "size": {"height": side, "width": side}}

    def static(self) -> StaticParts:
        return StaticParts(self._get_text_width(), None)

    def token_counts(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Compute (number of frames, tokens per frame) for resized square frames; ``width`` is not used."""
        return n_frames, int(height // self._get_side("patch_size") * self._get_downsample_ratio()) ** 2

    def tower_work(self, height: int, width: int) -> TowerWork:
        """Count the matrix products for encoding one frame.

        The class token passes through the layers too, and patches are merged before the projector.
        """
        vision = self._vision()
        D = self._get_text_width()
        C, inner, depth = vision["hidden_size"], vision["intermediate_size"], vision["num_hidden_layers"]
        patch = self._get_side("patch_size")
        merged = C * round(1 / self._get_downsample_ratio()) ** 2
        P = (height // patch) * (width // patch)
        layers = depth * (4 * C**2 + 2 * C * inner) * (P + 1) // P
        return TowerWork(P, 3 * patch**2 * C + layers, merged * D + D**2, depth * 4 * (P + 1) ** 2 * C)

    def token_bytes(self, n_frames: int, height: int, width: int, evidence: Sequence[str] = ()) -> int:
        T, N = self.token_counts(n_frames, height, width)
        return T * N * self._get_text_width() * 2

    def _get_text_width(self) -> int:
        """Return D, the language model's hidden size in config.json, by default 4096."""
        return int(self.source.config.get("text_config", {}).get("hidden_size", 4096))

    def _get_downsample_ratio(self) -> float:
        return float(self.source.config.get("downsample_ratio", 0.5))

    def _vision(self) -> dict[str, Any]:
        """Return the vision settings of config.json over the stock defaults."""
        return {**_VISION, **self.source.config.get("vision_config", {})}

    def _get_side(self, name: str) -> int:
        """Return the side in pixels of the square frames ("image_size") or square patches ("patch_size").

        Raises:
            ModelError: config.json gives sides of different lengths.
        """
        value = self._vision()[name]
        sides = {*value} if isinstance(value, list | tuple) else {value}
        if len(sides) != 1:
            raise ModelError(
                f"{self.source.name!r}: {name}={value!r} in config.json is not square, which is not implemented"
            )
        return int(sides.pop())


class InternVLBackbone(Backbone):
    """A loaded InternVL vision part: the stock model without its language model."""

    def _suit_gpu(self) -> FusedSteps:
        return optimize_internvl(self.model.vision_tower)

    @property
    def hidden_size(self) -> int:
        """D, the width of a visual token."""
        return int(self.model.multi_modal_projector.linear_2.out_features)

    def encode_chunk(self, frames: Tensor, evidence: Mapping[str, str]) -> VisualTokens:
        """Encode [t,448,448,3] uint8 to tokens [t,256,D]; this family has no evidence."""
        pixels = self.preprocessor.normalise(frames, self.device, self.dtype)
        return VisualTokens(self.model.get_image_features(pixels, return_dict=True).pooler_output)

    def encode_pass(self, videos: Sequence[Tensor], evidence: Mapping[str, str]) -> list[VisualTokens]:
        """Encode the videos, [t,448,448,3] uint8 each, in one pass of the tower; return [t,256,D] for each."""
        tokens = self.encode_chunk(torch.cat([*videos]), evidence).tokens
        return [VisualTokens(part) for part in torch.split(tokens, [len(frames) for frames in videos])]

    @property
    def layers(self) -> Sequence[nn.Module]:
        """All layers of the vision tower, in order."""
        return list(self.model.vision_tower.encoder.layer)

    def model_extra(self, video: SampledVideo) -> ModelExtra:
        """Return only the grid."""
        side = math.isqrt(self.family.token_counts(1, video.height, video.width)[1])
        return {"grid": [side, side]}
