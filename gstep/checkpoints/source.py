"""Resolving a model argument to a model's files, config and identity; also the pooling head of a SigLIP checkpoint."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
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
    compute_folder_identity,
    find_weight_files,
    read_tensors,
    refuse_adapter_files,
    refuse_quantized,
)
from gstep.errors import ModelError
from gstep.families import FAMILIES, GENERIC, choose_family
from gstep.lazy import find_torchvision_mismatch, load_object

if TYPE_CHECKING:
    from transformers import PretrainedConfig

if find_torchvision_mismatch() is not None:
    # The families of the table need no torchvision, and transformers loads their models without one.
    sys.modules["torchvision"] = None  # type: ignore[assignment]

_COPY = "copy the file again from the original checkpoint"


@dataclass(frozen=True)
class ModelSource(TensorSource):
    """A resolved model without its weights: identity, files, config and preprocessor settings.

    The identity is "hub:<id>@<sha>", "folder:<hash>", "shapes:<hash>", "tiny:<version>-<hash>" or "random:<hash>".

    Attributes:
        preprocessor: the settings that the stock video processor would load (without its class defaults); for the
            family ``generic``, the files that its processor loads, by name.
        pooling_head: the pooling head of a SigLIP checkpoint, or None.
        family: a name in ``gstep.families``, or the import path ``module:Class`` of a user family.
        layout: the findings of the family's gate as JSON values; None for a family without a gate.
    """

    model_type: str
    config: dict[str, Any] = field(repr=False, hash=False)
    preprocessor: dict[str, Any] = field(repr=False, hash=False)
    pooling_head: PoolingHeadSource | None = None
    family: str = ""
    layout: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)

    def __post_init__(self) -> None:
        """Set the family of the model type if none is given."""
        object.__setattr__(self, "family", self.family or choose_family(self.model_type))

    @classmethod
    def resolve(
        cls,
        model: str | Path,
        revision: str | None = None,
        *,
        quantized: bool = False,
        family: str | None = None,
        gate: bool = True,
    ) -> ModelSource:
        """Resolve a folder, a Hugging Face id or the name of a model in this package.

        Reads small files, and of the weights at most headers and samples. The gate of the family ``generic`` may
        compare a reduced model, which takes a minute or two.

        Args:
            model: a folder with config.json and *.safetensors, a Hugging Face id, "shapes", "tiny" or "tiny-...".
            revision: a branch, tag or commit of a Hugging Face id; None for its default branch.
            quantized: True allows a language model quantized by a method in ``tensors.SERVED``, for users of only the
                vision part and for vLLM.
            family: "generic" or ``module:Class``, instead of the family of the model type.
            gate: False skips the gate of the family; ``layout`` is None then.

        Raises:
            ModelError: there is no such model, a file is missing or not valid, or the model is quantized, an adapter,
                or refused by the gate.
        """
        name = str(model)
        files = CheckpointFiles.locate(name, revision)
        refuse_adapter_files(name, files)
        config, family = _read_config(name, files, family, SERVED if quantized else ())
        entry = FAMILIES.get(family, FAMILIES[GENERIC])  # the files of a user family are unknown, too
        files = replace(files, published=frozenset(entry.files), usual=frozenset(entry.usual_files))
        source = cls(name, "", files, (), str(config.get("model_type")), config, {}, family=family)
        if family == GENERIC:
            source.find_stock_class()  # raises for a model that accepts no videos
        weight_files = find_weight_files(name, files)
        read_settings = _read_processor_files if family == GENERIC else _read_video_settings
        source = replace(
            source,
            identity=_compute_identity(files, weight_files, config),
            weight_files=weight_files,
            preprocessor=read_settings(name, files),
        )
        if gate and family in FAMILIES and entry.gate is not None:
            source = replace(source, layout=load_object(entry.gate)(source))
        return source

    @classmethod
    def random(
        cls, model: str | Path, folder: Path, revision: str | None = None, family: str | None = None
    ) -> ModelSource:
        """Resolve a model with seeded random weights, for benchmarks: of its files, only config.json must exist.

        The family ``generic`` is resolved with its own weights instead.

        Args:
            folder: an empty folder for copies of its small files and stand-ins for missing ones; it must outlive the
                result.

        Raises:
            ModelError: there is no such model or it cannot be used.
        """
        name = str(model)
        original = CheckpointFiles.locate(name, revision)
        config, family_name = _read_config(name, original, family)
        if family_name == GENERIC:
            return cls.resolve(model, revision, family=family)
        files = random_weights.write_stand_ins(original, config, folder)
        identity = random_weights.compute_random_identity(config)
        settings = _read_video_settings(name, files)
        return cls(name, identity, files, (), str(config.get("model_type")), config, settings, family=family_name)

    def file(self, filename: str) -> Path:
        """Return the local path of a file, downloaded or built on this node if necessary.

        Raises:
            ModelError: there is no such file, it cannot be downloaded, or this node's shipped or tiny model differs
                from the driver's.
        """
        if self.files.kind in {"shipped", "tiny"}:
            identity = _compute_identity(self.files, self.weight_files, self.config)
            if identity != self.identity:
                raise ModelError(
                    f"this node has {identity}, the driver {self.identity}: "
                    "install the same version of this package and of numpy on every node"
                )
        return super().file(filename)

    def parse_stock_config(self) -> PretrainedConfig:
        """Parse config.json into the model's transformers config.

        Raises:
            ModelError: transformers does not know the model type, or does not accept a setting.
        """
        from transformers import CONFIG_MAPPING  # noqa: PLC0415 - seconds, and preprocessing needs none of it

        if self.model_type not in CONFIG_MAPPING:
            raise ModelError(
                f"{self.name!r}: transformers {version('transformers')} does not know {self.model_type}: "
                "pip install -U 'transformers<6', on every node"
            )
        try:
            return deepcopy(_parse_config(CONFIG_MAPPING[self.model_type], json.dumps(self.config)))
        except Exception as error:  # of any type that transformers raises for a wrong setting
            reason = f"{type(error).__name__}: {error}"
            raise ModelError(f"{self.name!r}: config.json is not valid ({reason}): {_COPY}") from error

    def find_stock_class(self) -> tuple[type[Any], PretrainedConfig]:
        """Return the transformers class that reads videos and writes text, and its part of the config.

        For an Omni model, both are those of the thinker. Models without ``architectures`` are looked up in
        transformers' tables.

        Raises:
            ModelError: transformers has no such class or cannot import it, or the class sees no videos.
        """
        import transformers  # noqa: PLC0415 - seconds, and the families of the table need none of it here

        config = self.parse_stock_config()
        names = [str(name) for name in self.config.get("architectures") or ()]
        thinker = getattr(config, "thinker_config", None)
        if thinker is not None:
            names, config = [name.replace("ForCond", "ThinkerForCond") for name in names], thinker
        try:
            values = [getattr(transformers, name, None) for name in names]
            classes: list[Any] = [value for value in values if isinstance(value, type)]
            if not classes and (thinker is not None or not names):
                autos = transformers.AutoModelForMultimodalLM, transformers.AutoModelForImageTextToText
                classes = [auto._model_mapping[type(config)] for auto in autos if type(config) in auto._model_mapping]
                if not classes and thinker is not None:  # in no table of transformers
                    name = f"{type(config).__name__.removesuffix('Config')}ForConditionalGeneration"
                    classes = [getattr(transformers, name)] if hasattr(transformers, name) else []
        except (ImportError, RuntimeError) as error:
            root: BaseException = error
            while root.__cause__ is not None:
                root = root.__cause__
            raise ModelError(
                f"{self.name!r}: transformers {version('transformers')} cannot import the code of {self.model_type} "
                f"({root}): if the error is torchvision's, install the build of torchvision that was made for this "
                "torch, or remove torchvision"
            ) from error
        if not (classes or names):
            raise ModelError(
                f"{self.name!r}: transformers {version('transformers')} has no class of {self.model_type} that takes "
                "videos and text"
            )
        if not classes:
            raise ModelError(
                f"{self.name!r}: config.json names the architectures {', '.join(names)}, of which transformers "
                f"{version('transformers')} has none{_NEVER_RUN if 'auto_map' in self.config else ''}: use the "
                "checkpoint in the layout of transformers, which often has -hf in its name"
            )
        # Some classes leave get_video_features to the inner model, but all that encode anything have this argument.
        if "mm_encoder_outputs" not in inspect.signature(classes[0].forward).parameters:
            raise ModelError(
                f"{self.name!r}: {classes[0].__name__} of transformers sees no videos (its forward takes no "
                "mm_encoder_outputs): use a model that takes videos and text"
            )
        return classes[0], config

    def pretrained(self) -> tuple[str, str | None]:
        """Return (Hugging Face id or local folder, revision), the arguments of transformers' from_pretrained."""
        if self.files.kind == "hub":
            return self.files.location, self.files.revision
        return str(self.file("config.json").parent), None


