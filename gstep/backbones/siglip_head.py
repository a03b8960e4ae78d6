"""SigLIP's attention-pooling head, from a SigLIP checkpoint: LLaVA-OneVision is made of its tower without the head.

Thirteen tensors are read and nothing else. The head runs in float32 whatever the encoder's precision: in 16 bits many
tokens of a frame would get the same attention.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gstep.backbones.checkpoint import find_weight_files, read_tensors
from gstep.backbones.files import CheckpointFiles
from gstep.errors import ModelError

NAMES = frozenset(
    {
        *("post_layernorm.weight", "post_layernorm.bias"),
        "head.probe",
        *("head.attention.in_proj_weight", "head.attention.in_proj_bias"),
        *("head.attention.out_proj.weight", "head.attention.out_proj.bias"),
        *("head.layernorm.weight", "head.layernorm.bias"),
        *("head.mlp.fc1.weight", "head.mlp.fc1.bias", "head.mlp.fc2.weight", "head.mlp.fc2.bias"),
    }
)
#: Of config.json, what decides the head's output and no tensor shows; with the defaults of SiglipVisionConfig.
DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 12,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}
TINY = "tiny"


@dataclass(frozen=True)
class PoolingHeadSource:
    """A head that was found. Pickles; means the same weights on every node.

    Attributes:
        name: the argument as given.
        identity: "siglip-head:<hash>" of the head's tensors and of what config.json says of it, so that it is the same
            from every kind of checkpoint.
        files: where the checkpoint's files are.
        weight_files: the names of the safetensors files.
        width: channels that go in, and come out.
        config: the vision part of config.json.
    """

    name: str
    identity: str
    files: CheckpointFiles
    weight_files: tuple[str, ...]
    width: int
    config: dict[str, Any] = field(repr=False, hash=False)

    @classmethod
    def resolve(cls, siglip: str | Path, width: int) -> PoolingHeadSource:
        """Find the head for a tower of ``width`` channels and read it once.

        Args:
            siglip: a folder or Hugging Face id of a SigLIP checkpoint with safetensors, or "tiny".

        Raises ModelError, with the remedy, where there is no such checkpoint, or its head does not fit.
        """
        name = str(siglip)
        files = CheckpointFiles("tiny", "tiny-siglip") if name == TINY else CheckpointFiles.locate(name)
        config = files.read_json("config.json") or {}
        if config.get("model_type") not in ("siglip", "siglip_vision_model"):
            raise ModelError(
                f"{name!r} is no SigLIP checkpoint (its model type is {config.get('model_type')!r}): for the published "
                "LLaVA-OneVision models use google/siglip-so400m-patch14-384"
            )
        vision = config.get("vision_config", config)
        found = cls(name, "", files, find_weight_files(name, files), width, vision)
        tensors = read_head(found)
        if missing := sorted(NAMES - tensors.keys()):
            raise ModelError(f"{name!r} lacks {', '.join(missing)}: name a SigLIP checkpoint with its pooling head")
        if tensors["head.probe"].shape[-1] != width:
            raise ModelError(
                f"the pooling head of {name!r} is {tensors['head.probe'].shape[-1]} channels wide, the vision tower "
                f"{width}: name the SigLIP checkpoint that the tower was made of"
            )
        return replace(found, identity=_identity(tensors, vision))

    def file(self, filename: str) -> Path:
        """The local path of a file, downloaded or built on this node if need be."""
        path = self.files.find(filename)
        if path is None:
            raise ModelError(f"{self.name!r} lacks the file {filename}: download the whole checkpoint")
        return path


def read_head(source: PoolingHeadSource) -> dict[str, Tensor]:
    """The head's tensors as they are stored, with or without ``vision_model.`` on disk, by their names without."""

    def wanted(key: str) -> str | None:
        name = key.removeprefix("vision_model.")
        return name if name in NAMES else None

    return read_tensors(source, wanted)


class PoolingHead(nn.Module):
    """post_layernorm and the stock head; without gradients, in eval mode."""

    def __init__(self, config: Any) -> None:
        from transformers.models.siglip.modeling_siglip import (  # noqa: PLC0415 - seconds, and rarely needed
            SiglipMultiheadAttentionPoolingHead,
        )

        super().__init__()
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.head = SiglipMultiheadAttentionPoolingHead(config)

    @classmethod
    def load(cls, source: PoolingHeadSource, device: str) -> PoolingHead:
        """Raises ModelError where this node has other weights than the one that resolved it, or the config misfits."""
        from transformers import SiglipVisionConfig  # noqa: PLC0415

        tensors = read_head(source)
        if _identity(tensors, source.config) != source.identity:
            raise ModelError(
                f"{source.name!r} has another pooling head on this node: copy the checkpoint to every node"
            )
        with torch.device("meta"):
            head = cls(SiglipVisionConfig(**source.config))
        try:
            head.load_state_dict(
                {name: value.to(device, torch.float32) for name, value in tensors.items()}, assign=True
            )
        except RuntimeError as error:
            raise ModelError(f"{source.name!r}: config.json does not fit the pooling head: {error}") from error
        return head.eval().requires_grad_(False)

    def forward(self, features_TSC: Tensor) -> tuple[Tensor, Tensor]:
        """The tower's output of some frames -> a feature of each [T,C] and the probe's attention, head mean, [T,S]."""
        seen: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
            seen.append(output[1].squeeze(1))  # the stock head drops it

        handle = self.head.attention.register_forward_hook(keep)
        try:
            feature_TC: Tensor = self.head(self.post_layernorm(features_TSC.float()))
        finally:
            handle.remove()
        return feature_TC, seen[0]

    def of_single_patches(self, features_TSC: Tensor) -> Tensor:
        """The tower's output of some frames -> each patch in SigLIP's image-text space, [T,S,C].

        A patch goes through the head as if the probe saw it alone. Attention over one position is 1 whatever the probe
        asks, so that the patch's value is the result; the rest is SiglipMultiheadAttentionPoolingHead.forward
        (transformers, models/siglip/modeling_siglip.py). CDPruner's official code, which is for CLIP alone, likewise
        sends each patch through what CLIP has for its pooled token: post_layernorm and the visual projection
        (llava/model/multimodal_encoder/clip_encoder.py).
        """
        attention = self.head.attention
        weight_CC, bias_C = attention.in_proj_weight.chunk(3)[2], attention.in_proj_bias.chunk(3)[2]
        value_TSC = linear(self.post_layernorm(features_TSC.float()), weight_CC, bias_C)
        pooled_TSC = linear(value_TSC, attention.out_proj.weight, attention.out_proj.bias)
        embedded_TSC: Tensor = pooled_TSC + self.head.mlp(self.head.layernorm(pooled_TSC))
        return embedded_TSC


def _identity(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    said = {name: config.get(name, default) for name, default in DEFAULTS.items()}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"\n{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return f"siglip-head:{digest.hexdigest()[:32]}"
