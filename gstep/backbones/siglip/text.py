"""SigLIP's text tower, from a SigLIP checkpoint: LLaVA-OneVision is made of the vision tower alone.

It pairs with the pooling head of the same checkpoint, which puts patches into the space of its texts. Only the text
tensors are read, and they run in float32.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gstep.backbones.weights import load_weights, rebuild_position_ids
from gstep.checkpoints.identity import IRRELEVANT_KEYS, tensor_samples
from gstep.checkpoints.pooling_head import PoolingHeadSource
from gstep.checkpoints.tensors import files_with
from gstep.errors import ModelError

PREFIX = "text_model."
FAST_TOKENIZER, SLOW_TOKENIZER = "tokenizer.json", "spiece.model"
_SEGMENTS_AT_ONCE = 32


@dataclass(frozen=True)
class TextTowerSource:
    """The description of a text tower that was found. Pickles; means the same weights on every node.

    Attributes:
        head: the pooling head of the same checkpoint; it says where the files are.
        identity: "siglip-text:<hash>" of the text part of config.json, the tokenizer, and of each text tensor its name,
            shape and first bytes.
        config: the text part of config.json.
    """

    head: PoolingHeadSource
    identity: str
    config: dict[str, Any] = field(repr=False, hash=False)

    @classmethod
    def resolve(cls, head: PoolingHeadSource) -> TextTowerSource:
        """Find the text tower in the checkpoint of a pooling head.

        Raises ModelError, with the remedy, where none fits.
        """
        config = (head.files.read_json("config.json") or {}).get("text_config")
        if not isinstance(config, dict):
            raise ModelError(f"{head.name!r} is the vision half of a SigLIP checkpoint: name the whole one")
        source = cls(head, _identity(head, config), config)
        width = config.get("projection_size") or config.get("hidden_size", 768)
        if width != head.width:
            raise ModelError(
                f"{head.name!r}: its text tower gives {width} values, its pooling head {head.width}: name the SigLIP "
                "checkpoint that the vision tower was made of"
            )
        _tokenizer(source)  # so that a bad tokenizer is refused before anything is loaded
        return source


class TextTower:
    """A loaded SigLIP text tower: the stock SiglipTextModel with the checkpoint's tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, device: str) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = device

    @classmethod
    def load(cls, source: TextTowerSource, device: str) -> TextTower:
        """Load the tower that ``source`` describes.

        Raises ModelError where this node's files differ from those resolved.
        """
        from transformers import SiglipTextConfig, SiglipTextModel  # noqa: PLC0415 - seconds, and rarely needed

        if _identity(source.head, source.config) != source.identity:
            raise ModelError(
                f"{source.head.name!r} has another text tower on this node: copy the checkpoint to every node"
            )
        # The stock defaults of two unused ids lie beyond the vocabulary, of which transformers would warn.
        config = SiglipTextConfig(**{"bos_token_id": None, "eos_token_id": None, **source.config})
        with torch.device("meta"):
            model = SiglipTextModel(config)
        load_weights(model, source.head, _names_in_memory, device=device, dtype=torch.float32)
        rebuild_position_ids(model, device)
        return cls(model.eval().requires_grad_(False), _tokenizer(source), device)

    @torch.inference_mode()
    def embedding(self, text: str) -> Tensor:
        """Compute [Q,De] float32 of a text on the tower's device, not normalised: one row for each segment.

        Raises ValueError for a text without a token: an empty one, or one of punctuation alone, which SigLIP drops.
        """
        parts = torch.split(self.segments(text).to(self.device), _SEGMENTS_AT_ONCE)
        # SigLIP was trained on texts padded to the full length, without an attention mask.
        return torch.cat([self.model(input_ids=ids_QL).pooler_output for ids_QL in parts])

    def segments(self, text: str) -> Tensor:
        """Cut a text into as many segments as it takes: [Q,L] int64, L being all positions that the tower has.

        CDPruner's official code cuts longer texts too. Each segment here ends in the end-of-sentence token that
        SigLIP saw in training: the tower takes its answer from the last position.
        """
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if not ids:
            raise ValueError(
                f"the question {text!r} has no word that SigLIP's tokenizer knows: who looks at the question needs one"
            )
        length = int(self.model.config.max_position_embeddings)
        end, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        rows = [[*ids[start : start + length - 1], end] for start in range(0, len(ids), length - 1)]
        return torch.tensor([row + [pad] * (length - len(row)) for row in rows], device="cpu")


def _tokenizer(source: TextTowerSource) -> Any:
    """Load the tokenizer of a checkpoint. Raises ModelError where it has none that can be loaded.

    Of the published checkpoints tokenizer.json is read, which lowercases and drops punctuation as their SiglipTokenizer
    does: AutoTokenizer would ask for that class, which needs sentencepiece.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415 - as above

    files = source.head.files
    kind = PreTrainedTokenizerFast if files.has(FAST_TOKENIZER) else AutoTokenizer
    place = files.location if files.kind == "hub" else str(files.folder())
    try:
        tokenizer = kind.from_pretrained(place, revision=files.revision, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions, and a damaged file a KeyError
        raise ModelError(
            f"{source.head.name!r} has no tokenizer that can be loaded ({type(error).__name__}: {error}): download it "
            "again, tokenizer.json included"
        ) from error
    if tokenizer.eos_token_id is None or tokenizer.pad_token_id is None:
        raise ModelError(
            f"{source.head.name!r}: tokenizer_config.json names no eos_token or no pad_token: download it again"
        )
    return tokenizer


def _names_in_memory(key: str) -> list[str]:
    """List the names in memory for a name on disk: some versions of transformers keep the prefix."""
    return [key.removeprefix(PREFIX), key] if key.startswith(PREFIX) else []


def _identity(head: PoolingHeadSource, config: dict[str, Any]) -> str:
    """Hash the files that decide a text tower's embeddings.

    Raises ModelError where the checkpoint has no such tensor.
    """
    said = {name: value for name, value in config.items() if name not in IRRELEVANT_KEYS}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    files = files_with(head, lambda key: key if key.startswith(PREFIX) else None)
    samples = sorted(sample for filename in files for sample in tensor_samples(head.file(filename), PREFIX))
    if not samples:
        raise ModelError(f"{head.name!r} holds no tensor of a text tower: name the whole SigLIP checkpoint")
    for name, sample in samples:
        digest.update(f"\n{name}\n".encode())
        digest.update(sample)
    name = FAST_TOKENIZER if head.files.has(FAST_TOKENIZER) else SLOW_TOKENIZER
    digest.update(head.file(name).read_bytes())
    return f"siglip-text:{digest.hexdigest()[:32]}"
