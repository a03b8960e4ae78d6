"""Prune a video's visual tokens with GSTEP and the methods it is compared with: tensors in, tensors out.

>>> pruned = gstep.prune(tokens_TND, retention_ratio=0.25)
>>> pruned.tokens, pruned.index  # [B,D] and [B], ascending
>>> pruned.at(0.10)  # the nested smaller selection
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gstep.errors import MissingEvidence, ModelError
from gstep.lazy import LazyTable, make_getattr

if TYPE_CHECKING:
    from torch import Tensor

    from gstep.generic.live import pruning
    from gstep.pruners import PRUNERS, make_pruner
    from gstep.pruners.base import Pruner
    from gstep.types import PrunedTokens, VisualTokens, budget_for

    BACKBONES: LazyTable

_PUBLIC = LazyTable(
    "name",
    {
        "BACKBONES": "gstep.backbones:BACKBONES",
        "PRUNERS": "gstep.pruners:PRUNERS",
        "PrunedTokens": "gstep.types:PrunedTokens",
        "VisualTokens": "gstep.types:VisualTokens",
        "budget_for": "gstep.types:budget_for",
        "make_pruner": "gstep.pruners:make_pruner",
        "pruning": "gstep.generic.live:pruning",
    },
)

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
    "pruning",
]


def prune(
    tokens: Tensor,
    retention_ratio: float = 0.25,
    method: str | Pruner = "gstep",
    *,
    evidence: Mapping[str, Tensor] | None = None,
    budget: int | None = None,
    seed: int = 0,
    grid: tuple[int, int] | None = None,
    times: Sequence[float] | None = None,
    **params: Any,
) -> PrunedTokens:
    """Prune one video's visual tokens to a share of them.

    Args:
        tokens: [T,N,D], finite, float16, bfloat16, float32 or float64, on any device; it is not changed.
        retention_ratio: the share of the T*N tokens to keep, in (0, 1]: B = max(1, floor(r*T*N + 1e-9)).
        method: a key of PRUNERS, the import path ``module:Class`` of your own method, or a Pruner object, as in
            ``method=MyMethod(p=2)``.
        evidence: further outputs of the encoder or the LLM, which some methods need, as floats by name: frame_feature
            [T,Dv], token_attention [T,N], token_key [T,N,Dk], image_embedding [T,N,De], text_embedding [Q,De],
            llm_attention [T*N], noise [T*N]. Evidence that the method does not use is ignored.
        budget: B itself, in [1, T*N]; overrides ``retention_ratio``. Methods that count in shares (of a frame, or with
            rounding) take r = B / (T*N).
        seed: the seed of methods that draw random numbers, a non-negative integer.
        grid: (rows, columns) of the N tokens of a frame, for methods that look at positions. None is the factors of N
            that are nearest to each other, such as (14, 14) for 196.
        times: the seconds of the T frames, for methods that look at times. None is one second per frame.
        params: the method's hyper-parameters: the fields of its class, in their types. None with a Pruner object.

    Returns:
        The kept tokens [B,D] in ascending index, of the input's dtype and device, without gradients. Methods that are
        not ``exact`` keep more or fewer than B tokens, by the rule in their docstring, never none.

    Raises:
        ValueError: an argument or evidence that is not accepted, or a class that is no method; the message names it.
        MissingEvidence: the method needs evidence that is missing.
        RuntimeError: your own method returned an invalid selection.
    """
    from gstep.pruners import make_pruner  # noqa: PLC0415 - torch loads with the first use, not with --help
    from gstep.types import VisualTokens  # noqa: PLC0415

    seconds = None if times is None else tuple(times)
    visual = VisualTokens(tokens, {} if evidence is None else evidence, grid=grid, times=seconds)
    return make_pruner(method, **params).prune(visual, retention_ratio, budget=budget, seed=seed)


if not TYPE_CHECKING:  # hidden from type checkers: to them every unknown attribute would look like a valid one
    __getattr__ = make_getattr(__name__, _PUBLIC)
