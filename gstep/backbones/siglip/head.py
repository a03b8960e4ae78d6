"""SigLIP's attention-pooling head, from a SigLIP checkpoint: LLaVA-OneVision is made of its tower without the head.

The head runs in float32 whatever the encoder's precision: in 16 bits many tokens of a frame would get the same
attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gstep.checkpoints.pooling_head import PoolingHeadSource, head_identity, read_head
from gstep.errors import ModelError


class PoolingHead(nn.Module):
    """SigLIP's post_layernorm and attention-pooling head as one module without gradients, in eval mode."""

    def __init__(self, config: Any) -> None:
        from transformers.models.siglip.modeling_siglip import (  # noqa: PLC0415 - seconds, and rarely needed
            SiglipMultiheadAttentionPoolingHead,
        )

        super().__init__()
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.head = SiglipMultiheadAttentionPoolingHead(config)

    @classmethod
    def load(cls, source: PoolingHeadSource, device: str) -> PoolingHead:
        """Load the head that ``source`` describes onto ``device`` in float32.

        Raises ModelError where this node's weights are not those that were resolved, or do not fit the config.
        """
        from transformers import SiglipVisionConfig  # noqa: PLC0415

        tensors = read_head(source)
        if head_identity(tensors, source.config) != source.identity:
            raise ModelError(
                f"{source.name!r} has another pooling head on this node: copy the checkpoint to every node"
            )
        with torch.device("meta"):
            head = cls(SiglipVisionConfig(**source.config))
        try:
            head.load_state_dict(
                {name: value.to(device, torch.float32) for name, value in tensors.items()}, assign=True
            )
        except RuntimeError as error:
            raise ModelError(f"{source.name!r}: config.json does not fit the pooling head: {error}") from error
        return head.eval().requires_grad_(False)

    def forward(self, features_TSC: Tensor) -> tuple[Tensor, Tensor]:
        """Compute each frame's pooled feature [T,C] and the probe's attention [T,S], a head mean, of tower outputs."""
        seen: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
            seen.append(output[1].squeeze(1))  # the stock head drops it

        with self.head.attention.register_forward_hook(keep):
            feature_TC: Tensor = self.head(self.post_layernorm(features_TSC.float()))
        return feature_TC, seen[0]

    def of_single_patches(self, features_TSC: Tensor) -> Tensor:
        """Put each patch of some frames into SigLIP's image-text space, [T,S,C].

        A patch goes through the head as if the probe saw it alone. Attention over one position is 1 whatever the query
        is, so that the patch's value is the result; the rest is SiglipMultiheadAttentionPoolingHead.forward
        (transformers, models/siglip/modeling_siglip.py). CDPruner's official code, which is for CLIP alone, also
        sends each patch through what CLIP has for its pooled token: post_layernorm and the visual projection
        (llava/model/multimodal_encoder/clip_encoder.py).
        """
        attention = self.head.attention
        weight_CC, bias_C = attention.in_proj_weight.chunk(3)[2], attention.in_proj_bias.chunk(3)[2]
        value_TSC = linear(self.post_layernorm(features_TSC.float()), weight_CC, bias_C)
        pooled_TSC = linear(value_TSC, attention.out_proj.weight, attention.out_proj.bias)
        embedded_TSC: Tensor = pooled_TSC + self.head.mlp(self.head.layernorm(pooled_TSC))
        return embedded_TSC
