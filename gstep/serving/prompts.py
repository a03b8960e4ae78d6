"""A prompt as vLLM's engines take it: token ids, and for each video its rows, its place and its name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gstep.language.types import Prompt
from gstep.types import Visual, hash_tensor


@dataclass(frozen=True)
class VideoSpan:
    """One video of a prompt as an engine with a prefix cache needs it: its rows, their place and positions, and a name.

    Attributes:
        first: the first token of its span in the prompt (``Prompt.spans``), which has S tokens. It holds the markers of
            all frames, for a frame of which nothing was kept takes room among the positions, too.
        takes_row: [S] bool, which of them are placeholders, P in all; the others are texts within the video.
        rows: [P,D*(1+levels)], what stands for the placeholders, deepstack levels side by side; on LLaVA-OneVision the
            last one is the newline.
        positions: [A,S+1] int32, counted from where the span starts; the last is that of the text after the span.
        name: of rows and positions, so that spans of the same name are the same to the model.
    """

    first: int
    takes_row: Tensor
    rows: Tensor
    positions: Tensor
    name: str


def engine_input(prompt: Prompt, video_token_id: int) -> Any:
    """Return a prompt for ``add_request`` of ``LLMEngine`` and ``AsyncLLM``, whose processors do not see videos.

    Raises ValueError for positions that vLLM does not serve: one number a token, with gaps.
    """
    from vllm.inputs.engine import mm_input  # noqa: PLC0415 - this module is imported without vLLM, too
    from vllm.multimodal.inputs import (  # noqa: PLC0415
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    spans, one_axis = video_spans(prompt, video_token_id), len(prompt.positions) == 1
    if one_axis and not torch.equal(prompt.positions[0], torch.arange(len(prompt), device="cpu")):
        raise ValueError("vLLM counts the positions of this model itself: --positions original needs transformers")
    # LLaVA-OneVision has no positions to say: vLLM itself puts rows of this kind where their placeholders are.
    modality = "prompt_embeds" if one_axis else "video"
    kwargs, places = [], []
    for span in spans:
        # vLLM drops rows once its prefix cache holds a video, and asks for positions again: those stay on the CPU.
        # They are one tensor, for two take each process of vLLM that a question passes twice the time.
        fields = {"embedding": span.rows} if one_axis else {"embeds": span.rows, "positions": span.positions}
        kwargs.append(
            MultiModalKwargsItem(
                {
                    name: MultiModalFieldElem(
                        data=values.contiguous(), field=MultiModalBatchedField(keep_on_cpu=name == "positions")
                    )
                    for name, values in fields.items()
                }
            )
        )
        all_rows = bool(span.takes_row.all())
        places.append(
            PlaceholderRange(
                offset=span.first, length=len(span.takes_row), is_embed=None if all_rows else span.takes_row
            )
        )
    return mm_input(
        prompt.input_ids.tolist(),
        MultiModalKwargsItems({modality: kwargs} if spans else {}),
        {modality: [span.name for span in spans]} if spans else {},
        {modality: places} if spans else {},
    )


def video_spans(prompt: Prompt, video_token_id: int) -> list[VideoSpan]:
    """Return the videos of a prompt, in their order."""
    return [
        _span(prompt, visual, first, end, video_token_id)
        for visual, (first, end) in zip(prompt.visuals, prompt.spans, strict=True)
    ]


def _span(prompt: Prompt, visual: Visual, first: int, end: int, video_token_id: int) -> VideoSpan:
    """Make the span of the video that is tokens [first, end) of the prompt."""
    takes_row = prompt.input_ids[first:end] == video_token_id
    assert int(takes_row.sum()) == len(visual.placeholder_rows)
    # Text goes on by one: the start follows the token before.
    start = int(prompt.positions[0, first - 1]) + 1 if first else 0
    positions = (prompt.positions[:, first : end + 1] - start).to(torch.int32)
    name = hash_tensor(f"{visual.placeholder_hash} ", positions)
    return VideoSpan(first, takes_row, visual.placeholder_rows, positions, name)


def prompt_positions(videos: Iterable[tuple[int, Tensor]], n_tokens: int, axes: int = 3) -> tuple[Tensor, int]:
    """Compute a prompt's M-RoPE positions [A,n_tokens] from those of its videos, and their delta.

    Args:
        videos: (first token, positions [A,S+1] as of VideoSpan) of each, in any order.

    ``delta`` is what a later token's index lacks to its position.
    """
    parts: list[Tensor] = []
    start = done = 0  # the position of the next token; tokens that have one

    for first, positions in [*sorted(videos, key=lambda video: video[0]), (n_tokens, None)]:
        parts.append(torch.arange(start, start + first - done, device="cpu").expand(axes, -1))
        start, done = start + first - done, first
        if positions is not None:
            parts.append(positions[:, :-1] + start)
            start, done = start + int(positions[0, -1]), done + positions.shape[1] - 1
    return torch.cat(parts, dim=1), start - n_tokens
