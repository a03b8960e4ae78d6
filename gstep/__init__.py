"""Prune a video's visual tokens with GSTEP and the methods it is compared with: tensors in, tensors out.

>>> pruned = gstep.prune(tokens_TND, retention_ratio=0.25)
>>> pruned.tokens, pruned.index  # [B,D] and [B], ascending
>>> pruned.at(0.10)  # the nested smaller selection
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gstep.errors import MissingEvidence, ModelError
from gstep.lazy import LazyTable, load_object
from gstep.pruners import PRUNERS, make_pruner
from gstep.types import PrunedTokens, VisualTokens, budget_for

__all__ = [
    "BACKBONES",
    "PRUNERS",
    "MissingEvidence",
    "ModelError",
    "PrunedTokens",
    "VisualTokens",
    "budget_for",
    "make_pruner",
    "prune",
]

BACKBONES: LazyTable

if not TYPE_CHECKING:

    def __getattr__(name):  # importing gstep loads no model code
        if name == "BACKBONES":
            return load_object("gstep.backbones:BACKBONES")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def prune(
    tokens: Tensor,
    retention_ratio: float = 0.25,
    method: str = "gstep",
    *,
    evidence: Mapping[str, Tensor] | None = None,
    budget: int | None = None,
    seed: int = 0,
    **params: Any,
) -> PrunedTokens:
    """Keep a share of one video's visual tokens.

    Args:
        tokens: [T,N,D], finite, float16, bfloat16, float32 or float64, on any device; it is not changed.
        retention_ratio: the share of the T*N tokens to keep, in (0, 1]: B = max(1, floor(r*T*N + 1e-9)).
        method: a key of PRUNERS.
        evidence: what else the encoder gives and some methods need, by name.
        budget: B itself, in [1, T*N]; overrides ``retention_ratio``.
        seed: of methods that draw; a non-negative integer.
        params: the method's hyper-parameters; for gstep: alpha, sigma, smoothing, radius, boundary, fusion, beta, eps.

    Returns:
        The kept tokens [B,D] in ascending index, of the input's dtype and device, without gradients.

    Raises:
        ValueError: an argument outside of what it accepts, which the message names.
        MissingEvidence: the method needs evidence that was not given.
    """
    visual = VisualTokens(tokens, {} if evidence is None else evidence)
    return make_pruner(method, **params).prune(visual, retention_ratio, budget=budget, seed=seed)