@lru_cache(maxsize=16)
def _parse_config(config_class: type[PretrainedConfig], text: str) -> PretrainedConfig:
    """Parse the text of a config.json, which takes milliseconds: transformers also formats the config for its log.

    The result is shared between calls. Copy it before changing it.
    """
    return config_class.from_dict(_decode_floats(json.loads(text)))


def _decode_floats(value: Any) -> Any:
    """Copy a value of config.json, with ``{"__float__": "Infinity"}`` converted to a float."""
    if isinstance(value, dict):
        return (
            float(value["__float__"])
            if value.keys() == {"__float__"}
            else {k: _decode_floats(v) for k, v in value.items()}
        )
    return [_decode_floats(part) for part in value] if isinstance(value, list) else value


def _read_config(
    name: str, files: CheckpointFiles, family: str | None, served_methods: Collection[str] = ()
) -> tuple[dict[str, Any], str]:
    """Read and check config.json; return it with the family: ``family``, or that of its model type if None.

    Args:
        served_methods: the quantization methods that are allowed, except for the family ``generic``.

    Raises:
        ModelError: the file is missing, the model is quantized by another method, or ``family`` is neither "generic"
            nor an import path; a family of the table has an invalid number, or ``generic`` a model type unknown to
            transformers.
    """
    if family not in (None, GENERIC) and ":" not in family:
        raise ModelError(f"the family {family!r} is neither {GENERIC} nor your own class as module:Class")
    config = files.read_json("config.json")
    if config is None:
        raise ModelError(f"{name!r} has no config.json: pass a model folder in the layout of transformers")
    model_type = str(config.get("model_type"))
    family = family or choose_family(model_type)
    refuse_quantized(name, config, () if family == GENERIC else served_methods)
    if family == GENERIC:
        _check_model_type(name, model_type, config)
    elif family in FAMILIES:
        _check_numbers(name, config)
    return config, family


