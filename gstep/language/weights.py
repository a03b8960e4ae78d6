"""The language model of a checkpoint without its vision part, its generation config, and its input embeddings."""

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
from gstep.language.prompt import tokenize_text

# The modules of each family's vision part, below ``model``. The newline row of LLaVA-OneVision comes with the cache.
_VISION = ("vision_tower", "multi_modal_projector", "image_newline", "visual")

# Settings that are dropped from generation_config.json, because the caller decides them: ``generate`` would use them as
# defaults.
_CALLERS = frozenset(
    (
        *("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("num_beams", "num_return_sequences", "max_length", "max_new_tokens", "return_dict_in_generate"),
    )
)


def load_llm(source: ModelSource, runtime: Runtime) -> Any:
    """Load the checkpoint's ...ForConditionalGeneration in eval mode, without its vision part.

    A checkpoint without weight files gets seeded random weights.

    Raises:
        ModelError: weights are missing, quantized or of another shape, a config is not valid, or transformers is too
            old.
    """
    refuse_quantized(source.name, source.config)
    config = source.parse_stock_config()
    model = build_without_vision(config, runtime)
    check_entry_point(model)
    load_weights(model, source, _list_names_in_memory, device=runtime.device, dtype=runtime.dtype)
    if config.tie_word_embeddings:
        model.lm_head = _tie_head(model.get_input_embeddings())
    _rebuild_rotary(model, runtime.device)
    model.eval().requires_grad_(False)
    model.generation_config = read_generation_config(source, config)
    return model


def build_without_vision(config: Any, runtime: Runtime) -> Any:
    """Build the model on the meta device without its vision part; ``lm_head`` is None if the config ties it."""
    from transformers import AutoModelForImageTextToText  # noqa: PLC0415 - seconds to import

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            config, attn_implementation=runtime.attn_implementation, dtype=runtime.dtype
        )
    for name in _VISION:
        if hasattr(model.model, name):
            delattr(model.model, name)
    if config.tie_word_embeddings:
        model.lm_head = None  # load_llm ties it to the embeddings, so no weight is expected for it
    return model


def check_entry_point(model: Any) -> None:
    """Raise ModelError if this transformers has no ``mm_encoder_outputs``."""
    if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
        from transformers import __version__  # noqa: PLC0415 - as below

        raise ModelError(
            f"transformers {__version__} takes no cached tokens: pip install 'transformers>=5.18,<6', on every node"
        )


def _list_names_in_memory(key: str) -> list[str]:
    """List the names that a tensor may have in the model, the name on disk first."""
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


def _tie_head(embeddings: nn.Embedding) -> nn.Linear:
    """Make an output layer that shares the weight tensor of the input embeddings."""
    head = nn.Linear(embeddings.embedding_dim, embeddings.num_embeddings, bias=False, device="meta")
    head.weight = embeddings.weight
    return head


def _rebuild_rotary(model: nn.Module, device: str) -> None:
    """Rebuild modules of rotary frequencies that are still on the meta device.

    Asserts that nothing else is left on the meta device.
    """
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
                setattr(parent, name, type(module)(module.config).to(device))
    check_loaded(model)


def read_generation_config(source: ModelSource, config: Any) -> Any:
    """Read the checkpoint's GenerationConfig without its sampling settings and limits, which the caller decides.

    Without generation_config.json, the model's ``config`` gives all settings; if the file names no end token, it gives
    that.

    Raises:
        ModelError: transformers does not accept the file.
    """
    from transformers import GenerationConfig  # noqa: PLC0415 - as above

    generation = GenerationConfig.from_model_config(config)
    settings = source.files.read_json("generation_config.json")
    if settings is not None:
        ends = generation.eos_token_id
        try:
            generation = GenerationConfig.from_dict({k: value for k, value in settings.items() if k not in _CALLERS})
        except Exception as error:  # of any type, since settings may have any wrong type
            reason = f"{type(error).__name__}: {error}"
            raise ModelError(
                f"{source.name!r}: generation_config.json is not valid ({reason}): copy it again from the original "
                "checkpoint"
            ) from error
        if generation.eos_token_id is None:  # an answer without an end would run to its last token
            generation.eos_token_id = ends
    return generation


def list_end_ids(generation: Any) -> list[int]:
    """List the ids of the tokens that end an answer, from a GenerationConfig; empty if it has none."""
    ends = generation.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else sorted(ends)


_ENDS_WITH = "embed_tokens.weight"  # only the LLM's table: vision encoders embed patches and positions


class InputEmbeddings:
    """The input embedding table of a language model on the CPU; read from the checkpoint on first use."""

    def __init__(self, source: ModelSource, tokenizer: Any, dtype: torch.dtype) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._dtype = dtype

    @cached_property
    def _table(self) -> Tensor:
        """The embeddings [V, D]; ModelError if the checkpoint has none."""
        tensors = read_tensors(
            self._source, lambda name: "table" if name.endswith(_ENDS_WITH) else None, dtype=self._dtype
        )
        if not tensors:
            raise ModelError(f"{self._source.name!r} has no tensor {_ENDS_WITH}: download the checkpoint again")
        return tensors["table"]

    def mean(self, text: str) -> Tensor:
        """Compute the mean embedding of a text's tokens, [1, D] float32.

        Raises:
            ValueError: the text has no token.
            ModelError: the checkpoint has no embedding table.
        """
        ids = torch.tensor(tokenize_text(self._tokenizer, text), device="cpu")
        return self._table[ids].float().mean(0, keepdim=True)
