"""What an engine with a prefix cache must know of each video of a prompt: its rows, its place, and a name for both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gstep.language.types import Prompt, Visual, hash_of

SEPARATOR = "#"


@dataclass(frozen=True)
class VideoItem:
    """One video of a prompt as an engine with a prefix cache needs it: rows, place, positions and name.

    Attributes:
        first: the first token of its span in the prompt (``Prompt.spans``), which has S tokens. It holds the markers of
            all frames, for a frame of which nothing was kept takes room among the positions, too.
        takes_row: [S] bool, which of them are placeholders, P in all; the others are texts within the video.
        rows: [P,D*(1+levels)], what stands for the placeholders, deepstack levels side by side; on LLaVA-OneVision the
            last one is the newline. None where the engine reads them itself.
        positions: [A,S+1] int32, counted from where the span starts; the last is that of the text after the span.
        name: of rows and positions, so that spans of the same name are the same to the model; the name of rows that
            the engine reads comes first, up to the last SEPARATOR.
    """

    first: int
    takes_row: Tensor
    rows: Tensor | None
    positions: Tensor
    name: str


def video_items(prompt: Prompt, video_token_id: int) -> list[VideoItem]:
    """Return the videos of a prompt, in their order."""
    return [
        _item(prompt, visual, first, end, video_token_id)
        for visual, (first, end) in zip(prompt.visuals, prompt.spans, strict=True)
    ]


def _item(prompt: Prompt, visual: Visual, first: int, end: int, video_token_id: int) -> VideoItem:
    """Make the item of the video whose span is tokens [first, end) of the prompt."""
    rows, digest = (None, "") if visual.rows else (visual.placeholder_rows, visual.placeholder_hash)
    takes_row = prompt.input_ids[first:end] == video_token_id
    assert int(takes_row.sum()) == len(visual.index) + (visual.newline is not None)
    # Text goes on by one: the start follows the token before.
    start = int(prompt.positions[0, first - 1]) + 1 if first else 0
    positions = (prompt.positions[:, first : end + 1] - start).to(torch.int32)
    name = hash_of(f"{digest} ", positions)
    return VideoItem(first, takes_row, rows, positions, visual.rows + SEPARATOR + name if visual.rows else name)


def prompt_positions(videos: Iterable[tuple[int, Tensor]], n_tokens: int, axes: int = 3) -> tuple[Tensor, int]:
    """Compute a prompt's M-RoPE positions [A,n_tokens] from those of its videos, and their delta.

    Args:
        videos: (first token, positions [A,S+1] as of VideoItem) of each, in any order.

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
