"""The language model of a checkpoint without its vision tower."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gstep.backbones import ModelSource, Runtime
from gstep.backbones.runtime import check_loaded, load_weights
from gstep.checkpoints.tensors import read_tensors, refuse_quantized
from gstep.errors import ModelError
from gstep.language.prompt import text_ids

# Where each family keeps its vision part, below ``model``. The newline row of LLaVA-OneVision comes with the cache.
_VISION = ("vision_tower", "multi_modal_projector", "image_newline", "visual")

# Settings of generation_config.json that are the caller's. ``generate`` falls back to them for what is not set.
_CALLERS = frozenset(
    (
        *("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("num_beams", "num_return_sequences", "max_length", "max_new_tokens", "return_dict_in_generate"),
    )
)


def load_llm(source: ModelSource, runtime: Runtime) -> Any:
    """Load a ...ForConditionalGeneration of transformers in eval mode, without its vision part.

    Raises ModelError where weights are missing, quantized or have another shape, or transformers is too old.
    """
    refuse_quantized(source.name, source.config)
    config = source.stock_config()
    model = without_vision(config, runtime)
    check_entry(model)
    load_weights(model, source, _names_in_memory, device=runtime.device, dtype=runtime.dtype)
    if config.tie_word_embeddings:
        model.lm_head = _head_of(model.get_input_embeddings())
    _rebuild_rotary(model, runtime.device)
    model.eval().requires_grad_(False)
    model.generation_config = generation_config(source, config)
    return model


def without_vision(config: Any, runtime: Runtime) -> Any:
    """Build the model on the meta device, without memory, and without a tied head, which is stored once."""
    from transformers import AutoModelForImageTextToText  # noqa: PLC0415 - seconds to import

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            config, attn_implementation=runtime.attn_implementation, dtype=runtime.dtype
        )
    for name in _VISION:
        if hasattr(model.model, name):
            delattr(model.model, name)
    if config.tie_word_embeddings:
        model.lm_head = None
    return model


def check_entry(model: Any) -> None:
    """Raise ModelError where this transformers would ignore cached tokens: forward takes any keyword silently."""
    if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
        from transformers import __version__  # noqa: PLC0415 - as below

        raise ModelError(
            f"transformers {__version__} takes no cached tokens: pip install 'transformers>=5.18,<6', on every node"
        )


def _names_in_memory(key: str) -> list[str]:
    """Return a tensor's possible names in memory: some hub checkpoints have those from before transformers 4.52."""
    names = [key]
    for on_disk, in_memory in (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("language_model.", "model.language_model."),
        ("model.", "model.language_model."),
    ):
        if key.startswith(on_disk):
            names.append(key.replace(on_disk, in_memory, 1))
    return names


def _head_of(embeddings: nn.Embedding) -> nn.Linear:
    """Make an output layer that shares the weight of the input embeddings."""
    head = nn.Linear(embeddings.embedding_dim, embeddings.num_embeddings, bias=False, device="meta")
    head.weight = embeddings.weight
    return head


def _rebuild_rotary(model: nn.Module, device: str) -> None:
    """Rebuild the modules of rotary frequencies off the meta device: frequencies are computed, never stored."""
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
                setattr(parent, name, type(module)(module.config).to(device))
    check_loaded(model)


def generation_config(source: ModelSource, config: Any) -> Any:
    """Return the checkpoint's ends of answers and repetition penalty; how to draw is the caller's."""
    from transformers import GenerationConfig  # noqa: PLC0415 - as above

    ours = GenerationConfig.from_model_config(config)
    stored = source.files.read_json("generation_config.json")
    if stored is not None:
        ends = ours.eos_token_id
        ours = GenerationConfig.from_dict({name: value for name, value in stored.items() if name not in _CALLERS})
        if ours.eos_token_id is None:  # an answer without an end would run to its last token
            ours.eos_token_id = ends
    return ours


def ends_of(generation: Any) -> list[int]:
    """Return the ids of the tokens that end an answer by a GenerationConfig."""
    ends = generation.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else sorted(ends)


_ENDS_WITH = "embed_tokens.weight"  # ends only the LLM's table: vision encoders embed patches and positions


class InputEmbeddings:
    """The input embedding table of a language model, read from the checkpoint on first use and kept on the CPU."""

    def __init__(self, source: ModelSource, tokenizer: Any, dtype: torch.dtype) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._dtype = dtype

    @cached_property
    def _table(self) -> Tensor:
        """The embedding table [V,D]; ModelError where the checkpoint has none."""
        found = read_tensors(
            self._source, lambda name: "table" if name.endswith(_ENDS_WITH) else None, dtype=self._dtype
        )
        if not found:
            raise ModelError(f"{self._source.name!r} has no tensor {_ENDS_WITH}: download the checkpoint again")
        return found["table"]

    def mean(self, text: str) -> Tensor:
        """Return the mean embedding [1,D] float32 of a text's tokens. Raises ValueError for an empty text."""
        ids = torch.tensor(text_ids(self._tokenizer, text), device="cpu")
        return self._table[ids].float().mean(0, keepdim=True)
