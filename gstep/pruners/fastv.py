"""FastV: tokens to which the language model attends in an early layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gstep.pruners.base import Pruner, Selection
from gstep.pruners.checks import check_integer
from gstep.selection.reference import find_largest
from gstep.types import VisualTokens


@dataclass(frozen=True, kw_only=True)
class FastV(Pruner):
    """The tokens that receive the most attention from the prompt's last token (github.com/pkunlp-icler/FastV).

    The rules are those of modeling_llama.py there. The method keeps max(1, round(r*M)) tokens, while B is floor(r*M).

    Attributes:
        K: Tokens are dropped before layer K of the language model, counted from 0, at least 1. The evidence
            ``llm_attention`` is the last query's attention in layer K-1, averaged over heads and restricted to the
            visual tokens.
    """

    name: ClassVar[str] = "fastv"
    nested: ClassVar[bool] = False
    cacheable: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"llm_attention"})

    K: int = 2

    def __post_init__(self) -> None:
        self._set(K=check_integer("K", self.K, 1))

    @property
    def layer(self) -> int:
        return self.K

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        return max(1, round(retention_ratio * n_frames * per_frame))

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        attention_M = visual.evidence["llm_attention"]
        return Selection(index=find_largest(attention_M, max(1, round(ratio * len(attention_M)))))
