"""The attention-pooling head of a SigLIP checkpoint as files: found, identified and read, not yet a module.

LLaVA-OneVision is made of SigLIP's tower without the head. Thirteen tensors are read and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gstep.checkpoints.files import CheckpointFiles
from gstep.checkpoints.tensors import TensorSource, find_weight_files, read_tensors, refuse_quantized
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
#: Settings in config.json that change the head's output but no tensor, with the defaults of SiglipVisionConfig.
DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 12,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}
TINY = "tiny"


@dataclass(frozen=True)
class PoolingHeadSource(TensorSource):
    """The description of a pooling head that was found.

    Its identity is "siglip-head:<hash>" of the head's tensors and of what config.json says of it, so that it is the
    same from every kind of checkpoint.

    Attributes:
        width: channels that go in, and come out.
        config: the vision part of config.json.
    """

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
        refuse_quantized(name, config)
        vision = config.get("vision_config", config)
        found = cls(name, "", files, find_weight_files(name, files), width, vision)
        tensors = read_head(found)
        if missing := sorted(NAMES - tensors.keys()):
            raise ModelError(f"{name!r} has no {', '.join(missing)}: name a SigLIP checkpoint with its pooling head")
        if tensors["head.probe"].shape[-1] != width:
            raise ModelError(
                f"the pooling head of {name!r} is {tensors['head.probe'].shape[-1]} channels wide, the vision tower "
                f"{width}: name the SigLIP checkpoint that the tower was made of"
            )
        return replace(found, identity=head_identity(tensors, vision))


def read_head(source: PoolingHeadSource) -> dict[str, Tensor]:
    """Read the head's tensors as they are stored, by their names without ``vision_model.``, which may be on disk."""

    def wanted(key: str) -> str | None:
        name = key.removeprefix("vision_model.")
        return name if name in NAMES else None

    return read_tensors(source, wanted)


def head_identity(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """Compute "siglip-head:<hash>" of the head's tensors and of what ``config`` holds that no tensor shows."""
    said = {name: config.get(name, default) for name, default in DEFAULTS.items()}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"\n{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return f"siglip-head:{digest.hexdigest()[:32]}"
