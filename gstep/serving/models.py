"""vLLM's model classes of the Qwen families, modified to take kept tokens and their positions instead of pixels.

They follow vLLM 0.30 to 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

from gstep.serving.prompts import compute_mrope_positions


class _Cached:
    """The mixin with which a vLLM model takes cached tokens.

    The fields of a video are ``embeds`` [P,D*(1+levels)] and ``positions`` [3,S+1].
    """

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: Sequence[Any]) -> tuple[Tensor, int]:
        """Return a prompt's positions [3,n_tokens] and their delta, from the positions that came with its videos."""
        videos = [(feature.mm_position.offset, feature.data["positions"].data) for feature in mm_features]
        return compute_mrope_positions(videos, len(input_tokens))

    def embed_multimodal(self, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return each video's rows in the dtype and on the device of the language model; no vision tower runs."""
        weight = self.language_model.model.embed_tokens.weight  # type: ignore[attr-defined]
        return tuple(rows.to(weight.device, weight.dtype) for rows in kwargs["embeds"])


class CachedQwen2_5VL(_Cached, Qwen2_5_VLForConditionalGeneration):  # type: ignore[misc]  # noqa: N801
    """vLLM's Qwen2.5-VL for cached visual tokens."""


class _CachedLevels(_Cached):
    """The mixin that also takes deepstack levels, without a vision tower."""

    def __init__(self, *, vllm_config: Any, prefix: str = "model") -> None:
        """Build vLLM's model, and the deepstack settings and buffers unless vLLM has built them."""
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        if self.use_deepstack:  # type: ignore[has-type]
            return
        config = self.config  # type: ignore[attr-defined]
        self.use_deepstack = True
        self.deepstack_num_level = len(config.vision_config.deepstack_visual_indexes)
        self.multiscale_dim = self.visual_dim * self.deepstack_num_level  # type: ignore[attr-defined]
        self.deepstack_input_embeds = [
            torch.zeros(vllm_config.scheduler_config.max_num_batched_tokens, config.text_config.hidden_size)
            for _ in range(self.deepstack_num_level)
        ]
        self.deepstack_input_embeds_num_tokens = 0


class CachedQwen3VL(_CachedLevels, Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    """vLLM's Qwen3-VL for cached visual tokens."""


class CachedQwen3VLMoe(_CachedLevels, Qwen3VLMoeForConditionalGeneration):  # type: ignore[misc]
    """vLLM's Qwen3-VL mixture of experts for cached visual tokens."""


class CachedQwen3_5(_Cached, Qwen3_5ForConditionalGeneration):  # type: ignore[misc]  # noqa: N801
    """vLLM's Qwen3.5 for cached visual tokens."""


class CachedQwen3_5Moe(_Cached, Qwen3_5MoeForConditionalGeneration):  # type: ignore[misc]  # noqa: N801
    """vLLM's Qwen3.5 mixture of experts for cached visual tokens."""
