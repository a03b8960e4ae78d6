"""Ragged prompts as one left-padded batch, in the form that the models of transformers take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gstep.language.types import Prompt, placeholder_of
from gstep.types import Visual

#: Elements that the attention mask of a padded batch may have: 64 MiB as bool, 256 MiB more as a kernel's float32.
MASK_ELEMENTS = 2**26
#: Tokens that a batch may have, padding included: keys and values are held for each of them.
PADDED_TOKENS = 2**16


def batches_by_cost(
    lengths: Sequence[int], queries: Sequence[int], most: int, mask_elements: int = MASK_ELEMENTS
) -> list[list[int]]:
    """Group rows of like length into batches of at most ``most`` rows, longest first; return each batch's row numbers.

    A batch is full where one more row would cost too much; only the last batch may have room for others. A row that
    costs too much by itself is a batch of its own, which has no padding and so needs no mask.

    Args:
        lengths: tokens of each row.
        queries: how many of these go through the model at once; keys and values of the others are there by then.
        mask_elements: the most that the attention mask of a batch may have.
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longer = [*batches[-1], row] if batches else []
        rows = [lengths[i] for i in longer], [queries[i] for i in longer]
        if 0 < len(longer) <= most and _affordable(*rows, mask_elements):
            batches[-1] = longer
        else:
            batches.append([row])
    return [sorted(batch) for batch in batches]


def _affordable(lengths: Sequence[int], queries: Sequence[int], mask_elements: int) -> bool:
    """Return whether rows of these lengths fit in one batch: padded tokens and attention mask below their limits."""
    tokens = len(lengths) * max(lengths)
    unmasked = len({*lengths}) == 1 and lengths == queries  # all rows are causal, and none is padded
    return tokens <= PADDED_TOKENS and (unmasked or tokens * max(queries) <= mask_elements)


@dataclass(frozen=True)
class Batch:
    """Rows of prompts (or of parts of prompts), padded on the left.

    Attributes:
        input_ids: [B,L] int64.
        mask: [B,L] int64, 0 where a row is padded.
        positions: [A,B,L] int64.
    """

    input_ids: Tensor
    mask: Tensor
    positions: Tensor

    @classmethod
    def of(cls, prompts: Sequence[Prompt], spans: Sequence[slice] | None = None) -> Batch:
        """Pad the prompts, or one span of each, into a batch."""
        spans = spans or [slice(None)] * len(prompts)
        ids = [prompt.input_ids[span] for prompt, span in zip(prompts, spans, strict=True)]
        length = max(len(row) for row in ids)
        batch = cls(
            # The padding repeats a token that every prompt holds: a repetition penalty must see none that is not there.
            input_ids=torch.stack([prompt.input_ids[:1].expand(length) for prompt in prompts]).clone(),
            mask=torch.zeros(len(ids), length, dtype=torch.int64, device="cpu"),
            positions=torch.zeros(len(prompts[0].positions), len(ids), length, dtype=torch.int64, device="cpu"),
        )
        for row, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
            start = length - len(ids[row])
            batch.input_ids[row, start:] = ids[row]
            batch.mask[row, start:] = 1
            batch.positions[:, row, start:] = prompt.positions[:, span]
        return batch

    def after(self, prefix: Batch) -> Batch:
        """Return these rows with the rows of ``prefix`` before them; padding then also lies between the two parts."""
        return Batch(
            input_ids=torch.cat([prefix.input_ids, self.input_ids], dim=1),
            mask=torch.cat([prefix.mask, self.mask], dim=1),
            positions=torch.cat([prefix.positions, self.positions], dim=2),
        )

    def rows(self, index: Sequence[int]) -> Batch:
        """Return the rows at ``index``, which may repeat."""
        return Batch(self.input_ids[index], self.mask[index], self.positions[:, index])

    def position_ids(self) -> Tensor:
        """Return positions for forward and generate: [B,L] for 1-D positions, [4,B,L] for M-RoPE.

        Row 0 of the four counts the real tokens: it tells transformers that nothing is packed. With temporal positions
        there it would see several sequences in a row, and mask them from each other.
        """
        if len(self.positions) == 1:
            return self.positions[0]
        counts = (self.mask.cumsum(-1) - 1).clamp_min(0)
        return torch.cat([counts[None], self.positions])


def encoder_outputs(visuals: Sequence[Visual], model: Any) -> dict[str, Any]:
    """Return the ``mm_encoder_outputs`` that a model of transformers takes for a batch's placeholders.

    They go from the batch's first row to its last, on the model's device and in its dtype.
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
    from transformers.models.qwen3_vl.modeling_qwen3_vl import (  # noqa: PLC0415 - this family alone has it
        BaseModelOutputWithDeepstackFeatures,
    )

    return {"video": BaseModelOutputWithDeepstackFeatures(pooler_output=tuple(tokens), deepstack_features=levels)}