_NEVER_RUN = ". Code that comes with a checkpoint (auto_map) is never run"


def _check_model_type(name: str, model_type: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError if transformers does not know the model type."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - seconds, and the families of the table need none of it

    if model_type in CONFIG_MAPPING:
        return
    if "model_type" not in config:
        raise ModelError(f"{name!r}: config.json has no model_type: {_COPY}")
    remote = _NEVER_RUN if "auto_map" in config else ""
    matches = get_close_matches(model_type, FAMILIES, n=1, cutoff=0.5)
    nearest = f" The nearest is {matches[0]}: {FAMILIES[matches[0]].published}." if matches else ""
    raise ModelError(
        f"{name!r} has the model type {model_type!r}, which transformers {version('transformers')} does not "
        f"know{remote}: pip install -U 'transformers<6', on every node, or use a checkpoint in the layout of "
        f"transformers.{nearest}"
    )


# Settings of config.json that are read without transformers, and whose types are therefore checked here.
_SIZES = frozenset(
    (
        *("hidden_size", "out_hidden_size", "intermediate_size", "num_attention_heads", "num_heads"),
        *("image_size", "patch_size", "temporal_patch_size", "spatial_merge_size", "window_size"),
    )
)
_LAYERS = frozenset(("num_hidden_layers", "depth"))
_IDS = frozenset(f"{kind}_token_{end}" for kind in ("image", "video") for end in ("id", "index")) | {
    *("vision_start_token_id", "vision_end_token_id")
}
_LISTS = frozenset(("deepstack_visual_indexes", "fullatt_block_indexes"))
_MAX_LAYERS, _MAX_SIZE = 2**12, 2**31


def _check_numbers(name: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError if a part of config.json is not an object, or has an invalid size, id or number of layers.

    Only the top level, text_config and vision_config are checked, for the keys in _SIZES, _LAYERS, _IDS and _LISTS.
    Layers must be below 4096, and other numbers below 2^31. Null passes outside vision_config, except for hidden_size.
    """

    def is_number(value: object, least: int, end: int) -> bool:
        return type(value) is int and least <= value < end

    parts = {f"{part}.": config.get(part, {}) for part in ("text_config", "vision_config")}
    for where, settings in {"": config, **parts}.items():
        if not isinstance(settings, dict):
            raise ModelError(f"{name!r}: {where[:-1]} in config.json is {settings!r}, not an object: {_COPY}")
        for key, value in settings.items():
            if value is None and where != "vision_config." and key != "hidden_size":
                continue  # transformers takes its default
            numbers = value if isinstance(value, list) else [value]
            is_valid = (
                (key not in _SIZES or (numbers and all(is_number(number, 1, _MAX_SIZE) for number in numbers)))
                and (key not in _LAYERS or is_number(value, 1, _MAX_LAYERS))
                and (key not in _IDS or is_number(value, 0, _MAX_SIZE))
                and (
                    key not in _LISTS
                    or (value is numbers and all(is_number(number, 0, _MAX_SIZE) for number in numbers))
                )
            )
            if not is_valid:
                raise ModelError(f"{name!r}: {where}{key} in config.json is {value!r}, which is not valid: {_COPY}")


def _compute_identity(files: CheckpointFiles, weight_files: tuple[str, ...], config: dict[str, Any]) -> str:
    """Compute the identity of the weights as text.

    It is "hub:NAME@COMMIT" for the Hub, the tiny model's own identity, and otherwise a hash of the files, which begins
    with "folder:" or, for a shipped model, with its name.
    """
    if files.kind == "hub":
        return f"hub:{files.location}@{files.revision}"
    if files.kind == "tiny":
        return tiny.compute_tiny_identity(files.location)
    identity = compute_folder_identity(files.folder(), weight_files, config)
    # A shipped model has its name in the identity, since its folder depends on the installation.
    return identity.replace("folder:", f"{files.location}:") if files.kind == "shipped" else identity


def _read_processor_files(name: str, files: CheckpointFiles) -> dict[str, Any]:
    """Read the files that AutoProcessor loads, without their chat template: {file name: content}.

    Raises:
        ModelError: there are none, or one is not valid.
    """
    contents = {}
    for filename in ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"):
        if (content := files.read_json(filename)) is not None:
            contents[filename] = {key: value for key, value in content.items() if key != "chat_template"}
    if not contents:
        raise ModelError(
            f"{name!r} has neither processor_config.json nor video_preprocessor_config.json nor "
            "preprocessor_config.json: copy them from the original checkpoint, the tokens depend on them"
        )
    return contents


def _read_video_settings(name: str, files: CheckpointFiles) -> dict[str, Any]:
    """Read the preprocessor settings with the precedence of transformers' get_video_processor_dict.

    The order is ``video_processor`` in processor_config.json, video_preprocessor_config.json, preprocessor_config.json.

    Raises:
        ModelError: no file has them, or a file is not valid.
    """
    nested = (files.read_json("processor_config.json") or {}).get("video_processor")
    if nested is not None:
        if not isinstance(nested, dict):
            raise ModelError(f"{name!r}: video_processor in processor_config.json is not an object: {_COPY}")
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
    """A resolved pooling head of a SigLIP checkpoint, without its weights.

    Its identity is "siglip-head:<hash>" of the head's tensors and settings.

    Attributes:
        width: the number of channels of its input and output.
        config: the vision part of config.json.
    """

    width: int
    config: dict[str, Any] = field(repr=False, hash=False)

    @classmethod
    def resolve(cls, siglip: str | Path, width: int) -> PoolingHeadSource:
        """Find the pooling head for a vision tower of ``width`` channels; its tensors are read once for the identity.

        Args:
            siglip: a folder or Hugging Face id of a SigLIP checkpoint with safetensors, or "tiny".

        Raises:
            ModelError: it is not a SigLIP checkpoint, is quantized or has an adapter, or the head is missing or has
                another width.
        """
        name = str(siglip)
        files = CheckpointFiles("tiny", "tiny-siglip") if name == TINY else CheckpointFiles.locate(name)
        refuse_adapter_files(name, files)
        config = files.read_json("config.json") or {}
        if config.get("model_type") not in ("siglip", "siglip_vision_model"):
            raise ModelError(
                f"{name!r} is not a SigLIP checkpoint (its model type is {config.get('model_type')!r}): for the "
                "published LLaVA-OneVision models use google/siglip-so400m-patch14-384"
            )
        refuse_quantized(name, config)
        vision = config.get("vision_config", config)
        source = cls(name, "", files, find_weight_files(name, files), width, vision)
        tensors = read_head(source)
        if missing := sorted(NAMES - tensors.keys()):
            raise ModelError(f"{name!r} has no {', '.join(missing)}: name a SigLIP checkpoint with its pooling head")
        if tensors["head.probe"].shape[-1] != width:
            raise ModelError(
                f"the pooling head of {name!r} is {tensors['head.probe'].shape[-1]} channels wide, the vision tower "
                f"{width}: name the SigLIP checkpoint that the tower was made of"
            )
        return replace(source, identity=compute_head_identity(tensors, vision))


def read_head(source: PoolingHeadSource) -> dict[str, Tensor]:
    """Read the head's tensors in their stored dtype, without the prefix ``vision_model.``; missing ones are omitted."""

    def rename(key: str) -> str | None:
        name = key.removeprefix("vision_model.")
        return name if name in NAMES else None

    return read_tensors(source, rename)


def compute_head_identity(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """Compute "siglip-head:<hash>" of the head's tensors and of the settings in DEFAULTS."""
    settings = {name: config.get(name, default) for name, default in DEFAULTS.items()}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"\n{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return f"siglip-head:{digest.hexdigest()[:32]}"
