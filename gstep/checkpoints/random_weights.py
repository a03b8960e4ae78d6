"""Checkpoints without weights, for measuring: seeded random numbers in the shapes that config.json gives.

The time and memory that a model takes do not depend on its weights. Its answers do: none of these is worth reading.
The tiny models (``gstep.checkpoints.tiny``) are no such checkpoints: their weights are drawn by NumPy, the same bits
on every machine and without transformers, since their hash is part of a cache's identity.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gstep.checkpoints import tiny
from gstep.checkpoints.files import CheckpointFiles
from gstep.checkpoints.tensors import INDEX
from gstep.checkpoints.tiny.tokenizer import TinyTokenizer, write_bytes
from gstep.errors import ModelError

_STD = 0.02  # initializer_range of the configurations of these models
_TOKENIZERS = ("tokenizer.json", "vocab.json")
_PREPROCESSORS = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
_COPIED = (
    *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *(*_PREPROCESSORS, *_TOKENIZERS, "tokenizer_config.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json"),
)
#: Special tokens of the tiny tokenizers, and what config.json calls their ids.
_IDS = {
    **{"<image>": "image_token_id", "<|image_pad|>": "image_token_id", "<IMG_CONTEXT>": "image_token_id"},
    **{"<video>": "video_token_id", "<|video_pad|>": "video_token_id"},
    **{"<|vision_start|>": "vision_start_token_id", "<|vision_end|>": "vision_end_token_id"},
}


def without_weights(model: str) -> bool:
    """Return whether a model is a folder with a config.json and no weights of any kind, complete or not."""
    folder = Path(model).expanduser()
    if model in tiny.TINY or not (folder / "config.json").is_file():
        return False
    files = CheckpointFiles.locate(model)
    return not files.has(INDEX) and not files.names(".safetensors", ".bin", ".pt", ".pth", ".gguf")


def complete(files: CheckpointFiles, config: Mapping[str, Any], folder: Path) -> CheckpointFiles:
    """Copy a checkpoint's small files to an empty ``folder``, and write stand-ins for those that are missing.

    Without preprocessor files the stock classes' defaults hold. Without a tokenizer every byte is a token, and the
    special ones have the ids that config.json gives them: a text is several times as many tokens as it would be.

    Raises ModelError where the vocabulary is too small for that.
    """
    for name in _COPIED:
        if (path := files.find(name)) is not None:
            shutil.copyfile(path, folder / name)
    if not any((folder / name).exists() for name in _PREPROCESSORS):
        (folder / "preprocessor_config.json").write_text("{}\n", encoding="utf-8")
    if not any((folder / name).exists() for name in _TOKENIZERS):
        kind = next(one.tokenizer for one in tiny.TINY.values() if one.config["model_type"] == config["model_type"])
        write_bytes(folder, kind, *_vocabulary(files, config, kind))
    return CheckpointFiles("folder", str(folder))


def identity(config: Mapping[str, Any]) -> str:
    """Compute "random:<hash>" of config.json, which decides all weights on one kind of device."""
    return f"random:{hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:32]}"


def random_tensors(shapes: Mapping[str, Tensor], device: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Make values for tensors of these names and shapes on the device in ``dtype``, without a copy.

    Matrices are normal with the standard deviation that such models start training with, norms 1, biases 0: activations
    stay finite through any number of layers. The same seed gives the same numbers on one kind of device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, like in shapes.items():
        values = torch.empty(like.shape, device=device, dtype=dtype)
        if like.ndim < 2:
            tensors[name] = values.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            tensors[name] = values.normal_(0.0, _STD, generator=generator)
    return tensors


def _vocabulary(files: CheckpointFiles, config: Mapping[str, Any], kind: TinyTokenizer) -> tuple[dict[str, int], int]:
    """Return special-token ids and vocabulary size for a checkpoint without tokenizer.

    Raises ModelError if they do not fit.
    """
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - seconds; it knows the defaults of old layouts

    parsed = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(dict(config)))
    size = int(parsed.get_text_config().vocab_size)
    ids = {token: int(getattr(parsed, _IDS[token])) for token in kind.special if hasattr(parsed, _IDS.get(token, ""))}
    free = (i for i in range(size - 1, -1, -1) if i not in ids.values())  # from the end: bytes are at the beginning
    ids |= {token: next(free) for token in kind.special if token not in ids}
    if size < 256 + len(ids) or max(ids.values()) >= size:
        raise ModelError(
            f"{files.location!r} has no tokenizer, and none can be made for its vocabulary of {size} with the special "
            f"tokens {ids}: copy tokenizer.json and tokenizer_config.json from the original checkpoint"
        )
    return ids, size
