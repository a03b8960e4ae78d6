"""Prune a video's visual tokens with GSTEP or one of the methods that it is compared with: tensors in, tensors out.

>>> pruned = gstep.prune(tokens_TND, retention_ratio=0.25)
>>> pruned.tokens, pruned.index  # [B,D] and [B], in ascending index
>>> pruned.at(0.10)  # the nested selection at a smaller ratio
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
        tokens: [T,N,D] (frames, tokens per frame, hidden size), finite, in float16, bfloat16, float32 or float64, on
            any device. The tensor is not modified.
        retention_ratio: The share r of the T*N tokens to keep, in (0, 1]: B = max(1, floor(r*T*N + 1e-9)).
        method: A key of ``PRUNERS``, the import path ``module:Class`` of your own method (the module is imported), or a
            ``Pruner`` object such as ``MyMethod(p=2)``.
        evidence: Further outputs of the vision encoder or the LLM that some methods need, as float tensors by name:
            frame_feature [T,Dv], token_attention [T,N], token_key [T,N,Dk], image_embedding [T,N,De], text_embedding
            [Q,De], llm_attention [T*N], noise [T*N]. Evidence that the method does not use is ignored.
        budget: B itself, in [1, T*N]. If given, ``retention_ratio`` is ignored, and methods that compute with a ratio
            use B / (T*N).
        seed: A non-negative integer for methods that draw random numbers.
        grid: (rows, columns) of the N tokens of a frame, for methods that use positions. By default, the two factors of
            N that are closest to each other, such as (14, 14) for 196.
        times: The time of each of the T frames in seconds, by default one frame per second.
        params: The hyper-parameters of the method, which are the fields of its class. None are allowed if ``method`` is
            an object.

    Returns:
        The kept tokens [B,D] in ascending index, a new tensor with the dtype and device of ``tokens`` and without
        gradients, with their indices and, for nested methods, their ranks. A method whose class attribute ``exact`` is
        False may keep more or fewer than B tokens, but at least one; its class docstring gives the rule.

    Raises:
        ValueError: The method or a parameter is unknown, or an argument or evidence is invalid.
        MissingEvidence: The method needs evidence that ``evidence`` lacks; a subclass of ValueError.
        WrongSelection: Your own method returned an invalid selection; a subclass of RuntimeError. Errors that its
            ``select`` raises are passed on.
    """
    from gstep.pruners import make_pruner  # noqa: PLC0415 - torch loads with the first use, not with --help
    from gstep.types import VisualTokens  # noqa: PLC0415

    seconds = None if times is None else tuple(times)
    visual = VisualTokens(tokens, {} if evidence is None else evidence, grid=grid, times=seconds)
    return make_pruner(method, **params).prune(visual, retention_ratio, budget=budget, seed=seed)


if not TYPE_CHECKING:  # hidden from type checkers: to them every unknown attribute would look like a valid one
    __getattr__ = make_getattr(__name__, _PUBLIC)
