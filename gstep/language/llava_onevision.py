"""Prompts of LLaVA-OneVision: all kept tokens of a video, then its newline row; 1-D positions.

Follows LlavaOnevisionProcessor (transformers, models/llava_onevision/processing_llava_onevision.py).
"""

from __future__ import annotations

import torch

from gstep.language.prompt import PromptBuilder, Segment
from gstep.types import Visual


class LlavaOnevisionPrompts(PromptBuilder):
    """The prompt builder of LLaVA-OneVision."""

    default_positions = "contiguous"
    axes = 1
    needs_newline = True

    def _make_visual_segment(self, visual: Visual, frame: int | None) -> Segment:
        """Make the segment of a whole video: a placeholder for each kept token, and a last one for the newline."""
        n_kept = len(visual.index)
        if self.policy.positions == "contiguous":
            positions = torch.arange(n_kept + 1, device="cpu")
            extent = n_kept + 1
        else:
            n_total = visual.n_frames * visual.tokens_per_frame
            positions = torch.cat([visual.index, torch.tensor([n_total], device="cpu")])
            extent = n_total + 1
        return Segment(self._make_placeholders(n_kept + 1), positions[None], extent)
