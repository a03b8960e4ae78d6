"""Evidence of a SigLIP tower: observers of what goes into one of its modules while the stock model runs.

Shapes: S patches of a frame (27 x 27), C channels, E channels of an attention head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gstep.backbones.attention import attention_received, split_heads
from gstep.backbones.siglip.head import PoolingHead


class AttentionObserver:
    """An observer of a layer's attention, which computes the attention [T,S] and the keys [T,S,E] of all patches."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._attention: list[Tensor] = []
        self._keys: list[Tensor] = []

    def __call__(self, hidden_TSC: Tensor, kwargs: Mapping[str, Any]) -> None:
        layer = self.module
        for hidden_SC in hidden_TSC:
            query_HSE, key_HSE = (
                split_heads(hidden_SC, part.weight, part.bias, layer.num_heads) for part in (layer.q_proj, layer.k_proj)
            )
            self._attention.append(attention_received(query_HSE, key_HSE))
            self._keys.append(key_HSE.mean(dim=0))

    def seen(self) -> dict[str, Tensor]:
        """Return the evidence of all frames that went through, by its name."""
        return {"token_attention": torch.stack(self._attention), "token_key": torch.stack(self._keys)}


class ProbeObserver:
    """An observer of the tower's output, which computes features [T,C] and the attention [T,S] of the head's probe."""

    def __init__(self, module: Any, head: PoolingHead) -> None:
        self.module = module
        self._head = head
        self._seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, features_TSC: Tensor, kwargs: Mapping[str, Any]) -> None:
        self._seen += [self._head(features_1SC) for features_1SC in torch.split(features_TSC, 1)]

    def seen(self) -> dict[str, Tensor]:
        """Return the evidence of all frames that went through, by its name."""
        feature_TC, attention_TS = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        return {"frame_feature": feature_TC, "token_attention": attention_TS}


class PatchObserver:
    """An observer of the tower's output, which puts each patch into SigLIP's image-text space, [T,S,C]."""

    def __init__(self, module: Any, head: PoolingHead) -> None:
        self.module = module
        self._head = head
        self._seen: list[Tensor] = []

    def __call__(self, features_TSC: Tensor, kwargs: Mapping[str, Any]) -> None:
        # One frame at a time, since the MLP's hidden states are four times as wide as everything else.
        self._seen += [self._head.of_single_patches(features_1SC) for features_1SC in torch.split(features_TSC, 1)]

    def seen(self) -> dict[str, Tensor]:
        """Return the evidence of all frames that went through, by its name."""
        return {"image_embedding": torch.cat(self._seen)}
