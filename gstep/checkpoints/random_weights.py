"""Checkpoints without weights, for benchmarks: seeded random values in the shapes that config.json gives.

The time and memory of a model do not depend on its weights, but its answers are meaningless.
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
from gstep.checkpoints.tiny.tokenizer import TinyTokenizer, write_byte_tokenizer
from gstep.errors import ModelError

_STD = 0.02  # initializer_range in the configs of these models
_TOKENIZERS = ("tokenizer.json", "vocab.json")
_PREPROCESSORS = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
_FILES = (
    *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *(*_PREPROCESSORS, *_TOKENIZERS, "tokenizer_config.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json"),
)
#: Special tokens of the tiny tokenizers, and the keys of their ids in config.json.
_IDS = {
    **{"<image>": "image_token_id", "<|image_pad|>": "image_token_id", "<IMG_CONTEXT>": "image_token_id"},
    **{"<video>": "video_token_id", "<|video_pad|>": "video_token_id"},
    **{"<|vision_start|>": "vision_start_token_id", "<|vision_end|>": "vision_end_token_id"},
}


def has_no_weights(model: str) -> bool:
    """Return True if a model is a folder with a config.json, but without weights or an index.

    Weights are files ending in .safetensors, .bin, .pt, .pth or .gguf.
    """
    folder = Path(model).expanduser()
    if model in tiny.TINY or not (folder / "config.json").is_file():
        return False
    files = CheckpointFiles.locate(model)
    return not files.has(INDEX) and not files.names(".safetensors", ".bin", ".pt", ".pth", ".gguf")


def write_stand_ins(files: CheckpointFiles, config: Mapping[str, Any], folder: Path) -> CheckpointFiles:
    """Copy a checkpoint's small files into an empty ``folder``, and write stand-ins for missing ones; return its files.

    Files on the Hub are downloaded. The stand-in for all preprocessor files is empty. If there is neither
    tokenizer.json nor vocab.json, the stand-in has a token for each byte, and special tokens with the ids of
    config.json: texts take several times more tokens. Model types without a tiny model get no tokenizer.

    Raises:
        ModelError: the vocabulary is too small for the byte tokenizer.
    """
    for name in _FILES:
        if (path := files.find(name)) is not None:
            shutil.copyfile(path, folder / name)
    if not any((folder / name).exists() for name in _PREPROCESSORS):
        (folder / "preprocessor_config.json").write_text("{}\n", encoding="utf-8")
    if not any((folder / name).exists() for name in _TOKENIZERS):
        kinds = (t.tokenizer for t in tiny.TINY.values() if t.config["model_type"] == config["model_type"])
        if (kind := next(kinds, None)) is not None:
            write_byte_tokenizer(folder, kind, *_choose_token_ids(files, config, kind))
    return CheckpointFiles("folder", str(folder))


def compute_random_identity(config: Mapping[str, Any]) -> str:
    """Compute "random:<hash>" of config.json, which determines all weights on one kind of device."""
    return f"random:{hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:32]}"


def draw_tensors(shapes: Mapping[str, Tensor], device: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Draw random tensors with these names and shapes, directly on the device in ``dtype``.

    Matrices are normal with standard deviation 0.02, vectors are 1, or 0 if their names end in "bias". The same seed
    gives the same values on one kind of device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, weight in shapes.items():
        values = torch.empty(weight.shape, device=device, dtype=dtype)
        if weight.ndim < 2:
            tensors[name] = values.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            tensors[name] = values.normal_(0.0, _STD, generator=generator)
    return tensors


def _choose_token_ids(
    files: CheckpointFiles, config: Mapping[str, Any], kind: TinyTokenizer
) -> tuple[dict[str, int], int]:
    """Return (special token -> id, vocabulary size) for a checkpoint without a tokenizer.

    Tokens whose ids config.json lacks get the last free ids of the vocabulary.

    Raises:
        ModelError: the vocabulary is too small for 256 bytes and the special tokens.
    """
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - seconds; it has the defaults of old layouts

    stock = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(dict(config)))
    size = int(stock.get_text_config().vocab_size)
    ids = {token: int(getattr(stock, _IDS[token])) for token in kind.special if hasattr(stock, _IDS.get(token, ""))}
    free = (i for i in range(size - 1, -1, -1) if i not in ids.values())  # from the end: bytes are at the beginning
    ids |= {token: next(free) for token in kind.special if token not in ids}
    if size < 256 + len(ids) or max(ids.values()) >= size:
        raise ModelError(
            f"{files.location!r} has no tokenizer, and none can be made for its vocabulary of {size} with the special "
            f"tokens {ids}: copy tokenizer.json and tokenizer_config.json from the original checkpoint"
        )
    return ids, size
