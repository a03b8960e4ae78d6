"""Left-padded batches of prompts of different lengths, in the form that the models of transformers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gstep.language.types import Prompt, placeholder_of
from gstep.types import Visual

#: Elements that the attention mask of a padded batch may have: 64 MiB as bool, 256 MiB more as a kernel's float32.
MASK_ELEMENTS = 2**26
#: Tokens that a batch may have, padding included: each takes memory for its keys and values.
PADDED_TOKENS = 2**16


def batches_by_cost(
    lengths: Sequence[int], queries: Sequence[int], max_rows: int, mask_elements: int = MASK_ELEMENTS
) -> list[list[int]]:
    """Group rows of similar length into batches, longest first; return each batch's row numbers, ascending.

    A batch ends when the next row would exceed a limit: ``max_rows``, PADDED_TOKENS or ``mask_elements``. A row that
    exceeds a limit alone is a batch by itself, which has no padding and so needs no mask.

    Args:
        lengths: tokens of each row.
        queries: tokens of each row that the model computes; keys and values of its other tokens are cached.
        mask_elements: the maximum size of a batch's attention mask.
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        candidate = [*batches[-1], row] if batches else []
        rows = [lengths[i] for i in candidate], [queries[i] for i in candidate]
        if 0 < len(candidate) <= max_rows and _fits_batch(*rows, mask_elements):
            batches[-1] = candidate
        else:
            batches.append([row])
    return [sorted(batch) for batch in batches]


def _fits_batch(lengths: Sequence[int], queries: Sequence[int], mask_elements: int) -> bool:
    """Return True if rows of these lengths fit in one batch: padded tokens and attention mask within their limits."""
    tokens = len(lengths) * max(lengths)
    unmasked = len({*lengths}) == 1 and lengths == queries  # all rows are causal, and none is padded
    return tokens <= PADDED_TOKENS and (unmasked or tokens * max(queries) <= mask_elements)


@dataclass(frozen=True)
class Batch:
    """A batch of prompts, or of parts of prompts, padded on the left.

    Attributes:
        input_ids: [B,L] int64.
        mask: [B,L] int64, 1 for tokens and 0 for padding.
        positions: [A,B,L], int64 or the dtype of the prompts.
        token_inputs: name -> [B,L], further inputs of ``forward`` (``Prompt.token_inputs``), 0 for padding.
    """

    input_ids: Tensor
    mask: Tensor
    positions: Tensor
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, prompts: Sequence[Prompt], spans: Sequence[slice] | None = None) -> Batch:
        """Pad the prompts, or a span of each prompt, into a batch."""
        spans = spans or [slice(None)] * len(prompts)
        ids = [prompt.input_ids[span] for prompt, span in zip(prompts, spans, strict=True)]
        length = max(len(row) for row in ids)
        batch = cls(
            # Padding repeats a token of the prompt, because a repetition penalty would count a new token.
            input_ids=torch.stack([prompt.input_ids[:1].expand(length) for prompt in prompts]).clone(),
            mask=torch.zeros(len(ids), length, dtype=torch.int64, device="cpu"),
            positions=torch.zeros(
                len(prompts[0].positions), len(ids), length, dtype=prompts[0].positions.dtype, device="cpu"
            ),
            token_inputs={
                name: torch.zeros(len(ids), length, dtype=values.dtype, device="cpu")
                for prompt in prompts
                for name, values in prompt.token_inputs.items()
            },
        )
        for row, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
            start = length - len(ids[row])
            batch.input_ids[row, start:] = ids[row]
            batch.mask[row, start:] = 1
            batch.positions[:, row, start:] = prompt.positions[:, span]
            for name, values in prompt.token_inputs.items():
                batch.token_inputs[name][row, start:] = values[span]
        return batch

    def after(self, prefix: Batch) -> Batch:
        """Prepend the rows of ``prefix`` to these rows; their padding stays between the two parts."""
        return Batch(
            input_ids=torch.cat([prefix.input_ids, self.input_ids], dim=1),
            mask=torch.cat([prefix.mask, self.mask], dim=1),
            positions=torch.cat([prefix.positions, self.positions], dim=2),
        )

    def rows(self, index: Sequence[int]) -> Batch:
        """Return the rows at ``index``, which may repeat."""
        return Batch(self.input_ids[index], self.mask[index], self.positions[:, index])

    def position_ids(self) -> Tensor:
        """Make the position ids for forward and generate: [B,L] for 1-D positions, [4,B,L] for M-RoPE.

        Row 0 of the four counts the tokens, so that transformers sees no packed sequences. Temporal positions in row 0
        would look like several sequences in a row, which transformers masks from each other.
        """
        if len(self.positions) == 1:
            return self.positions[0]
        counts = (self.mask.cumsum(-1) - 1).clamp_min(0)
        return torch.cat([counts[None], self.positions])


def encoder_outputs(visuals: Sequence[Visual], model: Any) -> dict[str, Any]:
    """Make the ``mm_encoder_outputs`` of a model of transformers for a batch's placeholders.

    ``visuals`` are all videos of the batch, from its first row to its last. The result is on the model's device and in
    its dtype.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling  # noqa: PLC0415 - seconds to import

    tokens = [visual.tokens.to(model.device, model.dtype) for visual in visuals]
    modality, _ = placeholder_of(model.config)
    if modality == "image":  # InternVL takes the tokens of all frames as one tensor
        return {modality: BaseModelOutputWithPooling(pooler_output=torch.cat(tokens))}
    newlines = [visual.newline for visual in visuals if visual.newline is not None]
    if newlines:  # LLaVA-OneVision takes one row [1, sum K, D], newlines included
        lines = [part for t, newline in zip(tokens, newlines, strict=True) for part in (t, newline.to(t)[None])]
        return {"video": BaseModelOutputWithPooling(pooler_output=torch.cat(lines)[None])}
    levels = [
        tuple(visual.deepstack[level].to(model.device, model.dtype) for visual in visuals)
        for level in range(len(visuals[0].deepstack))
    ]
    if not levels:
        return {"video": BaseModelOutputWithPooling(pooler_output=tuple(tokens))}
    from transformers.models.qwen3_vl.modeling_qwen3_vl import (  # noqa: PLC0415 - needed by this family alone
        BaseModelOutputWithDeepstackFeatures,
    )

    return {"video": BaseModelOutputWithDeepstackFeatures(pooler_output=tuple(tokens), deepstack_features=levels)}
