"""Qwen3-VL and Qwen3.5 (3.6), dense and mixture of experts: one vision tower, and a time before each temporal patch.

The mixtures of experts differ only in the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from gstep.backbones.base import ModelExtra, SampledVideo
from gstep.backbones.preprocess import DynamicSizePreprocessor, PerVideoPreprocessor
from gstep.backbones.qwen_vl import QwenVL
from gstep.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen3VL(QwenVL):
    """The Qwen3-VL family: one token per 32 x 32 pixels of two frames, and one more vector [D] per deepstack level."""

    model_type = "qwen3_vl"
    preprocessor_class: ClassVar[type[DynamicSizePreprocessor]] = PerVideoPreprocessor
    vision_defaults: ClassVar[Mapping[str, Any]] = {
        "deepstack_visual_indexes": (8, 16, 24),
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "out_hidden_size": 3584,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    pixel_defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "max_video_tokens": 768,
    }
    video_processor = "Qwen3VLVideoProcessor"
    # No video processor corresponds to these names, so AutoVideoProcessor goes by the model type. Qwen2VLImageProcessor
    # (without Fast) does have one, by which transformers would size the frames by the rules of Qwen2.5-VL.
    image_processors = ("Qwen2VLImageProcessorFast", "Qwen3VLImageProcessor", "Qwen3VLImageProcessorFast")

    def extra(self, video: SampledVideo, vision: PretrainedConfig) -> ModelExtra:
        """Return the time in seconds of each temporal patch, for the prompt, and the number of deepstack levels.

        A patch's time is the mean of its first and last frame's times from the start of the clip, as in
        Qwen3VLProcessor. An incomplete last patch ends with the last frame.
        """
        times = video.times_in_clip
        frames = vision.temporal_patch_size
        ends = [(i, min(i + frames, len(times)) - 1) for i in range(0, len(times), frames)]
        return {
            "patch_timestamps": [(times[first] + times[last]) / 2 for first, last in ends],
            "deepstack_levels": self.static().deepstack_levels,
        }

    @classmethod
    def _convert_pixel_bounds(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Return ``settings`` unchanged.

        Raises:
            ModelError: ``settings`` has min_pixels or max_pixels, which the stock class silently ignores.
        """
        for name in ("min_pixels", "max_pixels"):
            if name in settings:
                raise ModelError(
                    f"the preprocessor setting {name} is not implemented: the stock video processor of Qwen3-VL "
                    'ignores it; give size={"shortest_edge": ..., "longest_edge": ...}, the pixels of a whole video'
                )
        return settings


class Qwen3VLMoe(Qwen3VL):
    """The Qwen3-VL mixture-of-experts models (30B-A3B, 235B-A22B)."""

    model_type = "qwen3_vl_moe"


class Qwen3_5(Qwen3VL):  # noqa: N801 - the family's name
    """The dense Qwen3.5 and 3.6 models, with the tower of Qwen3-VL but without deepstack levels."""

    model_type = "qwen3_5"
    vision_defaults: ClassVar[Mapping[str, Any]] = {**Qwen3VL.vision_defaults, "deepstack_visual_indexes": ()}

    def _vision_config(self) -> dict[str, Any]:
        """Return the vision settings of config.json without deepstack levels, which the stock tower ignores."""
        return super()._vision_config() | {"deepstack_visual_indexes": ()}


class Qwen3_5Moe(Qwen3_5):  # noqa: N801 - the family's name
    """The Qwen3.5 and 3.6 mixture-of-experts models (35B-A3B, 122B-A10B, 397B-A17B)."""

    model_type = "qwen3_5_moe"


class Qwen4Exp(Qwen3_5):
    """The Qwen4-Exp models, with the tower of Qwen3.5.

    They are only encoded: their language model, which reads n-grams of token ids, is not supported.
    """

    model_type = "qwen4_exp"
