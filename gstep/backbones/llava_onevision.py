"""LLaVA-OneVision: SigLIP, a two-layer projector, and 2x2 bilinear pooling of each frame (27 x 27 to 14 x 14 tokens).

The encoder follows LlavaOnevisionModel.get_video_features of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gstep.backbones.base import Backbone, ModelExtra, SampledVideo, StaticParts, TowerWork
from gstep.backbones.fixed_size import FixedSizeFamily
from gstep.backbones.gpu_forms import FusedSteps, optimize_llava
from gstep.backbones.runtime import Runtime, load_weights, observe_inputs, rebuild_position_ids
from gstep.backbones.siglip import (
    FrameObserver,
    PoolingHead,
    compute_last_layer_evidence,
    compute_patch_evidence,
    compute_probe_evidence,
)
from gstep.checkpoints.source import ModelSource, PoolingHeadSource
from gstep.checkpoints.tensors import read_tensors
from gstep.errors import ModelError
from gstep.evidence import HEAD_SOURCES, LAST_LAYER, PER_FRAME, POOLING_HEAD, SINGLE_PATCHES, get_evidence_name
from gstep.types import VisualTokens


class LlavaOnevision(FixedSizeFamily):
    """The LLaVA-OneVision family: 196 tokens per frame of 384 x 384 pixels, and a separate newline row per video."""

    model_type = "llava_onevision"
    video_processor = "LlavaOnevisionVideoProcessor"
    variant = "llava"
    gives: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {
            *(("token_attention", LAST_LAYER), ("token_key", LAST_LAYER)),
            *(("frame_feature", POOLING_HEAD), ("token_attention", POOLING_HEAD)),
            ("image_embedding", SINGLE_PATCHES),
        }
    )

    def load(self, runtime: Runtime, *, frame_batch: int = 32) -> LlavaOnevisionBackbone:
        """Load the vision part, ready to encode, and the pooling head if the source has one.

        Raises:
            ModelError: the preprocessor's settings are not supported; weights are missing, quantized or do not fit
                config.json; or the pooling head on this node is not the one that was resolved.
        """
        preprocessor = self.preprocessor()
        model, names = self.empty_tower(runtime)
        load_weights(model, self.source, names, device=runtime.device, dtype=runtime.dtype)
        rebuild_position_ids(model, runtime.device)
        model.eval().requires_grad_(False)
        backbone = LlavaOnevisionBackbone(self, model, preprocessor, runtime, frame_batch)
        if self.source.pooling_head is not None:
            backbone.pooling_head = PoolingHead.load(self.source.pooling_head, runtime.device)
        return backbone

    def image_side(self) -> int:
        return self._vision("image_size", 384)

    def check_features(self) -> None:
        """Raise ModelError unless vision_feature_layer in config.json is one integer."""
        layer = self.source.config.get("vision_feature_layer", -1)
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise ModelError(
                f"{self.source.name!r}: vision_feature_layer in config.json is {layer!r}; only a single layer (a "
                "number, -1 in the published models) is implemented"
            )

    def names_in_memory(self, key: str) -> list[str]:
        """List the names in memory for a name on disk: without and with ``vision_model.``, by library version."""
        name = key.removeprefix("model.")
        plain = name.replace("vision_tower.vision_model.", "vision_tower.", 1)
        return [plain, plain.replace("vision_tower.", "vision_tower.vision_model.", 1)]

    def with_pooling_head(self, siglip: str | Path) -> ModelSource:
        return replace(self.source, pooling_head=PoolingHeadSource.resolve(siglip, self._vision("hidden_size", 1152)))

    def static(self) -> StaticParts:
        """Read the newline row from the checkpoint; the hidden size is its length.

        Raises:
            ModelError: the checkpoint has no image_newline, or its files are damaged.
        """
        newline = read_tensors(self.source, lambda key: key if key.removeprefix("model.") == "image_newline" else None)
        if len(newline) != 1:
            raise ModelError(f"{self.source.name!r} has no image_newline: download the whole checkpoint")
        (row,) = newline.values()
        return StaticParts(hidden_size=len(row), newline=row)

    def token_counts(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Compute (number of frames, tokens per frame) for resized square frames; ``width`` is not used."""
        return n_frames, _count_tokens_per_frame(height, self._vision("patch_size", 14))

    def tower_work(self, height: int, width: int) -> TowerWork:
        """Count the matrix products for encoding one frame.

        Patches pass through the projector before they are pooled, so no weight is applied per token.
        """
        C = self._vision("hidden_size", 1152)
        inner = self._vision("intermediate_size", 4304)
        D = self._get_text_width()
        patch = self._vision("patch_size", 14)
        depth = self._vision("num_hidden_layers", 26)
        P = (height // patch) * (width // patch)
        patch_weights = 3 * patch**2 * C + depth * (4 * C**2 + 2 * C * inner) + C * D + D**2
        return TowerWork(P, patch_weights, 0, depth * 4 * P**2 * C)

    def token_bytes(self, n_frames: int, height: int, width: int, evidence: Sequence[str] = ()) -> int:
        """Compute the size in bytes of a video's visual tokens and evidence in bfloat16.

        Args:
            evidence: evidence names. ``frame_feature`` has the vision width per frame; per token, ``image_embedding``
                has the vision width, ``token_key`` the width of a head, and any other evidence a single number.
        """
        channels = self._vision("hidden_size", 1152)
        widths = {"image_embedding": channels, "token_key": channels // self._vision("num_attention_heads", 16)}
        numbers = self._get_text_width() + sum(widths.get(name, 1) for name in evidence if name not in PER_FRAME)
        T, N = self.token_counts(n_frames, height, width)
        return T * (N * numbers + channels * sum(name in PER_FRAME for name in evidence)) * 2

    def _get_text_width(self) -> int:
        """Return D, the language model's hidden size in config.json, by default 4096."""
        return int(self.source.config.get("text_config", {}).get("hidden_size", 4096))

    def _vision(self, name: str, default: int) -> int:
        """Read an integer from the vision settings of config.json."""
        number: int = self.source.config.get("vision_config", {}).get(name, default)
        return number


class LlavaOnevisionBackbone(Backbone):
    """A loaded LLaVA-OneVision vision part: the stock model without its language model."""

    @property
    def hidden_size(self) -> int:
        """D, the width of a visual token."""
        return int(self.model.image_newline.shape[0])

    def newline(self) -> Tensor:
        """Return the row [D] that the stock model appends to a video's tokens."""
        row: Tensor = self.model.image_newline.detach()
        return row

    def encode_chunk(self, frames: Tensor, evidence: Mapping[str, str]) -> VisualTokens:
        """Encode [t,384,384,3] uint8 to tokens [t,196,D] and the requested evidence, in one pass of the tower.

        Evidence of patches is pooled to tokens as the features are.
        """
        pixels = self.preprocessor.normalise(frames, self.device, self.dtype)
        vision = self.model.config.vision_config
        tokens_per_frame = _count_tokens_per_frame(vision.image_size, vision.patch_size)
        observers = {source: self._make_observer(source) for source in sorted(set(evidence.values()))}
        with ExitStack() as hooks:
            for observer in observers.values():
                hooks.enter_context(observe_inputs(observer.module, observer))
            # Some versions of transformers append the newline row here; the slice drops it.
            tokens = self._compute_features(pixels)[: len(pixels) * tokens_per_frame]
        outputs = {source: observer.evidence() for source, observer in observers.items()}
        evidence_by_label: dict[str, Tensor] = {}
        for key, source in evidence.items():
            name = get_evidence_name(key, source)
            values = outputs[source][name]
            evidence_by_label[key] = values if name in PER_FRAME else self._pool_patches(values)
        return VisualTokens(tokens.reshape(len(pixels), tokens_per_frame, self.hidden_size), evidence_by_label)

    def _compute_features(self, pixels_F3HW: Tensor) -> Tensor:
        """Compute the pooled features [F*N,D] of frames, as the stock get_video_features; a newline row may follow.

        The stock method keeps the hidden states of all layers, so on a GPU the layers are called one by one instead.
        """
        if self.steps is None:
            features: Tensor = self.model.get_video_features(pixels_F3HW[None], return_dict=True).pooler_output[0]
            return features
        states = self._vision.embeddings(pixels_F3HW)
        for layer in self.layers:
            states = layer(states, attention_mask=None)
        pooled: Tensor = self.model.apply_pooling(self.model.multi_modal_projector(states))
        return pooled.flatten(0, 1)

    def _suit_gpu(self) -> FusedSteps:
        return optimize_llava(self.model, self._vision)

    def encode_pass(self, videos: Sequence[Tensor], evidence: Mapping[str, str]) -> list[VisualTokens]:
        """Encode the videos, [t,384,384,3] uint8 each, in one pass; return tokens [t,196,D] and evidence of each.

        ``evidence`` (label -> source) names the tensors [t,...] that are collected beside the tokens.
        """
        lengths = [len(frames) for frames in videos]
        visual = self.encode_chunk(torch.cat([*videos]), evidence)
        evidence_by_label = {name: torch.split(values, lengths) for name, values in visual.evidence.items()}
        return [
            VisualTokens(tokens, {name: parts[i] for name, parts in evidence_by_label.items()})
            for i, tokens in enumerate(torch.split(visual.tokens, lengths))
        ]

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers of the vision tower up to the one that visual tokens are taken from, in order."""
        layers = self._vision.encoder.layers
        # Hidden state 0 is the input of the first layer, and state k is the output of layer k - 1.
        states = range(len(layers) + 1)
        return [*layers][: states[self.model.config.vision_feature_layer]]

    @property
    def _vision(self) -> Any:
        """The module with the vision tower's embeddings and layers; its name depends on the library version."""
        return getattr(self.model.vision_tower, "vision_model", self.model.vision_tower)

    def _make_observer(self, source: str) -> FrameObserver:
        """Create the observer that computes the evidence of ``source`` while the tower runs.

        LAST_LAYER observes the attention of the last layer. POOLING_HEAD and SINGLE_PATCHES (of gstep.evidence) observe
        the input of the projector, and need the loaded ``pooling_head``. Anything else is an AssertionError.
        """
        if source == LAST_LAYER:
            layer: Any = self.layers[-1].self_attn
            return FrameObserver(layer, partial(compute_last_layer_evidence, layer))
        assert source in HEAD_SOURCES and self.pooling_head is not None
        compute = compute_probe_evidence if source == POOLING_HEAD else compute_patch_evidence
        return FrameObserver(self.model.multi_modal_projector, partial(compute, self.pooling_head))

    def _pool_patches(self, values_TSE: Tensor) -> Tensor:
        """Pool values of all 27 x 27 patches, [T,S] or [T,S,E], to the N tokens per frame: [T,N] or [T,N,E]."""
        pooled: Tensor = self.model.apply_pooling(values_TSE.reshape(*values_TSE.shape[:2], -1))
        return pooled.reshape(len(pooled), -1, *values_TSE.shape[2:])

    def model_extra(self, video: SampledVideo) -> ModelExtra:
        """Return only the grid."""
        vision = self.model.config.vision_config
        side = math.isqrt(_count_tokens_per_frame(vision.image_size, vision.patch_size))
        return {"grid": [side, side]}


def _count_tokens_per_frame(image_size: int, patch_size: int) -> int:
    """Count the tokens of a square frame, whose grid of patches is pooled to half its side, rounded up."""
    return math.ceil(image_size // patch_size / 2) ** 2
