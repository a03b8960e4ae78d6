"""Prompts of Patches: the kept tokens with renumbered positions (gstep/language/patches.py)."""

from __future__ import annotations

import torch

from gstep.language import Visual
from gstep.language.prompt import PromptBuilder, Segment


class PatchesPrompts(PromptBuilder):
    """Prompts with one-dimensional positions."""

    default_positions = "contiguous"
    axes = 1

    def _make_visual_segment(self, visual: Visual, frame: int | None) -> Segment:
        count = len(visual.index)
        return Segment(self._make_placeholders(count), torch.arange(count)[None], count)
