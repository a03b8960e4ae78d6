"""The base of Qwen2.5-VL and Qwen3-VL: temporal patches, dynamic frame sizes, and a tower without its language model.

Every temporal patch attends only to itself, so a video may be encoded in chunks of whole patches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from gstep.backbones.base import Backbone, ModelExtra, ModelFamily, SampledVideo, StaticParts, TowerWork
from gstep.backbones.gpu_forms import FusedSteps, optimize_qwen
from gstep.backbones.preprocess import DynamicSizePreprocessor, read_positive_count
from gstep.backbones.runtime import (
    NameRule,
    Runtime,
    apply_rotary_positions,
    build_empty_model,
    check_loaded,
    compute_merged_attention,
    load_weights,
    observe_inputs,
    split_heads,
)
from gstep.checkpoints.source import ModelSource
from gstep.errors import ModelError
from gstep.evidence import MERGED_QUERIES
from gstep.types import VisualTokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The maximum number of vision patches in one pass, which bounds its memory for any frame size: 12 temporal patches of
# full HD in patches of 14 pixels. A larger temporal patch takes a pass by itself.
PATCHES_AT_ONCE = 2**17
_MAX_CACHED_GRIDS = 8  # passes whose grid facts stay cached on a GPU, at most 14 MB each
_MIN_FRAMES = 4  # default of both stock video processors


class QwenVL(ModelFamily):
    """The base of the Qwen-VL families, in which a token covers 2 x 2 patches of two frames."""

    variant = "qwen"
    gives: ClassVar[frozenset[tuple[str, str]]] = frozenset({("token_attention", MERGED_QUERIES)})
    default_max_frames: ClassVar[int] = 768
    stock_fps: ClassVar[float | None] = 2.0
    preprocessor_class: ClassVar[type[DynamicSizePreprocessor]]
    # Defaults of the stock configuration (models/<family>/configuration_<family>.py), for missing keys.
    vision_defaults: ClassVar[Mapping[str, Any]]
    mlp_products: ClassVar[int] = 2  # matrix products of an MLP; a gated MLP has three
    # Class defaults of the stock video processor (models/*/video_processing_*.py).
    pixel_defaults: ClassVar[Mapping[str, Any]]
    # The stock video processor, and the names of image processors for which AutoVideoProcessor chooses it.
    video_processor: ClassVar[str]
    image_processors: ClassVar[tuple[str, ...]]

    def load(self, runtime: Runtime, *, frame_batch: int = 32) -> QwenBackbone:
        """Load the vision tower, ready to encode.

        Raises:
            ModelError: the preprocessor's settings are not supported, or weights are missing, quantized or do not fit
                config.json.
        """
        preprocessor = self.preprocessor()
        model, names = self.empty_tower(runtime)
        load_weights(model, self.source, names, device=runtime.device, dtype=runtime.dtype)
        tower = model["visual"]
        _rebuild_frequencies(tower, runtime.device)
        tower.eval().requires_grad_(False)
        return QwenBackbone(self, tower, preprocessor, runtime, frame_batch)

    def empty_tower(self, runtime: Runtime) -> tuple[nn.ModuleDict, NameRule]:
        # The name "visual" makes errors about missing weights show their names on disk.
        tower = build_empty_model(self.source.parse_stock_config().vision_config, runtime)
        return nn.ModuleDict({"visual": tower}), _list_names_in_memory

    def preprocessor(self) -> DynamicSizePreprocessor:
        """Build the preprocessor from the checkpoint's settings over the stock class defaults; null counts as missing.

        Raises:
            ModelError: the files name another video processor, a setting is not implemented, or patch sizes differ from
                those of the vision tower in config.json.
        """
        self._check_processor()
        source = self.source
        vision = self._vision_config()
        overrides = {name: value for name, value in source.preprocessor.items() if value is not None}
        settings = self._convert_pixel_bounds({**self.pixel_defaults, **overrides})
        for setting, key in (("patch_size",) * 2, ("temporal_patch_size",) * 2, ("merge_size", "spatial_merge_size")):
            if settings[setting] != (value := vision[key]):
                raise ModelError(
                    f"{source.name!r}: the preprocessor setting {setting}={settings[setting]!r} does not fit the "
                    f"vision tower's {key}={value!r} in config.json"
                )
        return self.preprocessor_class.from_settings(settings)

    def min_frames(self) -> int:
        """Return the checkpoint's ``min_frames``, by default 4; raise ModelError if it is not a positive integer."""
        n_frames = self.source.preprocessor.get("min_frames")
        return _MIN_FRAMES if n_frames is None else read_positive_count(self.source.preprocessor, "min_frames")

    def with_limits(self, min_pixels: int | None, max_pixels: int | None, max_video_tokens: int | None) -> ModelSource:
        """Return the model with other limits in its preprocessor settings; None keeps a limit.

        Args:
            min_pixels, max_pixels: pixels per frame (Qwen2.5-VL) or per video (Qwen3-VL).
            max_video_tokens: if given, turns on the size cap of long videos.

        Raises:
            ModelError: the minimum exceeds the maximum, or the checkpoint's preprocessor is not supported.
        """
        source = self.source
        preprocessor = self.preprocessor()
        low = preprocessor.min_pixels if min_pixels is None else min_pixels
        high = preprocessor.max_pixels if max_pixels is None else max_pixels
        if low > high:
            raise ModelError(f"{source.name!r}: frames cannot have at least {low} and at most {high} pixels")
        settings = {k: v for k, v in source.preprocessor.items() if k not in ("min_pixels", "max_pixels")}
        settings["size"] = {"shortest_edge": low, "longest_edge": high}
        if max_video_tokens is not None:
            settings |= {"cap_pixels_per_frame": True, "max_video_tokens": max_video_tokens}
        return replace(source, preprocessor=settings)

    def static(self) -> StaticParts:
        vision = self._vision_config()
        return StaticParts(int(vision["out_hidden_size"]), None, len(vision.get("deepstack_visual_indexes", ())))

    def token_counts(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Compute (temporal patches, tokens per temporal patch) for resized frames; an incomplete last patch counts."""
        vision = self._vision_config()
        side = vision["patch_size"] * vision["spatial_merge_size"]
        return -(-n_frames // vision["temporal_patch_size"]), (height // side) * (width // side)

    def tower_work(self, height: int, width: int) -> TowerWork:
        """Count the matrix products for encoding one temporal patch, including the merger of each deepstack level."""
        vision = self._vision_config()
        C = vision["hidden_size"]
        inner = vision["intermediate_size"]
        merged = vision["spatial_merge_size"] ** 2
        P = merged * self.token_counts(1, height, width)[1]
        embedding = 3 * vision["patch_size"] ** 2 * vision["temporal_patch_size"] * C
        layers = vision["depth"] * (4 * C**2 + self.mlp_products * C * inner)
        merger = merged * C * (merged * C + vision["out_hidden_size"])
        mergers = 1 + len(vision.get("deepstack_visual_indexes", ()))
        return TowerWork(P, embedding + layers, mergers * merger, self._count_attention_flops(vision, height, width))

    def _count_attention_flops(self, vision: Mapping[str, Any], height: int, width: int) -> int:
        """Count the floating-point operations of attention in all layers for one temporal patch."""
        P = (height // vision["patch_size"]) * (width // vision["patch_size"])
        return int(vision["depth"] * 4 * P**2 * vision["hidden_size"])

    def token_bytes(self, n_frames: int, height: int, width: int, evidence: Sequence[str] = ()) -> int:
        """Compute the size in bytes of a video's tokens, deepstack levels and evidence in bfloat16.

        Every entry of ``evidence`` counts as one number per token.
        """
        static = self.static()
        T, N = self.token_counts(n_frames, height, width)
        return int(T * N * 2 * (static.hidden_size * (1 + static.deepstack_levels) + len(evidence)))

    @abstractmethod
    def extra(self, video: SampledVideo, vision: PretrainedConfig) -> ModelExtra:
        """Return the facts that token positions depend on besides the grid; ``vision`` is the tower's configuration."""

    def tower_order(self, rows: int, columns: int, vision: PretrainedConfig) -> Tensor:
        """Return the spatial index of each token, [N] int64, in the order in which the tower processes them.

        The base implementation is row order.
        """
        return torch.arange(rows * columns, device="cpu")

    @classmethod
    def _convert_pixel_bounds(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Return ``settings`` with ``size`` as the stock class derives it from older keys; here unchanged."""
        return settings

    def _vision_config(self) -> dict[str, Any]:
        """Return the vision settings of config.json over the stock defaults."""
        return {**self.vision_defaults, **self.source.config.get("vision_config", {})}

    def _check_processor(self) -> None:
        """Raise ModelError unless transformers would use this family's video processor for the checkpoint.

        AutoVideoProcessor chooses by video_processor_type if it is set, otherwise by image_processor_type, otherwise by
        the model type.
        """
        source = self.source
        settings = self.source.preprocessor
        kind = settings.get("video_processor_type")
        if kind not in (None, self.video_processor):
            raise ModelError(f"{source.name!r} asks for the video processor {kind!r}, which is not implemented")
        image_kind = settings.get("image_processor_type")
        if kind is None and image_kind is not None and image_kind not in self.image_processors:
            raise ModelError(
                f"{source.name!r} has no video_processor_type, and image_processor_type={image_kind!r} means another "
                f"video processor than {self.model_type}'s: copy video_preprocessor_config.json from the original "
                "checkpoint"
            )


class QwenBackbone(Backbone):
    """A loaded vision tower of a Qwen-VL model: the stock tower of transformers."""

    family: QwenVL
    preprocessor: DynamicSizePreprocessor

    @property
    def hidden_size(self) -> int:
        """D, the width of a visual token."""
        return int(self.model.config.out_hidden_size)

    def chunk_length(self, height: int, width: int, frame_batch: int) -> int:
        """Return the number of frames to encode at once: whole temporal patches, at least one.

        It is the largest such number up to ``frame_batch`` frames and PATCHES_AT_ONCE patches.
        """
        frames, H, W = self.preprocessor.frames_per_patch, *self.preprocessor.grid_thw(1, height, width)[1:]
        return frames * max(1, min(frame_batch // frames, PATCHES_AT_ONCE // (H * W)))

    def encode_chunk(self, frames: Tensor, evidence: Mapping[str, str]) -> VisualTokens:
        """Encode [t,h,w,3] uint8 to tokens [T,N,D] in spatial order, with [T,N,D] per deepstack level."""
        (visual,) = self.encode_pass([frames], evidence)
        return visual

    def encode_pass(self, videos: Sequence[Tensor], evidence: Mapping[str, str]) -> list[VisualTokens]:
        """Encode videos of [t,h,w,3] uint8, which may differ in size, in one pass of the tower; return tokens for each.

        No patch attends to another video. All requested evidence, whatever its label, is the attention of the mean
        query to each token, [T,N] in spatial order.
        """
        grids = [self.preprocessor.grid_thw(*frames.shape[:3]) for frames in videos]
        patches = torch.cat([self.preprocessor.patches(frames, self.device, self.dtype) for frames in videos])
        merge = self.preprocessor.merge_size
        sizes = [rows * columns for T, rows, columns in grids for _ in range(T)]
        last = MergedAttentionObserver(self.model.blocks[-1].attn, sizes, merge**2) if evidence else None
        facts = {} if self.steps is None else self._cached_grid_facts(tuple(grids))
        grid_thw = torch.tensor(grids, device="cpu" if facts else self.device)
        with nullcontext() if last is None else observe_inputs(last.layer, last):
            output = self.model(patches, grid_thw=grid_thw, return_dict=True, **facts)
        # last_hidden_state would be wrong: it is the merger's input, on Qwen2.5-VL in window order.
        counts = [T * rows * columns // merge**2 for T, rows, columns in grids]
        levels = (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))
        parts = zip(*(level.split(counts) for level in levels), strict=True)
        attention = iter(last.attention if last else ())
        visuals = []
        for grid, video in zip(grids, parts, strict=True):
            tokens, *deepstack = (level.reshape(grid[0], -1, self.hidden_size) for level in video)
            evidence_by_label: dict[str, Tensor] = {}
            if last is not None:
                order = self.family.tower_order(grid[1] // merge, grid[2] // merge, self.model.config)
                spatial = torch.argsort(order).to(self.device)
                # There is only one kind of evidence in these families.
                evidence_by_label = dict.fromkeys(evidence, torch.stack([*islice(attention, grid[0])])[:, spatial])
            visuals.append(VisualTokens(tokens, evidence_by_label, tuple(deepstack)))
        return visuals

    def _suit_gpu(self) -> FusedSteps:
        self._cached_grid_facts = lru_cache(_MAX_CACHED_GRIDS)(self._compute_grid_facts)
        return optimize_qwen(self.model)

    def _compute_grid_facts(self, grids: tuple[tuple[int, int, int], ...]) -> dict[str, Any]:
        """Compute those keyword arguments of the tower's forward that depend only on the grids (T, H, W) of a pass.

        They are the position ids, the bounds of pieces and, if the tower has them, of windows, and the interpolation of
        learned positions. ``_suit_gpu`` caches this method, because on a GPU several stock functions make the CPU wait.
        """
        from transformers import vision_utils as stock  # noqa: PLC0415 - seconds, and preprocessing needs none of it

        grid_thw = torch.tensor(grids, device=self.device)
        tower = self.model
        merge = self.preprocessor.merge_size
        facts: dict[str, Any] = {
            "position_ids": stock.get_vision_position_ids(grid_thw, merge),
            "cu_seqlens": stock.get_vision_cu_seqlens(grid_thw),
            "max_seqlen": max(rows * columns for _, rows, columns in grids),
        }
        if hasattr(tower, "window_size"):
            index, bounds = stock.get_vision_window_index(grid_thw, merge, tower.window_size, tower.patch_size)
            facts |= {"window_index": index.to(self.device), "cu_window_seqlens": bounds}
            facts["max_window_seqlen"] = int(bounds.diff().max())
        if hasattr(tower, "pos_embed"):
            facts["interp_indices"], facts["interp_weights"] = stock.get_vision_interpolation_indices_and_weights(
                grid_thw,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=merge,
            )
        return facts

    @property
    def layers(self) -> Sequence[nn.Module]:
        """All blocks of the vision tower, in order."""
        return list(self.model.blocks)

    def model_extra(self, video: SampledVideo) -> ModelExtra:
        """Return the video's grids of tokens and patches, the patch sizes, and the facts of ``QwenVL.extra``."""
        grid = self.preprocessor.grid_thw(video.n_frames, video.height, video.width)
        merge = self.preprocessor.merge_size
        return {
            "grid": [grid[1] // merge, grid[2] // merge],
            "video_grid_thw": list(grid),
            "spatial_merge_size": merge,
            "temporal_patch_size": self.preprocessor.temporal_patch_size,
            **self.family.extra(video, self.model.config),
        }


def _list_names_in_memory(key: str) -> list[str]:
    """List the name in memory of a tensor of the vision tower on disk; [] for any other tensor."""
    name = key.removeprefix("model.")
    return [name] if name.startswith("visual.") else []


def _rebuild_frequencies(tower: nn.Module, device: str) -> None:
    """Compute the rotary frequencies of a tower loaded from the meta device; checkpoints do not store them.

    They follow compute_axial_rope_parameters of both families, in float32 for every dtype. Asserts that nothing else is
    still on the meta device.
    """
    for module in tower.modules():
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = getattr(module, name, None)
            if isinstance(frequencies, Tensor) and frequencies.is_meta:
                rope = getattr(module.config, "rope_parameters", None) or {}
                width = 2 * len(frequencies)
                steps = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
                setattr(module, name, (1.0 / (rope.get("rope_theta", 10000.0) ** steps)).to(device))
    check_loaded(tower)


class MergedAttentionObserver:
    """An observer of a tower's attention layer that computes the attention to each token during one pass.

    Attributes:
        layer: the attention layer whose inputs it observes.
        attention: for each temporal patch [N], in the tower's token order.
    """

    def __init__(self, layer: Any, sizes: Sequence[int], merge: int) -> None:
        """Prepare to observe one pass of the tower.

        Args:
            layer: an attention layer of a Qwen tower.
            sizes: the number of vision patches in each temporal patch of the pass.
            merge: the number of adjacent patches per token.
        """
        self.layer = layer
        self._sizes = list(sizes)
        self._merge = merge
        self.attention: list[Tensor] = []

    def __call__(self, hidden_MC: Tensor, kwargs: Mapping[str, Any]) -> None:
        """Append the attention of each temporal patch to ``attention``, from the layer's input and ``kwargs``."""
        qkv = self.layer.qkv
        n_heads = self.layer.num_heads
        width = hidden_MC.shape[1]
        parts = (hidden_MC, *kwargs["position_embeddings"])
        for hidden_SC, cos_SE, sin_SE in zip(*(part.split(self._sizes) for part in parts), strict=True):
            query_HSE, key_HSE = (
                apply_rotary_positions(split_heads(hidden_SC, weight, bias, n_heads), cos_SE, sin_SE)
                for weight, bias in zip(qkv.weight.split(width)[:2], qkv.bias.split(width)[:2], strict=True)
            )
            self.attention.append(compute_merged_attention(query_HSE, key_HSE, self._merge))
