"""Prompts in the input format of vLLM's engines: token ids, and each video's rows, range and hash."""

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
    """One video of a prompt, for an engine with a prefix cache.

    Attributes:
        first: the index in the prompt of the span's first token. The span has S tokens, including the markers of
            frames.
        takes_row: [S] bool, True for the P placeholders, False for text within the video.
        rows: [P,D*(1+levels)], the embeddings of the placeholders with deepstack levels alongside; on LLaVA-OneVision
            the last row is the newline.
        positions: [A,S+1] int32, counted from the one after the preceding token; the last is that of the text after the
            span.
        name: a hash of rows and positions: the model cannot tell spans of the same name apart.
    """

    first: int
    takes_row: Tensor
    rows: Tensor
    positions: Tensor
    name: str


def make_engine_input(prompt: Prompt, video_token_id: int) -> Any:
    """Convert a prompt to the input of ``add_request`` of vLLM's ``LLMEngine`` and ``AsyncLLM``.

    Videos are items with rows only on models with 1-D positions (modality "prompt_embeds"), otherwise with rows and
    positions (modality "video").

    Raises:
        ValueError: the prompt has 1-D positions with gaps, which vLLM does not support.
    """
    from vllm.inputs.engine import mm_input  # noqa: PLC0415 - this module is imported without vLLM, too
    from vllm.multimodal.inputs import (  # noqa: PLC0415
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    spans = make_video_spans(prompt, video_token_id)
    is_1d = len(prompt.positions) == 1
    if is_1d and not torch.equal(prompt.positions[0], torch.arange(len(prompt), device="cpu")):
        raise ValueError("vLLM counts the positions of this model itself: --positions original needs transformers")
    # LLaVA-OneVision needs no positions: for this modality, vLLM itself inserts the rows at the placeholders.
    modality = "prompt_embeds" if is_1d else "video"
    kwargs, ranges = [], []
    for span in spans:
        # Once a video is in vLLM's prefix cache, vLLM drops its rows but still reads positions, if they are on the CPU.
        # Rows are a single tensor: two would double the time in each vLLM process that a question passes through.
        fields = {"embedding": span.rows} if is_1d else {"embeds": span.rows, "positions": span.positions}
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
        ranges.append(
            PlaceholderRange(
                offset=span.first, length=len(span.takes_row), is_embed=None if all_rows else span.takes_row
            )
        )
    return mm_input(
        prompt.input_ids.tolist(),
        MultiModalKwargsItems({modality: kwargs} if spans else {}),
        {modality: [span.name for span in spans]} if spans else {},
        {modality: ranges} if spans else {},
    )


def make_video_spans(prompt: Prompt, video_token_id: int) -> list[VideoSpan]:
    """Return the span of each video of a prompt, in prompt order."""
    return [
        _make_span(prompt, visual, first, end, video_token_id)
        for visual, (first, end) in zip(prompt.visuals, prompt.spans, strict=True)
    ]


def _make_span(prompt: Prompt, visual: Visual, first: int, end: int, video_token_id: int) -> VideoSpan:
    """Create the span of the video that takes the tokens [first, end) of the prompt.

    Asserts that there is a row for each placeholder.
    """
    takes_row = prompt.input_ids[first:end] == video_token_id
    assert int(takes_row.sum()) == len(visual.placeholder_rows)
    # Positions in the span count from the one after the preceding token.
    start = int(prompt.positions[0, first - 1]) + 1 if first else 0
    positions = (prompt.positions[:, first : end + 1] - start).to(torch.int32)
    name = hash_tensor(f"{visual.placeholder_hash} ", positions)
    return VideoSpan(first, takes_row, visual.placeholder_rows, positions, name)


def compute_mrope_positions(videos: Iterable[tuple[int, Tensor]], n_tokens: int, axes: int = 3) -> tuple[Tensor, int]:
    """Compute a prompt's M-RoPE positions [A,n_tokens] from the positions of its videos.

    Text tokens count up from the position after the preceding token or video.

    Args:
        videos: (the index of the first token, positions [A,S+1]) of each video, in any order. The positions are
            relative to the video's start, and the last column is that of the token after the video, equal on all axes.
        n_tokens: the length of the prompt.
        axes: A.

    Returns:
        The positions, and their delta: the position of a token after the prompt minus its index.
    """
    parts: list[Tensor] = []
    start = n_positioned = 0  # the position of the next token; the number of tokens with a position

    for first, positions in [*sorted(videos, key=lambda video: video[0]), (n_tokens, None)]:
        parts.append(torch.arange(start, start + first - n_positioned, device="cpu").expand(axes, -1))
        start, n_positioned = start + first - n_positioned, first
        if positions is not None:
            parts.append(positions[:, :-1] + start)
            start, n_positioned = start + int(positions[0, -1]), n_positioned + positions.shape[1] - 1
    return torch.cat(parts, dim=1), start - n_tokens
