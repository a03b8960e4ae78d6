"""Evidence out of an attention layer while the stock model runs: its inputs are observed, never changed.

Attention weights of a whole video would be [T,heads,N,N]; here a frame's are made, used and dropped one frame after
the other, beside whatever kernel the model itself runs. Shapes: H heads, S patches of one frame, E size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle


def observing(module: nn.Module, see: Callable[[Tensor, dict[str, Any]], None]) -> RemovableHandle:
    """Call ``see`` with the hidden states and keyword arguments of every call of ``module``.

    The handle that comes back is a context, which ends that.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(args[0] if args else kwargs["hidden_states"], kwargs)

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def split_heads(hidden_SC: Tensor, weight: Tensor, bias: Tensor | None, n_heads: int) -> Tensor:
    """Project hidden states in the precision of the model, and split them by head: [H,S,E] float32."""
    projected_SC = linear(hidden_SC, weight, bias)
    return projected_SC.view(len(hidden_SC), n_heads, -1).transpose(0, 1).float()


def attention_received(query_HSE: Tensor, key_HSE: Tensor) -> Tensor:
    """Return the softmax attention that each key receives, averaged over heads and queries: [S]."""
    return _weights(query_HSE, key_HSE).mean(dim=(0, 1))


def merged_attention(query_HSE: Tensor, key_HSE: Tensor, merged: int) -> Tensor:
    """Return the attention [S/merged] of the mean query to groups of ``merged`` successive keys, averaged over heads.

    A group's key is the mean of its keys.
    """
    n_heads, _, size = key_HSE.shape
    key_HNE = key_HSE.reshape(n_heads, -1, merged, size).mean(dim=2)
    return _weights(query_HSE.mean(dim=1, keepdim=True), key_HNE).mean(dim=(0, 1))


def rotated(vectors_HSE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Apply rotary positions as the vision towers do: channel e turns with channel e + E/2."""
    first, second = vectors_HSE.chunk(2, dim=-1)
    return vectors_HSE * cos_SE.float() + torch.cat([-second, first], dim=-1) * sin_SE.float()


def _weights(query_HSE: Tensor, key_HSE: Tensor) -> Tensor:
    """Return the softmax attention weights [H, queries, keys]."""
    return torch.softmax(query_HSE @ key_HSE.transpose(1, 2) / math.sqrt(key_HSE.shape[-1]), dim=-1)
