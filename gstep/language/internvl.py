"""Prompts of InternVL3 and 3.5: a line per frame with its number and its kept tokens; 1-D positions.

Follows InternVLProcessor.replace_video_token (transformers, models/internvl/processing_internvl.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gstep.language.prompt import PromptBuilder, PromptPiece, Segment, find_frame_indices
from gstep.language.types import PromptPolicy
from gstep.types import Visual


class InternVLPrompts(PromptBuilder):
    """The prompt builder of InternVL. A frame without kept tokens keeps its line in the prompt."""

    default_positions = "contiguous"
    axes = 1
    frame_markers = 1

    def __init__(self, config: Any, tokenizer: Any, chat_template: str, policy: PromptPolicy) -> None:
        super().__init__(config, tokenizer, chat_template, policy)
        # The template's token for a video differs from the placeholder of its visual tokens.
        self._video_token = str(getattr(tokenizer, "video_token", "<video>"))

    def _make_parts(self, texts: list[str], visuals: Sequence[Visual]) -> list[PromptPiece]:
        """Make a part for each frame, with "FrameN:" and image markers around its tokens, and a last text.

        N counts the frames of each video from 1.
        """
        parts: list[PromptPiece] = []
        before = texts[0]
        for video, (visual, after) in enumerate(zip(visuals, texts[1:], strict=True)):
            for frame in range(visual.n_frames):
                parts.append(PromptPiece(f"{before}Frame{frame + 1}: <img>", video, frame))
                before = "</img>\n"
            before = f"</img>{after}"
        return [*parts, PromptPiece(before)]

    def _make_visual_segment(self, visual: Visual, frame: int | None) -> Segment:
        """Make the segment of one frame's kept tokens, maybe none.

        Original positions count within the frame, and the segment extends over the whole frame.
        """
        assert frame is not None
        indices = find_frame_indices(visual, frame)
        if self.policy.positions == "contiguous":
            positions = torch.arange(len(indices), device="cpu")
            extent = len(indices)
        else:
            positions = (indices % visual.tokens_per_frame).cpu()
            extent = visual.tokens_per_frame
        return Segment(self._make_placeholders(len(indices)), positions[None], extent)
