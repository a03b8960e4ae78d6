"""The SigLIP modules besides the vision tower: pooling head, evidence from the head and the last layer, and text tower.

LLaVA-OneVision contains only the vision tower of a SigLIP checkpoint. Head and text tower run in float32 whatever the
encoder's dtype, because in 16 bits many tokens of a frame would get the same attention.

Shapes: S patches of a frame (27 x 27), C channels, E channels of an attention head.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gstep.backbones.runtime import compute_received_attention, load_weights, rebuild_position_ids, split_heads
from gstep.checkpoints.source import PoolingHeadSource, compute_head_identity, read_head
from gstep.checkpoints.tensors import IRRELEVANT_KEYS, list_files_to_read, read_tensor_samples
from gstep.errors import ModelError


class PoolingHead(nn.Module):
    """SigLIP's post_layernorm and attention-pooling head as one module."""

    def __init__(self, config: Any) -> None:
        """Build the head and the layer norm before it for a SiglipVisionConfig, with initial weights."""
        from transformers.models.siglip.modeling_siglip import (  # noqa: PLC0415 - seconds, and rarely needed
            SiglipMultiheadAttentionPoolingHead,
        )

        super().__init__()
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.head = SiglipMultiheadAttentionPoolingHead(config)

    @classmethod
    def load(cls, source: PoolingHeadSource, device: str) -> PoolingHead:
        """Load the head of ``source`` onto ``device`` in float32, in eval mode without gradients.

        Raises:
            ModelError: the weights on this node differ from those that were resolved, or do not fit the config.
        """
        from transformers import SiglipVisionConfig  # noqa: PLC0415

        tensors = read_head(source)
        if compute_head_identity(tensors, source.config) != source.identity:
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
        """Compute each frame's pooled feature [T,C] and the attention [T,S] of the head's query, averaged over heads.

        ``features_TSC`` is the vision tower's output, in any float dtype.
        """
        attention: list[Tensor] = []

        def store_attention(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
            attention.append(output[1].squeeze(1))  # the stock head discards it

        with self.head.attention.register_forward_hook(store_attention):
            feature_TC: Tensor = self.head(self.post_layernorm(features_TSC.float()))
        return feature_TC, attention[0]

    def embed_patches(self, features_TSC: Tensor) -> Tensor:
        """Map each patch, before SigLIP's last layer norm, into its image-text space; return float32 [T,S,C].

        The layer norm and the head run on that patch alone. Attention over a single position is 1, so its result is the
        patch's value.
        """
        attention = self.head.attention
        weight_CC, bias_C = attention.in_proj_weight.chunk(3)[2], attention.in_proj_bias.chunk(3)[2]
        value_TSC = linear(self.post_layernorm(features_TSC.float()), weight_CC, bias_C)
        output_TSC = linear(value_TSC, attention.out_proj.weight, attention.out_proj.bias)
        embedded_TSC: Tensor = output_TSC + self.head.mlp(self.head.layernorm(output_TSC))
        return embedded_TSC


class FrameObserver:
    """An observer of a module's input that computes evidence frame by frame while the vision tower runs.

    Register it with ``observe_inputs``; it collects the evidence of every call.
    """

    def __init__(self, module: nn.Module, compute: Callable[[Tensor], dict[str, Tensor]]) -> None:
        """Prepare to observe ``module``; ``compute`` maps one frame's input [1,S,C] to evidence by name, [1,...]."""
        self.module = module
        self._compute = compute
        self._outputs: list[dict[str, Tensor]] = []

    def __call__(self, input_TSC: Tensor, kwargs: Mapping[str, Any]) -> None:
        # Frame by frame, because attention weights and MLP states of all frames at once would take far more memory.
        self._outputs += [self._compute(input_1SC) for input_1SC in torch.split(input_TSC, 1)]

    def evidence(self) -> dict[str, Tensor]:
        """Return the evidence of all frames observed so far (at least one), name -> [T,...]."""
        return {name: torch.cat([frame[name] for frame in self._outputs]) for name in self._outputs[0]}


def compute_last_layer_evidence(layer: Any, hidden_1SC: Tensor) -> dict[str, Tensor]:
    """Compute the attention that each patch of a frame receives in an attention layer, and the patches' keys.

    Returns:
        ``token_attention`` [1,S], averaged over heads and queries, and ``token_key`` [1,S,E], averaged over heads.
    """
    query_HSE, key_HSE = (
        split_heads(hidden_1SC[0], part.weight, part.bias, layer.num_heads) for part in (layer.q_proj, layer.k_proj)
    )
    return {
        "token_attention": compute_received_attention(query_HSE, key_HSE)[None],
        "token_key": key_HSE.mean(dim=0)[None],
    }


def compute_probe_evidence(head: PoolingHead, features_1SC: Tensor) -> dict[str, Tensor]:
    """Compute a frame's pooled ``frame_feature`` [1,C], and the ``token_attention`` [1,S] of the head's query."""
    feature_1C, attention_1S = head(features_1SC)
    return {"frame_feature": feature_1C, "token_attention": attention_1S}


def compute_patch_evidence(head: PoolingHead, features_1SC: Tensor) -> dict[str, Tensor]:
    """Compute the ``image_embedding`` [1,S,C] of a frame: each patch in SigLIP's image-text space."""
    return {"image_embedding": head.embed_patches(features_1SC)}


PREFIX = "text_model."
FAST_TOKENIZER, SLOW_TOKENIZER = "tokenizer.json", "spiece.model"
_SEGMENTS_AT_ONCE = 32


@dataclass(frozen=True)
class TextTowerSource:
    """A resolved SigLIP text tower without its weights. Picklable.

    Attributes:
        head: the pooling head of the same checkpoint, with its files.
        identity: "siglip-text:<hash>" of the text settings in config.json, the tokenizer file, and the name, dtype,
            shape and first bytes of each text tensor.
        config: the text settings of config.json.
    """

    head: PoolingHeadSource
    identity: str
    config: dict[str, Any] = field(repr=False, hash=False)

    @classmethod
    def resolve(cls, head: PoolingHeadSource) -> TextTowerSource:
        """Find the text tower in the checkpoint of a pooling head, and load its tokenizer once to check it.

        Weight files of a Hugging Face checkpoint are downloaded.

        Raises:
            ModelError: the checkpoint has no text tower or tokenizer, or its embeddings do not have the head's width.
        """
        config = (head.files.read_json("config.json") or {}).get("text_config")
        if not isinstance(config, dict):
            raise ModelError(f"{head.name!r} is the vision half of a SigLIP checkpoint: name the whole checkpoint")
        source = cls(head, _compute_identity(head, config), config)
        width = config.get("projection_size") or config.get("hidden_size", 768)
        if width != head.width:
            raise ModelError(
                f"{head.name!r}: its text tower gives {width} values, its pooling head {head.width}: name the SigLIP "
                "checkpoint that the vision tower was made of"
            )
        _load_tokenizer(source)  # refuses a bad tokenizer before anything is loaded
        return source


class TextTower:
    """A loaded SigLIP text tower: the stock SiglipTextModel and the checkpoint's tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, device: str) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = device

    @classmethod
    def load(cls, source: TextTowerSource, device: str) -> TextTower:
        """Load the tower of ``source`` onto ``device`` in float32, in eval mode without gradients.

        Raises:
            ModelError: the files on this node differ from those that were resolved, or weights are missing or do not
                fit.
        """
        from transformers import SiglipTextConfig, SiglipTextModel  # noqa: PLC0415 - seconds, and rarely needed

        if _compute_identity(source.head, source.config) != source.identity:
            raise ModelError(
                f"{source.head.name!r} has another text tower on this node: copy the checkpoint to every node"
            )
        # The stock defaults of two unused ids lie beyond the vocabulary; transformers would warn about them.
        config = SiglipTextConfig(**{"bos_token_id": None, "eos_token_id": None, **source.config})
        with torch.device("meta"):
            model = SiglipTextModel(config)
        load_weights(model, source.head, _list_text_names_in_memory, device=device, dtype=torch.float32)
        rebuild_position_ids(model, device)
        return cls(model.eval().requires_grad_(False), _load_tokenizer(source), device)

    @torch.inference_mode()
    def embedding(self, text: str) -> Tensor:
        """Compute a text's embedding [Q,De] float32 on the tower's device: one row per segment, not normalized.

        Raises:
            ValueError: the text has no token: it is empty, or only punctuation, which SigLIP drops.
        """
        parts = torch.split(self.segments(text).to(self.device), _SEGMENTS_AT_ONCE)
        # SigLIP was trained on texts padded to the full length, without an attention mask.
        return torch.cat([self.model(input_ids=ids_QL).pooler_output for ids_QL in parts])

    def segments(self, text: str) -> Tensor:
        """Tokenize a text and cut it into padded segments, [Q,L] int64 ids on the CPU.

        L is the tower's number of positions. Each segment ends with SigLIP's end-of-sentence token before the padding.

        Raises:
            ValueError: the text has no token.
        """
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if not ids:
            raise ValueError(
                f"the question {text!r} has no word that SigLIP's tokenizer knows: a method that reads the question "
                "needs a word"
            )
        length = int(self.model.config.max_position_embeddings)
        end, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        rows = [[*ids[start : start + length - 1], end] for start in range(0, len(ids), length - 1)]
        return torch.tensor([row + [pad] * (length - len(row)) for row in rows], device="cpu")


def _load_tokenizer(source: TextTowerSource) -> Any:
    """Load the tokenizer of a checkpoint: from tokenizer.json if there is one, otherwise by AutoTokenizer.

    The tokenizer of a Hugging Face checkpoint may be downloaded.

    Raises:
        ModelError: the tokenizer cannot be loaded, or has no end or padding token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415 - as above

    files = source.head.files
    kind = PreTrainedTokenizerFast if files.has(FAST_TOKENIZER) else AutoTokenizer
    location = files.location if files.kind == "hub" else str(files.folder())
    try:
        tokenizer = kind.from_pretrained(location, revision=files.revision, trust_remote_code=False)
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


def _list_text_names_in_memory(key: str) -> list[str]:
    """List the possible names in memory of a text tensor on disk: without and with the prefix; [] for other tensors."""
    return [key.removeprefix(PREFIX), key] if key.startswith(PREFIX) else []


def _compute_identity(head: PoolingHeadSource, config: dict[str, Any]) -> str:
    """Hash the files that determine a text tower's embeddings: "siglip-text:<hash>".

    Only the first bytes of each tensor are read. Files of a Hugging Face checkpoint are downloaded.

    Raises:
        ModelError: the checkpoint has no tensor of a text tower, or no tokenizer file.
    """
    settings = {name: value for name, value in config.items() if name not in IRRELEVANT_KEYS}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    files = list_files_to_read(head, lambda key: key if key.startswith(PREFIX) else None)
    samples = sorted(sample for filename in files for sample in read_tensor_samples(head.file(filename), PREFIX))
    if not samples:
        raise ModelError(f"{head.name!r} holds no tensor of a text tower: name the whole SigLIP checkpoint")
    for name, sample in samples:
        digest.update(f"\n{name}\n".encode())
        digest.update(sample)
    name = FAST_TOKENIZER if head.files.has(FAST_TOKENIZER) else SLOW_TOKENIZER
    digest.update(head.file(name).read_bytes())
    return f"siglip-text:{digest.hexdigest()[:32]}"
