"""A prompt as vLLM's engines take it: token ids, and for each video its rows, its place and its name."""

from __future__ import annotations

from typing import Any

import torch
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from gstep.language.types import Prompt
from gstep.serving.items import VideoItem, video_items


def engine_input(prompt: Prompt, video_token_id: int) -> Any:
    """Return a prompt for ``add_request`` of ``LLMEngine`` and ``AsyncLLM``, whose processors do not see videos.

    Raises ValueError for positions that vLLM does not serve: one number a token, with gaps.
    """
    items, one_axis = video_items(prompt, video_token_id), len(prompt.positions) == 1
    if one_axis and not torch.equal(prompt.positions[0], torch.arange(len(prompt), device="cpu")):
        raise ValueError("vLLM counts the positions of this model itself: --positions original needs transformers")
    # LLaVA-OneVision has no positions to say: vLLM itself puts rows of this kind where their placeholders are.
    modality = "prompt_embeds" if one_axis else "video"
    # Positions are one tensor, for two take each process of vLLM that a question passes twice the time.
    fields = [
        _fields(embedding=item.rows) if one_axis else _fields(embeds=item.rows, positions=item.positions.contiguous())
        for item in items
    ]
    return mm_input(
        prompt.input_ids.tolist(),
        MultiModalKwargsItems({modality: fields} if items else {}),
        {modality: [item.name for item in items]} if items else {},
        {modality: [_place(item) for item in items]} if items else {},
    )


def _place(item: VideoItem) -> PlaceholderRange:
    """Describe where the video's span lies in the prompt, and which of its tokens take a row."""
    return PlaceholderRange(
        offset=item.first,
        length=len(item.takes_row),
        is_embed=None if bool(item.takes_row.all()) else item.takes_row,
    )


def _fields(**data: torch.Tensor | None) -> MultiModalKwargsItem:
    """Pack a video's tensors for vLLM: token rows may move to the GPU, positions stay on the CPU.

    vLLM drops them once the prefix cache holds a video. Its positions are asked for again.
    """
    rows = {"embeds", "embedding"}
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(data=values, field=MultiModalBatchedField(keep_on_cpu=name not in rows))
            for name, values in data.items()
            if values is not None
        }
    )
