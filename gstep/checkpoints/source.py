"""A model argument resolved to its files: the model, and the pooling head of a SigLIP checkpoint."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gstep.checkpoints import random_weights, tiny
from gstep.checkpoints.files import CheckpointFiles
from gstep.checkpoints.tensors import (
    SERVED,
    TensorSource,
    find_weight_files,
    folder_identity,
    read_tensors,
    refuse_adapter_files,
    refuse_quantized,
)
from gstep.errors import ModelError
from gstep.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class ModelSource(TensorSource):
    """The description of a model that was found, without its weights.

    Its identity is "hub:<id>@<sha>", "folder:<hash>", "shapes:<hash>", "tiny:<version>-<hash>" or "random:<hash>".

    Attributes:
        model_type: a name in ``gstep.families``.
        config: config.json.
        preprocessor: the settings that the stock video processor would load (without its class defaults).
        pooling_head: that of another checkpoint, for evidence that the model itself cannot give.
    """

    model_type: str
    config: dict[str, Any] = field(repr=False, hash=False)
    preprocessor: dict[str, Any] = field(repr=False, hash=False)
    pooling_head: PoolingHeadSource | None = None

    @classmethod
    def resolve(cls, model: str | Path, revision: str | None = None, *, quantized: bool = False) -> ModelSource:
        """Find a model by its folder, Hugging Face id or name here. Small JSON files are read, weights are not.

        Args:
            model: a folder with config.json and *.safetensors, a Hugging Face id, "shapes" or "tiny".
            revision: branch, tag or commit of a Hugging Face id; its default branch where None.
            quantized: whether the language model may be quantized, by a method in ``tensors.SERVED``; visual tokens and
                vLLM allow it.

        Raises ModelError, with the remedy, where there is no such model or it cannot be used.
        """
        name = str(model)
        files = CheckpointFiles.locate(name, revision)
        refuse_adapter_files(name, files)
        model_type, config = _known_config(name, files, SERVED if quantized else ())
        weight_files = find_weight_files(name, files)
        identity = _identity(files, weight_files, config)
        return cls(name, identity, files, weight_files, model_type, config, _preprocessor_settings(name, files))

    @classmethod
    def random(cls, model: str | Path, folder: Path, revision: str | None = None) -> ModelSource:
        """Return the same model with seeded random weights, for measuring: only its config.json has to be there.

        Args:
            folder: an empty one, for its small files and stand-ins of those that are missing; it must outlive the use.

        Raises ModelError as :meth:`resolve` does.
        """
        name = str(model)
        found = CheckpointFiles.locate(name, revision)
        model_type, config = _known_config(name, found)
        files, identity = random_weights.complete(found, config, folder), random_weights.identity(config)
        return cls(name, identity, files, (), model_type, config, _preprocessor_settings(name, files))

    def file(self, filename: str) -> Path:
        """Return the local path of a file, as any source does.

        Raises ModelError too where this node has another model of that name than the driver.
        """
        if self.files.kind in {"shipped", "tiny"}:
            mine = _identity(self.files, self.weight_files, self.config)
            if mine != self.identity:
                raise ModelError(
                    f"this node has {mine}, the driver {self.identity}: "
                    "install the same version of this package and of numpy on every node"
                )
        return super().file(filename)

    def stock_config(self) -> PretrainedConfig:
        """Parse config.json into transformers' configuration of the family, old layouts too, with its defaults.

        Raises ModelError where transformers is too old for the family.
        """
        from transformers import CONFIG_MAPPING  # noqa: PLC0415 - seconds, and preprocessing needs none of it

        if self.model_type not in CONFIG_MAPPING:
            raise ModelError(
                f"{self.name!r}: transformers {version('transformers')} does not know {self.model_type}: "
                "pip install -U 'transformers<6', on every node"
            )
        return CONFIG_MAPPING[self.model_type].from_dict(copy.deepcopy(self.config))

    def pretrained(self) -> tuple[str, str | None]:
        """Return (name or folder, revision) for from_pretrained of transformers on this node, for the whole model."""
        if self.files.kind == "hub":
            return self.files.location, self.files.revision
        return str(self.file("config.json").parent), None


def _known_config(name: str, files: CheckpointFiles, served: Collection[str] = ()) -> tuple[str, dict[str, Any]]:
    """Read config.json, and return the model type that it names with it.

    Raises ModelError where it is missing, describes a model quantized by a method not ``served``, or names a type that
    no family here has.
    """
    config = files.read_json("config.json")
    if config is None:
        raise ModelError(f"{name!r} has no config.json: pass a model folder in the layout of transformers")
    refuse_quantized(name, config, served)
    model_type = str(config.get("model_type"))
    if model_type in FAMILIES:
        return model_type, config
    remote = " Code that comes with a checkpoint (auto_map) is never run." if "auto_map" in config else ""
    near = get_close_matches(model_type, FAMILIES, n=1, cutoff=0.5)
    nearest = f" The nearest is {near[0]}: {FAMILIES[near[0]].published}." if near else ""
    raise ModelError(f"{name!r} has the model type {model_type!r}; known: {', '.join(FAMILIES)}.{nearest}{remote}")


def _identity(files: CheckpointFiles, weight_files: tuple[str, ...], config: dict[str, Any]) -> str:
    """Return the identity of the weights: a commit of the Hub, or a hash of the files."""
    if files.kind == "hub":
        return f"hub:{files.location}@{files.revision}"
    if files.kind == "tiny":
        return tiny.identity(files.location)
    found = folder_identity(files.folder(), weight_files, config)
    # Named after the model, since the folder depends on where this package is installed.
    return found.replace("folder:", f"{files.location}:") if files.kind == "shipped" else found


def _preprocessor_settings(name: str, files: CheckpointFiles) -> dict[str, Any]:
    """Read the preprocessor settings with the precedence of transformers' get_video_processor_dict.

    See video_processing_utils.py there.
    """
    nested = (files.read_json("processor_config.json") or {}).get("video_processor")
    if isinstance(nested, dict):
        return nested
    for filename in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if (settings := files.read_json(filename)) is not None:
            return settings
    raise ModelError(
        f"{name!r} has neither video_preprocessor_config.json nor preprocessor_config.json: copy them from the "
        "original checkpoint, the tokens depend on them"
    )


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
        refuse_adapter_files(name, files)
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
