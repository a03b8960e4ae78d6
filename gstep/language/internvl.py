"""Prompts of InternVL3 and 3.5: a line a frame with its number and its kept tokens; 1-D positions.

Follows InternVLProcessor.replace_video_token (transformers, models/internvl/processing_internvl.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gstep.language.prompt import PromptBuilder, Segment, kept_in_frame
from gstep.language.types import PromptPolicy
from gstep.types import Visual


class InternVLPrompts(PromptBuilder):
    """The prompt builder of InternVL; a frame without kept tokens keeps its line."""

    default_positions = "contiguous"
    axes = 1
    frame_markers = 1

    def __init__(self, config: Any, tokenizer: Any, chat_template: str, policy: PromptPolicy) -> None:
        super().__init__(config, tokenizer, chat_template, policy)
        # The template writes another token for a video than those that stand for its visual tokens.
        self._video_token = str(getattr(tokenizer, "video_token", "<video>"))

    def _with_markers(self, parts: list[str], visuals: Sequence[Visual]) -> list[tuple[str, int, int | None]]:
        marked: list[tuple[str, int, int | None]] = []
        before = parts[0]
        for video, (visual, after) in enumerate(zip(visuals, parts[1:], strict=True)):
            for frame in range(visual.n_frames):
                marked.append((f"{before}Frame{frame + 1}: <img>", video, frame))
                before = "</img>\n"
            before = f"</img>{after}"
        return [*marked, (before, len(visuals), None)]

    def _visual_segment(self, visual: Visual, frame: int | None) -> Segment:
        assert frame is not None
        kept = kept_in_frame(visual, frame)
        if self.policy.positions == "contiguous":
            positions, extent = torch.arange(len(kept), device="cpu"), len(kept)
        else:
            positions, extent = (kept % visual.tokens_per_frame).cpu(), visual.tokens_per_frame
        return Segment(self._placeholders(len(kept)), positions[None], extent)
