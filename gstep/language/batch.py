"""Left-padded batches of prompts of different lengths, in the form that transformers models take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gstep.language.types import Prompt, read_placeholder
from gstep.types import Visual

#: The maximum size of a padded batch's attention mask: 64 MiB as bool, and 256 MiB more as a kernel's float32.
MASK_ELEMENTS = 2**26
#: The maximum number of tokens in a batch, padding included: each takes memory for its keys and values.
PADDED_TOKENS = 2**16


def group_by_cost(
    lengths: Sequence[int], queries: Sequence[int], max_rows: int, mask_elements: int = MASK_ELEMENTS
) -> list[list[int]]:
    """Group rows of similar length into batches, longest first; return each batch's row numbers, ascending.

    A batch ends when the next row would exceed ``max_rows``, PADDED_TOKENS (rows * longest row) or ``mask_elements``
    (rows * longest row * most queries; no limit if the rows have equal lengths and nothing is cached). A row that
    exceeds a limit by itself is a batch of one row.

    Args:
        lengths: tokens of each row.
        queries: tokens of each row that the model computes; keys and values of its other tokens are cached.
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        candidate = [*batches[-1], row] if batches else []
        rows = [lengths[i] for i in candidate], [queries[i] for i in candidate]
        if 0 < len(candidate) <= max_rows and _check_batch_limits(*rows, mask_elements):
            batches[-1] = candidate
        else:
            batches.append([row])
    return [sorted(batch) for batch in batches]


def _check_batch_limits(lengths: Sequence[int], queries: Sequence[int], mask_elements: int) -> bool:
    """Return True if the padded tokens and the attention mask of these rows are within their limits."""
    tokens = len(lengths) * max(lengths)
    unmasked = len({*lengths}) == 1 and lengths == queries  # all rows are causal, and none is padded
    return tokens <= PADDED_TOKENS and (unmasked or tokens * max(queries) <= mask_elements)


@dataclass(frozen=True)
class Batch:
    """A batch of prompts, or of spans of prompts, padded on the left, on the CPU.

    Attributes:
        input_ids: [B, L] int64.
        mask: [B, L] int64, 1 for tokens and 0 for padding.
        positions: [A, B, L] in the prompts' dtype, 0 for padding.
        token_inputs: name -> [B, L], from ``Prompt.token_inputs``, 0 for padding.
    """

    input_ids: Tensor
    mask: Tensor
    positions: Tensor
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, prompts: Sequence[Prompt], spans: Sequence[slice] | None = None) -> Batch:
        """Pad prompts, or a span of each prompt, to the longest and stack them in order.

        Padding of ``input_ids`` repeats the prompt's first token. ``spans`` None takes whole prompts.
        """
        spans = spans or [slice(None)] * len(prompts)
        ids = [prompt.input_ids[span] for prompt, span in zip(prompts, spans, strict=True)]
        length = max(len(row) for row in ids)
        batch = cls(
            # Padding repeats a token of the prompt, because a repetition penalty would count any other token.
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

    def prepend_prefix(self, prefix: Batch) -> Batch:
        """Prepend the rows of ``prefix``; their own padding stays between them, and ``token_inputs`` are dropped."""
        return Batch(
            input_ids=torch.cat([prefix.input_ids, self.input_ids], dim=1),
            mask=torch.cat([prefix.mask, self.mask], dim=1),
            positions=torch.cat([prefix.positions, self.positions], dim=2),
        )

    def rows(self, index: Sequence[int]) -> Batch:
        """Return the rows at ``index``, which may repeat; ``token_inputs`` are dropped."""
        return Batch(self.input_ids[index], self.mask[index], self.positions[:, index])

    def position_ids(self) -> Tensor:
        """Make the position ids for the model: [B, L] for 1-D positions, [4, B, L] for M-RoPE.

        Row 0 of the four counts the tokens.
        """
        if len(self.positions) == 1:
            return self.positions[0]
        counts = (self.mask.cumsum(-1) - 1).clamp_min(0)
        return torch.cat([counts[None], self.positions])


def encoder_outputs(visuals: Sequence[Visual], model: Any) -> dict[str, Any]:
    """Make the ``mm_encoder_outputs`` of a transformers model for a batch, on its device and in its dtype.

    Args:
        visuals: all videos of the batch, at least one, from its first row to its last.

    Returns:
        {modality: ModelOutput}; ``pooler_output`` is [sum K, D] on InternVL, [1, sum (K + 1), D] if the videos have
        newlines (LLaVA-OneVision), and otherwise a tuple of [K, D], with such a tuple per level in
        ``deepstack_features`` if there are deepstack levels (Qwen).
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling  # noqa: PLC0415 - seconds to import

    tokens = [visual.tokens.to(model.device, model.dtype) for visual in visuals]
    modality, _ = read_placeholder(model.config)
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
