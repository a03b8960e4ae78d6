"""Qwen2.5-VL (3B, 7B, 32B, 72B): windowed attention in most tower layers, and temporal positions in real time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gstep.backbones.base import ModelExtra, SampledVideo
from gstep.backbones.preprocess import DynamicSizePreprocessor, PerFramePreprocessor
from gstep.backbones.qwen_vl import QwenVL

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen2_5VL(QwenVL):  # noqa: N801 - the family's name
    """The Qwen2.5-VL family, with one token per 28 x 28 pixels of two frames."""

    model_type = "qwen2_5_vl"
    preprocessor_class: ClassVar[type[DynamicSizePreprocessor]] = PerFramePreprocessor
    vision_defaults: ClassVar[Mapping[str, Any]] = {
        "depth": 32,
        "fullatt_block_indexes": (7, 15, 23, 31),
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 4,
        "window_size": 112,
    }
    mlp_products = 3
    pixel_defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "max_video_tokens": 128000,
    }
    video_processor = "Qwen2VLVideoProcessor"
    min_rule = "stepped"
    # No video processor corresponds to the second pair of names, so AutoVideoProcessor goes by the model type.
    image_processors = (
        *("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"),
        *("Qwen2_5_VLImageProcessor", "Qwen2_5_VLImageProcessorFast"),
    )

    def tower_order(self, rows: int, columns: int, vision: PretrainedConfig) -> Tensor:
        """Return the spatial index of each token, [N] int64, in the tower's order: windows in row order.

        Within a window, tokens are in row order too. Windows at the right and bottom edges may be smaller.
        """
        window = vision.window_size // vision.patch_size // vision.spatial_merge_size
        row_N1 = torch.arange(rows, device="cpu")[:, None] // window
        column_1N = torch.arange(columns, device="cpu")[None] // window
        return torch.argsort((row_N1 * columns + column_1N).flatten(), stable=True)

    def _count_attention_flops(self, vision: Mapping[str, Any], height: int, width: int) -> int:
        """Count the floating-point operations of attention in all layers for one temporal patch.

        The layers in ``fullatt_block_indexes`` attend to the whole patch, all other layers within windows.
        """
        whole = super()._count_attention_flops(vision, height, width) // vision["depth"]
        side = vision["window_size"] // vision["patch_size"]
        rows, columns = (
            [min(side, n - start) for start in range(0, n, side)]
            for n in (height // vision["patch_size"], width // vision["patch_size"])
        )
        windowed = 4 * sum((h * w) ** 2 for h in rows for w in columns) * vision["hidden_size"]
        n_whole = sum(index < vision["depth"] for index in vision["fullatt_block_indexes"])
        return int(n_whole * whole + (vision["depth"] - n_whole) * windowed)

    def extra(self, video: SampledVideo, vision: PretrainedConfig) -> ModelExtra:
        """Return the time scale of positions: ``second_per_grid_ts`` and ``tokens_per_second``.

        A temporal patch advances by their product, unrounded. second_per_grid_ts is ``temporal_patch_size`` divided by
        ``SampledVideo.compute_sampled_fps``, as in Qwen2_5_VLProcessor.
        """
        return {
            "second_per_grid_ts": vision.temporal_patch_size / video.sampled_fps,
            "tokens_per_second": vision.tokens_per_second,
        }

    @classmethod
    def _convert_pixel_bounds(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Return ``settings`` with the older keys min_pixels and max_pixels copied into ``size``.

        They override the values in ``size``, as in Qwen2VLVideoProcessor, and are kept. A ``size`` that is not a
        mapping is returned unchanged.
        """
        size = settings["size"]
        for former, key in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if settings.get(former) is not None and isinstance(size, Mapping):
                size = {**{name: value for name, value in size.items() if name != former}, key: settings[former]}
        return {**settings, "size": size}
