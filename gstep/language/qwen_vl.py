"""Prompts of the Qwen families: M-RoPE positions (time, height, width) of the full grid, restricted to the kept tokens.

Follows get_rope_index of transformers (models/qwen2_5_vl/modeling_qwen2_5_vl.py, models/qwen3_vl/modeling_qwen3_vl.py)
and replace_video_token (models/qwen3_vl/processing_qwen3_vl.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gstep.language.prompt import PromptBuilder, PromptPiece, Segment, find_frame_indices
from gstep.language.types import PromptPolicy
from gstep.types import Visual


@dataclass(frozen=True)
class LibraryRule:
    """How one library version builds Qwen prompts.

    Attributes:
        text_after_time: Qwen2.5-VL: text continues after the largest position of the video, time included; if False,
            after the larger side of its grid, so that the text of a long video overlaps its last frames.
        whole_seconds: Qwen2.5-VL: the seconds of a temporal patch are truncated before they are multiplied.
        float64_times: Qwen2.5-VL: the seconds are multiplied in float64; if False, in float32, which may round a
            product up to the next integer.
        outer_markers: Qwen3-VL: the template's vision markers around the whole video stay, beside each frame's markers.
    """

    text_after_time: bool
    whole_seconds: bool
    float64_times: bool
    outer_markers: bool


RULES: Mapping[str, LibraryRule] = {
    "transformers-5": LibraryRule(text_after_time=False, whole_seconds=False, float64_times=False, outer_markers=True),
    "transformers-4.57": LibraryRule(
        text_after_time=True, whole_seconds=True, float64_times=False, outer_markers=False
    ),
    "vllm": LibraryRule(text_after_time=True, whole_seconds=False, float64_times=True, outer_markers=False),
}


@dataclass(frozen=True)
class Grid:
    """The grid of a video's visual tokens: T temporal patches of [height, width] tokens, after spatial merging."""

    n_frames: int
    height: int
    width: int

    @classmethod
    def of(cls, visual: Visual) -> Grid:
        """Read the grid of a video from its ``extra``, in tokens.

        Raises:
            ValueError: ``extra`` has no grid, or a grid that does not fit the number of tokens.
        """
        try:
            t, h, w = (int(n) for n in visual.extra["video_grid_thw"])
            merge = int(visual.extra["spatial_merge_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the cache has no grid of this video ({error}): prune it again") from error
        grid = cls(t, h // merge, w // merge)
        if (grid.n_frames, grid.height * grid.width) != (visual.n_frames, visual.tokens_per_frame):
            raise ValueError(f"a grid of {t} x {h} x {w} patches does not fit {visual.n_frames} frames of "
                             f"{visual.tokens_per_frame} tokens")  # fmt: skip
        return grid

    def coordinates(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convert flat indices [K] to their coordinates (t, h, w), each [K]."""
        in_frame = index % (self.height * self.width)
        return index // (self.height * self.width), in_frame // self.width, in_frame % self.width


class QwenPrompts(PromptBuilder):
    """The base of the Qwen prompt builders."""

    default_positions = "original"
    axes = 3

    def __init__(self, config: Any, tokenizer: Any, chat_template: str, policy: PromptPolicy) -> None:
        super().__init__(config, tokenizer, chat_template, policy)
        self.rule = RULES[policy.rule]

    def check(self, visual: Visual) -> None:
        """Raise ValueError if a video's cached tokens do not fit this model, or its grid does not fit them."""
        super().check(visual)
        Grid.of(visual)

    def _make_renumbered_segment(self, count: int) -> Segment:
        """Make a segment of ``count`` placeholders, in which all three axes count up from 0."""
        return Segment(self._make_placeholders(count), torch.arange(count, device="cpu").expand(3, -1), count)


class Qwen2_5Prompts(QwenPrompts):  # noqa: N801 - the model's own name
    """The prompt builder of Qwen2.5-VL: one segment per video, with temporal positions that advance with time."""

    def _make_visual_segment(self, visual: Visual, frame: int | None) -> Segment:
        """Make the segment of a whole video, with the positions of the policy; ``frame`` is ignored.

        Raises:
            ValueError: original positions are needed, and the cache lacks the seconds of a temporal patch.
        """
        if self.policy.positions == "contiguous":
            return self._make_renumbered_segment(len(visual.index))
        grid = Grid.of(visual)
        t, h, w = grid.coordinates(visual.index)
        times = self._compute_times(visual, grid.n_frames)
        extent = max(grid.height, grid.width)
        if self.rule.text_after_time:
            extent = max(extent, int(times[-1]) + 1)
        return Segment(self._make_placeholders(len(t)), torch.stack([times[t], h, w]), extent)

    def _compute_times(self, visual: Visual, n_frames: int) -> Tensor:
        """Compute the temporal position of each patch, [T] int64; ValueError if the cache lacks its seconds."""
        try:
            # float32, as in the stock processor
            seconds = torch.tensor(float(visual.extra["second_per_grid_ts"]), dtype=torch.float32, device="cpu")
        except KeyError:
            raise ValueError("the cache has no seconds of a temporal patch: prune the video again") from None
        if self.rule.whole_seconds:
            seconds = seconds.long()
        elif self.rule.float64_times:
            seconds = seconds.double()
        interval: Tensor = self.config.vision_config.tokens_per_second * seconds
        return (torch.arange(n_frames, device="cpu") * interval).long()


class Qwen3Prompts(QwenPrompts):
    """The prompt builder of Qwen3-VL and later: a time in text before every patch, even without kept tokens."""

    frame_markers = 1
    writes_times = True

    def __init__(self, config: Any, tokenizer: Any, chat_template: str, policy: PromptPolicy) -> None:
        super().__init__(config, tokenizer, chat_template, policy)
        self.deepstack_levels = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
        start, end = (int(getattr(config, f"vision_{name}_token_id")) for name in ("start", "end"))
        self._start, self._end = (str(tokenizer.convert_ids_to_tokens(i)) for i in (start, end))

    def _make_parts(self, texts: list[str], visuals: Sequence[Visual]) -> list[PromptPiece]:
        """Make a part for each temporal patch, with its time and vision markers around it, and a last text.

        If the rule has no outer markers, and the template writes them around every video, they are removed.
        """
        if not self.rule.outer_markers and all(
            before.endswith(self._start) and after.startswith(self._end) for before, after in itertools.pairwise(texts)
        ):
            last = len(texts) - 1
            texts = [
                text.removeprefix(self._end if i > 0 else "").removesuffix(self._start if i < last else "")
                for i, text in enumerate(texts)
            ]
        parts: list[PromptPiece] = []
        before = texts[0]
        for video, (visual, after) in enumerate(zip(visuals, texts[1:], strict=True)):
            for frame, seconds in enumerate(self._read_seconds(visual)):
                parts.append(PromptPiece(f"{before}<{seconds:.1f} seconds>{self._start}", video, frame))
                before = self._end
            before += after
        return [*parts, PromptPiece(before)]

    def _make_visual_segment(self, visual: Visual, frame: int | None) -> Segment:
        """Make the segment of one temporal patch's kept tokens, which may be empty."""
        assert frame is not None
        indices = find_frame_indices(visual, frame)
        if self.policy.positions == "contiguous":
            return self._make_renumbered_segment(len(indices))
        grid = Grid.of(visual)
        _, h, w = grid.coordinates(indices)
        # The time is in the text, so that all tokens of a patch share a temporal position.
        positions = torch.stack([torch.zeros_like(h), h, w])
        return Segment(self._make_placeholders(len(indices)), positions, max(grid.height, grid.width))

    def _read_seconds(self, visual: Visual) -> list[float]:
        """Return the seconds to write before each temporal patch, as the policy's ``frame_times`` says.

        Raises:
            ValueError: the cache lacks the values from which they are made.
        """
        if self.policy.frame_times == "stock":
            return self._compute_stock_seconds(visual)
        times = visual.extra.get("patch_timestamps")
        if times is None or len(times) != visual.n_frames:
            raise ValueError("the cache lacks the times of temporal patches: prune the video again")
        return [float(time) for time in times]

    def _compute_stock_seconds(self, visual: Visual) -> list[float]:
        """Compute the times of Qwen3VLProcessor._calculate_timestamps of transformers, to the last bit.

        A patch has the mean of the times of its first and last frame; the video's last frame fills up the last patch.
        Frame indices count from the start of the file, even for a clip.

        Raises:
            ValueError: the cache lacks the frame rate, or its frame indices do not make the video's patches.
        """
        frames = int(self.config.vision_config.temporal_patch_size)
        if not visual.fps or -(-len(visual.frame_indices) // frames) != visual.n_frames:
            raise ValueError(
                "the cache lacks the indices of the sampled frames or the video's frame rate: prune the video again, "
                "or use --frame-times true"
            )
        times = [index / visual.fps for index in visual.frame_indices]
        times += times[-1:] * (-len(times) % frames)
        return [(first + last) / 2 for first, last in zip(times[::frames], times[frames - 1 :: frames], strict=True)]
