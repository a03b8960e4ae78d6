"""The input embeddings of a language model without the rest of it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gstep.checkpoints.source import ModelSource
from gstep.checkpoints.tensors import read_tensors
from gstep.errors import ModelError
from gstep.language.prompt import text_ids

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
