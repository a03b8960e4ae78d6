"""Evidence of a SigLIP tower: an observer of what goes into one of its modules while the stock model runs.

Shapes: S patches of a frame (27 x 27), C channels, E channels of an attention head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gstep.backbones.attention import attention_received, split_heads
from gstep.backbones.siglip.head import PoolingHead


class FrameObserver:
    """An observer of the input of ``module``, [1,S,C] of each frame, of which ``evidence_of`` makes the evidence."""

    def __init__(self, module: nn.Module, evidence_of: Callable[[Tensor], dict[str, Tensor]]) -> None:
        self.module = module
        self._evidence_of = evidence_of
        self._seen: list[dict[str, Tensor]] = []

    def __call__(self, input_TSC: Tensor, kwargs: Mapping[str, Any]) -> None:
        # One frame at a time: all attention weights, and the MLP's hidden states, would be far larger than the rest.
        self._seen += [self._evidence_of(input_1SC) for input_1SC in torch.split(input_TSC, 1)]

    def seen(self) -> dict[str, Tensor]:
        """Return the evidence of all frames that went through, by its name."""
        return {name: torch.cat([frame[name] for frame in self._seen]) for name in self._seen[0]}


def last_layer_evidence(layer: Any, hidden_1SC: Tensor) -> dict[str, Tensor]:
    """Compute the attention [1,S] and the keys [1,S,E] of a frame's patches in an attention layer."""
    query_HSE, key_HSE = (
        split_heads(hidden_1SC[0], part.weight, part.bias, layer.num_heads) for part in (layer.q_proj, layer.k_proj)
    )
    return {"token_attention": attention_received(query_HSE, key_HSE)[None], "token_key": key_HSE.mean(dim=0)[None]}


def probe_evidence(head: PoolingHead, features_1SC: Tensor) -> dict[str, Tensor]:
    """Compute a frame's feature [1,C] and the attention [1,S] of the head's probe from the tower's output."""
    feature_1C, attention_1S = head(features_1SC)
    return {"frame_feature": feature_1C, "token_attention": attention_1S}


def patch_evidence(head: PoolingHead, features_1SC: Tensor) -> dict[str, Tensor]:
    """Put each patch of a frame into SigLIP's image-text space, [1,S,C]."""
    return {"image_embedding": head.of_single_patches(features_1SC)}
